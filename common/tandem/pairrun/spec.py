"""The spec of a PairRun. One model: the CRD's schema is generated from it, and the controller reads objects with it.

Pure. Field docs say the default and what may change later; everything else is fixed once the object exists.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from tandem.errors import SpecError
from tandem.pairrun import workload
from tandem.spec import RunSpec, validate
from tandem.vocabulary import Kind

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""A DNS subdomain: the name of an object."""
Label = Annotated[str, Field(max_length=63)]
Key = Annotated[str, Field(min_length=1, max_length=317)]
Quantity = Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Seconds = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Device(StrEnum):
    """What a pod of the pair computes on: an extended resource of the node, or its CPUs."""

    AUTO = "auto"
    NVIDIA = "nvidia.com/gpu"
    AMD = "amd.com/gpu"
    TPU = "google.com/tpu"
    CPU = "cpu"


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


class Requirement(_Model):
    """One expression of a label selector."""

    key: Key = Field(description="Label key.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(description="How the values relate.")
    values: list[Label] = Field([], max_length=64, description="For In and NotIn: the values.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.operator in ("In", "NotIn")) is not bool(self.values):
            raise ValueError(f"{self.operator} takes {'values' if not self.values else 'no values'}")
        return self

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether labels satisfy it, as Kubernetes reads it."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
        return self.key not in labels


class Selector(_Model):
    """A label selector over nodes."""

    match_labels: dict[Key, Label] = Field({}, max_length=64, description="Labels that a node must have.")
    match_expressions: list[Requirement] = Field([], max_length=64, description="Requirements, all of which hold.")

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether a node's labels satisfy it; an empty selector takes every node."""
        return all(labels.get(k) == v for k, v in self.match_labels.items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class NodeChoice(_Model):
    """Which node a side runs on: named, selected, or left to Tandem."""

    node_name: Name | None = Field(None, description="This node. Not beside selector.")
    selector: Selector | None = Field(None, description="One of these nodes. Not beside nodeName.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.node_name is not None and self.selector is not None:
            raise ValueError("give nodeName or selector, not both")
        return self

    def matches(self, name: str, labels: dict[str, str]) -> bool:
        """Whether a node may be chosen."""
        if self.node_name is not None:
            return name == self.node_name
        return self.selector is None or self.selector.matches(labels)


class Resources(_Model):
    """What each pod of the pair asks its node for."""

    device: Device = Field(
        Device.AUTO,
        description="Kind of device. Default: auto, the accelerator that the suspect's node offers, else cpu.",
    )
    devices: Literal["all", "allocatable"] = Field(
        "all",
        description="all: every device that the node has, and a node with fewer allocatable ones is refused. "
        "allocatable: as many as the suspect's node still offers, and as many on the reference. Both pods ask for "
        "them; workload.tp of them compute. Default: all.",
    )
    cpu: Quantity = Field("1", description="CPUs that each pod requests. Default: 1.")
    memory: Quantity = Field("2Gi", description="Memory that each pod requests and is limited to. Default: 2Gi.")


class EnvVar(_Model):
    """One environment variable of both pods."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Name; Tandem's own (TANDEM_...) are refused."
    )
    value: Annotated[str, Field(max_length=4096)] = Field("", description="Value.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name.startswith("TANDEM_"):
            raise ValueError(f"{self.name}: the TANDEM_ variables are the controller's")
        return self


class Volume(_Model):
    """A volume of both pods, for weights, data and caches."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name, unique in the list."
    )
    mount_path: Annotated[str, Field(max_length=1024, pattern=r"^/[^:]+$")] = Field(
        description="Where the pods see it."
    )
    read_only: bool = Field(True, description="Default: true.")
    persistent_volume_claim: Name | None = Field(None, description="A claim in the PairRun's namespace.")
    config_map: Name | None = Field(None, description="A ConfigMap in the PairRun's namespace.")
    empty_dir: Quantity | None = Field(None, description="An empty folder of at most this size.")
    host_path: Annotated[str, Field(max_length=1024, pattern=r"^/")] | None = Field(
        None, description="A folder of the node; only below what the installation allows."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        sources = (self.persistent_volume_claim, self.config_map, self.empty_dir, self.host_path)
        if sum(source is not None for source in sources) != 1:
            raise ValueError(
                f"volume {self.name}: give exactly one of persistentVolumeClaim, configMap, emptyDir, hostPath"
            )
        return self


class Toleration(_Model):
    """A toleration of both pods. The key is required: a blanket toleration would hide what a node is marked with."""

    key: Key = Field(description="Taint key.")
    operator: Literal["Exists", "Equal"] = Field("Exists", description="Default: Exists.")
    value: Label | None = Field(None, description="For Equal: the taint's value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Effect; absent: all effects."
    )


class Template(_Model):
    """What may be changed of both pods."""

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Worker image. Default: the installation's."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="Default: the installation's."
    )
    env: list[EnvVar] = Field([], max_length=64, description="Environment variables, the same on both sides.")
    volumes: list[Volume] = Field([], max_length=16, description="Volumes, the same on both sides.")
    tolerations: list[Toleration] = Field([], max_length=32, description="Further tolerations of both pods.")
    priority_class_name: Name | None = Field(None, description="Default: the installation's.")
    runtime_class_name: Name | None = Field(None, description="Default: none.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for what, names in (("env", [e.name for e in self.env]), ("volumes", [v.name for v in self.volumes])):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{what}: {twice[0]} comes twice")
        return self


class RetryPolicy(_Model):
    """What happens when an attempt ends for a reason that says nothing about the nodes."""

    max_attempts: Annotated[int, Field(ge=1, le=20)] = Field(3, description="Attempts in all. Default: 3.")
    max_attempts_per_node: Annotated[int, Field(ge=1, le=20)] = Field(
        2, description="Attempts on one reference node before another is taken. Default: 2."
    )
    backoff_seconds: Seconds = Field(
        30, description="Wait before the second attempt; doubled for each further one. Default: 30."
    )


class PairRunSpec(_Model):
    """What a PairRun asks for. After creation only the fields in MUTABLE change."""

    kind: Kind = Field(
        Kind.SUSPECT,
        description="suspect: a quarantined node against a healthy one. null: two healthy nodes, which must match. "
        "swap: a suspect that ran before, against another reference. Default: suspect.",
    )
    suspect: NodeChoice = Field(
        NodeChoice(), description="The node under test. Default: any quarantined node without a live run."
    )
    reference: NodeChoice = Field(
        NodeChoice(), description="The healthy node. Default: the idle one that is most like the suspect."
    )
    workload: dict[str, Any] = Field({}, description="What the pair runs.")
    resources: Resources = Field(Resources(), description="What each pod asks its node for.")
    template: Template = Field(Template(), description="What may be changed of both pods.")
    retry: RetryPolicy = Field(RetryPolicy(), description="When an attempt says nothing about the nodes.")
    start_deadline_seconds: Annotated[int, Field(ge=10, le=86_400)] = Field(
        900, description="Both pods must run within this time, image pulls included, or both are removed. Default: 900."
    )
    active_deadline_seconds: Annotated[int, Field(ge=60, le=2**31 - 1)] | None = Field(
        None, description="An attempt that runs longer is ended. Default: none. May change."
    )
    suspend: bool = Field(False, description="Removes the pods and starts none. Default: false. May change.")
    ttl_seconds_after_finished: Seconds | None = Field(
        None, description="The object is deleted this long after it finished. Default: never. May change."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = (self.suspect.node_name, self.reference.node_name)
        if names[0] is not None and names[0] == names[1]:
            raise ValueError(f"suspect and reference are the same node, {names[0]}")
        workload.to_run_spec(self.workload, self.kind)
        return self

    @property
    def run(self) -> RunSpec:
        """The run spec of the workers."""
        return workload.to_run_spec(self.workload, self.kind)


MUTABLE = ("suspend", "ttlSecondsAfterFinished", "activeDeadlineSeconds")
"""Fields of the spec that may change after creation."""


def read_spec(values: Any) -> PairRunSpec:
    """The spec of an object from the cluster.

    Raises:
        SpecError: one line that names the field.
    """
    if not isinstance(values, dict):
        raise SpecError("spec: must be an object")
    return validate(PairRunSpec, values, "spec")
