"""The tables, as SQLAlchemy models. Their columns follow ``tandem.records``; migrations must equal them.

What grows with steps (`PARTITIONED`) is partitioned by range of ``run_id``, a UUIDv7, so that a month is a range of ids
(``tandem.db.partitions``). Every natural key includes ``run_id``: a record that is replayed can only land in the
partition in which it landed first. The tables that the sink writes carry no foreign key: it would cost a lookup per
row, and a run is always inserted before its worker starts.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKey, Identity, Index, Integer, MetaData, Text, func
from sqlalchemy import text as sql
from sqlalchemy.dialects.postgresql import ARRAY, DOUBLE_PRECISION, JSON, JSONB
from sqlalchemy.dialects.postgresql import UUID as PG_UUID
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

PARTITIONED = ("steps", "mismatches", "faults", "evaluations", "gradients", "drifts")
"""Tables partitioned by month of the run id."""


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - read by DeclarativeBase
        str: Text,
        float: DOUBLE_PRECISION,
        datetime: DateTime(timezone=True),
        UUID: PG_UUID(as_uuid=True),
        dict[str, Any]: JSONB,
        list[int]: ARRAY(BigInteger),
        list[str]: ARRAY(Text),
        list[list[int]]: JSONB,
    }


_EMPTY = sql("''::text")
_NO_KEYS = sql("'{}'::jsonb")
_ZERO = sql("0")


class Run(Base):
    """One workload on one pair. ``synthetic`` never changes after the insert (trigger)."""

    __tablename__ = "runs"
    __table_args__ = (
        CheckConstraint("state IN ('running', 'finished')", name="state"),
        CheckConstraint("verdict IN ('match', 'mismatch', 'inconclusive')", name="verdict"),
        CheckConstraint("(state = 'finished') = (verdict IS NOT NULL)", name="finished_has_verdict"),
        Index(None, "suspect_node", "run_id"),
        Index(None, "reference_node", "run_id"),
    )

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    created_at: Mapped[datetime]
    workload: Mapped[str]
    kind: Mapped[str]
    model: Mapped[str]
    synthetic: Mapped[bool]
    reference_node: Mapped[str]
    suspect_node: Mapped[str]
    spec: Mapped[dict[str, Any]]
    state: Mapped[str]
    verdict: Mapped[str | None]
    reason: Mapped[str] = mapped_column(server_default=_EMPTY)
    sentence: Mapped[str] = mapped_column(server_default=_EMPTY)
    finished_at: Mapped[datetime | None]
    supervisor: Mapped[dict[str, Any]] = mapped_column(server_default=_NO_KEYS)
    """Identity of the process that supervises the run (``tandem.db.liveness``)."""
    records_dropped_at: Mapped[datetime | None]
    """When retention dropped the run's rows of the partitioned tables."""


class Attempt(Base):
    """One incarnation of a run's two workers."""

    __tablename__ = "attempts"
    __table_args__ = (
        CheckConstraint("state IN ('running', 'closed', 'orphaned')", name="state"),
        Index("ix_attempts_running", "run_id", postgresql_where=sql("state = 'running'")),
    )

    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.run_id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    state: Mapped[str]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    reason: Mapped[str] = mapped_column(server_default=_EMPTY)
    fingerprint: Mapped[str | None]
    parity: Mapped[dict[str, Any]] = mapped_column(server_default=_NO_KEYS)
    reference_host: Mapped[str] = mapped_column(server_default=_EMPTY)
    suspect_host: Mapped[str] = mapped_column(server_default=_EMPTY)
    devices: Mapped[int] = mapped_column(Integer, server_default=sql("1"))
    """Devices of the suspect: seconds of a step times this are its device-seconds."""
    images: Mapped[dict[str, Any] | None]
    """Role -> digest of the image that its pod ran; NULL outside a cluster."""


