"""How one installation runs its pairs: what the chart's values set. Read once, at start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(min_length=1, max_length=253)]


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


class DatabaseSecret(_Model):
    """Where the reference's pod finds the database's URL; the controller reads the same key from a file."""

    name: Name = "tandem-database"
    key: Name = "uri"


class DnsPeer(_Model):
    """Where the suspect's pod may ask for names."""

    namespace: str | None = "kube-system"
    labels: dict[str, str] = {"k8s-app": "kube-dns"}
    cidr: str | None = None
    """Instead of the two: an address block, such as that of a DNS cache on the node."""


class WorkerMetrics(_Model):
    """What the reference's pod tells Prometheus; the suspect's tells nothing."""

    enabled: bool = True
    allow_from: Annotated[list[dict[str, Any]], Field(alias="from")] = []
    """Peers (`NetworkPolicyPeer`) that may ask; empty: any pod that can reach it."""
    annotations: bool = False
    """Whether the pod carries ``prometheus.io/scrape`` and its kin."""


class WorkerSettings(_Model):
    """The pods of a pair."""

    image: Name
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: list[Name] = []
    service_account: Name = "tandem-worker"
    priority_class: Name | None = None
    run_as_user: int = 65532
    termination_grace_seconds: Annotated[int, Field(ge=10, le=3600)] = 120
    allowed_host_paths: list[str] = []
    """Folders of nodes below which a PairRun may mount; none by default."""
    dns: Annotated[list[DnsPeer], Field(min_length=1)] = [
        DnsPeer(),
        DnsPeer(namespace=None, labels={}, cidr="169.254.20.10/32"),
    ]
    """At least one: no peer at all would mean every peer to Kubernetes."""
    records_timeout_seconds: Annotated[int, Field(ge=1)] = 600
    """How long the reference's pod waits at its end for PostgreSQL to take the rest."""
    metrics: WorkerMetrics = WorkerMetrics()


class Settings(_Model):
    """Everything that the chart sets."""

    namespace: Name
    """The one namespace whose PairRuns are served."""
    worker: WorkerSettings
    database: DatabaseSecret = DatabaseSecret()
    mark_nodes: bool = False
    """Whether nodes get labels, annotations and a condition; report only by default."""
    workers: Annotated[int, Field(ge=1, le=32)] = 4
    """Reconciles at a time."""
    resync_seconds: Annotated[int, Field(ge=5, le=3600)] = 300
    """Every object is looked at again this often, whatever events came."""
    facts_seconds: Annotated[float, Field(ge=0.2, le=600)] = 5.0
    """How often the database is asked for the progress of live runs."""
    progress_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """How often step and counts are written to a PairRun's status at most."""
    pairing_seconds: Annotated[int, Field(ge=1, le=3600)] = 15
    """How often a PairRun without a partner looks again."""
    lease_seconds: Annotated[int, Field(ge=3, le=300)] = 15
