"""The status of a PairRun: what the controller writes, and what people and other controllers read. Pure.

Counts and the first mismatch only: fast or large data belongs in PostgreSQL. Times are RFC 3339, UTC, whole seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from tandem.pairrun import names
from tandem.pairrun.spec import Device

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""What PostgreSQL keeps in four bytes."""


class _Model(BaseModel):
    # A status may come from a newer controller, or from a hand: what is unknown is dropped.
    model_config = ConfigDict(
        extra="ignore", frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


class Condition(_Model):
    """As Kubernetes' own: lastTransitionTime changes only with the status."""

    type: str = Field(description="Kind of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(description="CamelCase name of why.")
    message: str = Field("", description="One sentence for people.")
    last_transition_time: str = Field(description="When the status last changed.")
    observed_generation: int = Field(0, description="Generation of the spec that this was said of.")


class PassedOver(_Model):
    """A node that was not chosen."""

    node: str = Field(description="Its name.")
    role: str = Field(description="For which side: suspect or reference.")
    reason: str = Field(description="CamelCase name of why not.")
    message: str = Field("", description="One sentence for people.")


class Chosen(_Model):
    """A node that was chosen."""

    node: str = Field(description="Its name.")
    reason: str = Field("", description="Why this one.")
    boot_id: str = Field("", description="The boot that the attempt runs in.")
    image: str = Field("", description="Digest of the image that its pod ran, as the node says.")


class AttemptStatus(_Model):
    """One incarnation of the pair."""

    number: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(description="From 1.")
    suspect: Chosen = Field(description="Node under test.")
    reference: Chosen = Field(description="Healthy node.")
    device: Device = Field(Device.CPU, description="Resource that each pod asks for.")
    devices: Count = Field(0, description="How many of it.")
    tp: Count = Field(0, description="Tensor-parallel ranks: how many of them compute.")
    node_devices: Count = Field(0, description="How many the suspect's node has, dropped ones included.")
    started_at: str = Field(description="When it was decided.")
    running_at: str | None = Field(None, description="When both pods ran.")
    ended_at: str | None = Field(None, description="When it ended.")
    reason: str = Field("", description="How it ended: completed, stopped, or the named reason.")
    message: str = Field("", description="One sentence for people.")
    infrastructure: bool = Field(False, description="Whether that reason says nothing about the nodes' arithmetic.")

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks; an older controller used every device."""
        return self.tp or self.devices


class Counts(_Model):
    """What was compared so far."""

    sites: int = Field(0, description="Tensors compared, site x rank.")
    elements: int = Field(0, description="Elements compared.")
    mismatched_sites: int = Field(0, description="Tensors that differed although their inputs were equal.")
    mismatched_elements: int = Field(0, description="Elements that differed in them.")
    other_findings: int = Field(0, description="Kept inputs that changed, and other findings outside the frequency.")


class FirstMismatch(_Model):
    """Where the pair first differed."""

    step: int = Field(description="Optimizer step.")
    site: str = Field(description="Phase, module, layer and tensor.")
    rank: int = Field(description="Tensor-parallel rank.")
    mismatched: int | None = Field(None, description="Elements that differed.")


class PairRunStatus(_Model):
    """Everything that the controller says of a PairRun."""

    observed_generation: int = Field(0, description="Generation of the spec that this was said of.")
    run_id: str = Field("", description="Id of the run in PostgreSQL.")
    conditions: list[Condition] = Field(
        [], description="Paired, Running, RecordsDelivered, Finished, Succeeded, Failed; Refused where something was."
    )
    suspect: Chosen | None = Field(None, description="Node under test, of the current or last attempt.")
    reference: Chosen | None = Field(None, description="Healthy node, of the current or last attempt.")
    passed_over: list[PassedOver] = Field([], description="Nodes that were not chosen, and why; the first 50.")
    passed_over_total: int = Field(0, description="How many they are in all.")
    attempts: list[AttemptStatus] = Field([], description="Every attempt, the newest last; the last 20.")
    attempt: Count = Field(0, description="Number of the current or last attempt.")
    step: int = Field(0, description="Last compared step of the current or last attempt.")
    steps: int | None = Field(None, description="Steps asked for.")
    counts: Counts = Field(Counts(), description="What was compared so far, all attempts together.")
    first_mismatch: FirstMismatch | None = Field(None, description="Where the pair first differed.")
    progress_at: str | None = Field(None, description="When step and counts were last written.")
    verdict: str = Field("", description="match, mismatch or inconclusive; empty before the end.")
    reason: str = Field("", description="Stable name of why a run is inconclusive; completed otherwise.")
    message: str = Field("", description="The verdict as one sentence, with its evidence or its bound.")
    finished_at: str | None = Field(None, description="When the verdict was given.")

    def condition(self, kind: str) -> Condition | None:
        """The condition of that type."""
        return next((c for c in self.conditions if c.type == kind), None)

    def holds(self, kind: str) -> bool:
        """Whether the condition is there and True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    def to_object(self) -> dict[str, Any]:
        """As it is written to the cluster; fields without a value are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def read_status(values: Any) -> PairRunStatus:
    """The status of an object from the cluster. What a hand made unreadable in it counts as absent, field by field."""
    if not isinstance(values, Mapping):
        return PairRunStatus()
    try:
        return PairRunStatus.model_validate(values)  # as nearly every one is; field by field takes ten times as long
    except ValueError:
        pass
    kept: dict[str, Any] = {}
    for name, field in PairRunStatus.model_fields.items():
        alias = field.alias or name
        if alias not in values:
            continue
        try:
            PairRunStatus.model_validate({alias: values[alias]})
        except ValueError:
            continue
        kept[alias] = values[alias]
    return PairRunStatus.model_validate(kept)


def finished(obj: Mapping[str, Any]) -> bool:
    """Whether a PairRun, as the cluster holds it, has come to its end."""
    return read_status(obj.get("status")).holds(names.FINISHED)


def set_condition(
    conditions: Sequence[Condition],
    kind: str,
    status: bool | None,
    reason: str,
    message: str,
    now: float,
    generation: int,
) -> list[Condition]:
    """The conditions with one set. ``status`` None is Unknown. Its transition time changes only if its status does."""
    word: Literal["True", "False", "Unknown"] = "Unknown" if status is None else "True" if status else "False"
    before = next((c for c in conditions if c.type == kind), None)
    since = before.last_transition_time if before is not None and before.status == word else timestamp(now)
    new = Condition(
        type=kind, status=word, reason=reason, message=message[:1024], last_transition_time=since,
        observed_generation=generation,
    )  # fmt: skip
    if before is None:
        return [*conditions, new]
    return [new if c.type == kind else c for c in conditions]


def timestamp(now: float) -> str:
    """UTC seconds since the epoch as RFC 3339."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(stamp: str | None) -> float | None:
    """The reverse; None for what is no time."""
    try:
        return datetime.fromisoformat((stamp or "").replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