class Step(Base):
    """One step; ``classes`` maps a site class to [sites, elements, mismatched sites, mismatched elements]."""

    __tablename__ = "steps"
    __table_args__ = ({"postgresql_partition_by": "RANGE (run_id)"},)

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    classes: Mapped[dict[str, Any]]
    rows: Mapped[int] = mapped_column(BigInteger)
    loss_reference: Mapped[float | None]
    loss_suspect: Mapped[float | None]
    grad_norm_reference: Mapped[float | None]
    grad_norm_suspect: Mapped[float | None]
    duration_s: Mapped[float]
    busy_s: Mapped[float]
    link_bytes: Mapped[int] = mapped_column(BigInteger)
    full_bytes: Mapped[int] = mapped_column(BigInteger)
    window_max: Mapped[int]
    generation: Mapped[int] = mapped_column(BigInteger)
    finished_at: Mapped[datetime]
    sync: Mapped[str]


class Mismatch(Base):
    """One rank's tensor that differed at one site."""

    __tablename__ = "mismatches"
    __table_args__ = ({"postgresql_partition_by": "RANGE (run_id)"},)

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    site: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    tensor: Mapped[str] = mapped_column(primary_key=True)
    phase: Mapped[str]
    module: Mapped[str]
    layer: Mapped[int]
    cause: Mapped[str]
    elements: Mapped[int] = mapped_column(BigInteger)
    mismatched: Mapped[int | None] = mapped_column(BigInteger)
    severity_mean: Mapped[float | None]
    severity_median: Mapped[float | None]
    severity_max: Mapped[float | None]
    zero_reference: Mapped[int | None] = mapped_column(BigInteger)
    nonfinite: Mapped[int | None] = mapped_column(BigInteger)
    nullified: Mapped[int | None] = mapped_column(BigInteger)
    bits: Mapped[list[int] | None]
    first_index: Mapped[int | None] = mapped_column(BigInteger)
    extent: Mapped[str | None]
    box: Mapped[list[list[int]] | None]
    replay: Mapped[str]
    replays: Mapped[int]
    replays_right: Mapped[int]
    generation: Mapped[int] = mapped_column(BigInteger)
    detected_at: Mapped[datetime]


class Control(Base):
    """One control on one side, written by the reference."""

    __tablename__ = "controls"

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    ok: Mapped[bool]
    repeats: Mapped[int]
    detail: Mapped[dict[str, Any]]


class Fault(Base):
    """Ground truth of the injector in a synthetic run."""

    __tablename__ = "faults"
    __table_args__ = ({"postgresql_partition_by": "RANGE (run_id)"},)

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    site: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    level: Mapped[str] = mapped_column(primary_key=True)
    changed: Mapped[int] = mapped_column(BigInteger)
    elements: Mapped[list[int]]


class Closing(Base):
    """Written last; its counts must equal the rows stored."""

    __tablename__ = "closings"

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    steps: Mapped[int] = mapped_column(BigInteger)
    mismatches: Mapped[int] = mapped_column(BigInteger)
    mismatches_total: Mapped[int] = mapped_column(BigInteger)
    controls: Mapped[int] = mapped_column(BigInteger)
    faults: Mapped[int] = mapped_column(BigInteger)
    gradients: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    drifts: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    evaluations: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    capped: Mapped[bool]
    reason: Mapped[str]
    device_seconds: Mapped[float]
    devices: Mapped[list[str]]
    finished_at: Mapped[datetime]


class Evaluation(Base):
    """One question of a quality evaluation, answered by a checkpoint of one arm."""

    __tablename__ = "evaluations"
    __table_args__ = ({"postgresql_partition_by": "RANGE (run_id)"},)

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    task: Mapped[str] = mapped_column(primary_key=True)
    question: Mapped[str] = mapped_column(primary_key=True)
    arm: Mapped[str] = mapped_column(primary_key=True)
    scores: Mapped[list[float]] = mapped_column(ARRAY(DOUBLE_PRECISION))
    """Score of each choice, in the order of the question."""
    chosen: Mapped[int]
    answer: Mapped[int]


class Gradient(Base):
    """Gradient noise of one step: of a leaf that differed, or (empty leaf) of the whole gradient."""

    __tablename__ = "gradients"
    __table_args__ = ({"postgresql_partition_by": "RANGE (run_id)"},)

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    leaf: Mapped[str] = mapped_column(primary_key=True)
    noise: Mapped[float]
    signal: Mapped[float]
    suspect: Mapped[float]
    cosine: Mapped[float | None]
    elements: Mapped[int] = mapped_column(BigInteger)
    mismatched: Mapped[int] = mapped_column(BigInteger)


class Drift(Base):
    """Distance of an arm's parameters from the reference's after a step."""

    __tablename__ = "drifts"
    __table_args__ = ({"postgresql_partition_by": "RANGE (run_id)"},)

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    arm: Mapped[str] = mapped_column(primary_key=True)
    part: Mapped[str] = mapped_column(primary_key=True)
    method: Mapped[str] = mapped_column(primary_key=True)
    drift: Mapped[float | None]
    norm: Mapped[float | None]
    error: Mapped[float]
    loss: Mapped[float | None]
    grad_norm: Mapped[float | None]


class RunProfile(Base):
    """What a finished run adds to its node's profile, written with its verdict and in the same transaction.

    Only runs that are not synthetic and whose two sides are on different hosts have one. Outlives retention. The
    counts are of the conclusive attempts of a conclusive run, and 0 otherwise.
    """

    __tablename__ = "run_profiles"
    __table_args__ = (
        Index("ix_run_profiles_passed_null", "executables", postgresql_where=sql("passed_null")),
        Index("ix_run_profiles_unsteady", "run_id", postgresql_where=sql("reference_differs OR suspect_differs")),
    )

    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.run_id", ondelete="CASCADE"), primary_key=True)
    version: Mapped[int]
    """Of the summary: another one is made anew while the rows are there."""
    executables: Mapped[str]
    passed_null: Mapped[bool]
    comparable: Mapped[bool]
    reference_differs: Mapped[bool]
    suspect_differs: Mapped[bool]
    findings: Mapped[int] = mapped_column(BigInteger)
    attempts: Mapped[list[int]]
    steps: Mapped[int] = mapped_column(BigInteger)
    affected_steps: Mapped[int] = mapped_column(BigInteger)
    sites: Mapped[int] = mapped_column(BigInteger)
    elements: Mapped[int] = mapped_column(BigInteger)
    mismatched_sites: Mapped[int] = mapped_column(BigInteger)
    mismatched_elements: Mapped[int] = mapped_column(BigInteger)
    device_seconds: Mapped[float]
    devices: Mapped[list[str]]
    device_count: Mapped[int]
    evidence: Mapped[str]
    detail: Mapped[dict[str, Any]] = mapped_column(JSON)
    """``tandem.nodes.run_profile.Detail``; JSON, not JSONB: it is read whole, and as it was written."""
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AttemptTotals(Base):
    """Totals of what is stored of an attempt, so that nobody who asks how it stands reads its rows.

    Counts change only by steps and answers that were really inserted. ``first_...`` is the least (step, site, rank) of
    its rows.
    """

    __tablename__ = "attempt_totals"

    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    last_step: Mapped[int | None] = mapped_column(BigInteger)
    steps: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    sites: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    elements: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    mismatched_sites: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    mismatched_elements: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    other_findings: Mapped[int] = mapped_column(BigInteger, server_default=_ZERO)
    """Rows with another cause than ``compute``, those beyond the cap included, and answers whose scores differ."""
    first_step: Mapped[int | None] = mapped_column(BigInteger)
    first_site: Mapped[int | None]
    first_rank: Mapped[int | None]
    first_place: Mapped[str | None]
    """Phase, module, layer and tensor, for people."""
    first_mismatched: Mapped[int | None] = mapped_column(BigInteger)
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Fence(Base):
    """The newest leader that has written, per name: whoever comes with a smaller token is refused."""

    __tablename__ = "fences"

    name: Mapped[str] = mapped_column(primary_key=True)
    token: Mapped[int] = mapped_column(BigInteger)


class NodeDecision(Base):
    """A person's recorded decision about a node. Append only (trigger)."""

    __tablename__ = "node_decisions"
    __table_args__ = (Index(None, "node", "decided_at"),)

    decision_id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    node: Mapped[str]
    decision: Mapped[str]
    reason: Mapped[str]
    decided_by: Mapped[str]
    decided_at: Mapped[datetime] = mapped_column(server_default=func.now())
    run_id: Mapped[UUID | None]
