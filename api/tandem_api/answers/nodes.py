"""Nodes: the fleet, a profile (the object of `tandem node NAME --json`), history and decisions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tandem.vocabulary import NodeVerdict
from tandem_api.answers.base import (
    AT,
    RUN,
    Answer,
    Bound,
    ClassCounts,
    Counted,
    Damage,
    NextPage,
    Rate,
    RunHead,
    Timing,
    shown,
)
from tandem_api.answers.runs import LaunchAnswer


class FleetCounts(Answer):
    corrupting: int = shown(1)
    suspected: int = shown(2)
    clean: int = shown(40)
    unknown: int = shown(3)
    in_test: int = shown(1)


class FleetNode(Answer):
    """One node of the fleet, as `tandem nodes --json` has it."""

    node: str = shown("gpu-17")
    verdict: NodeVerdict = shown("corrupting")
    rule: str = shown("reproduced", "Stable name: see docs/nodes.md.")
    sentence: str = shown("corrupting: reproduced with 2 references, null run passed")
    since: float | None = shown(AT)
    missing: list[str] = shown([], "What a firmer verdict needs.")
    references: list[str] = shown(["gpu-3", "gpu-4"])
    evidence: str = shown("rank 1, fwd/attn, 7.5e-5, transient, 2 references")
    last_run: str | None = shown(RUN)
    last_run_at: float | None = shown(AT)
    runs: int = shown(3)
    running: int = shown(0)
    cleared_at: float | None = shown(None)


class NodePage(NextPage):
    """Those that need a person first come first."""

    counts: FleetCounts
    waiting: list[LaunchAnswer] = shown([], "Launches that wait, and why; on the first page only.")
    nodes: list[FleetNode]


class ClassLine(ClassCounts):
    steps: int = shown(2000)
    affected_steps: int = shown(17)
    per_element: Rate | None
    per_step: Rate | None


class DeviceLine(Answer):
    device: str = shown("cuda:1")
    rank: int | None = shown(1)
    device_hours: float = shown(0.3)
    mismatched_sites: int = shown(17)
    mismatched_elements: int = shown(1204)
    present: bool = shown(True, "False: replaced since.")


class MapLine(Answer):
    phase: str = shown("fwd")
    module: str = shown("attn")
    tensor: str = shown("out")
    cells: dict[str, Counted]


class SeverityBin(Answer):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)
    from_: float | None = Field(alias="from", examples=[0.1])
    to: float | None = shown(1.0)
    tensors: int = shown(9)


class TimelineBin(Answer):
    attempt: int = shown(1)
    first: int = shown(1)
    steps: int = shown(100)
    affected: int = shown(3)
    elements: int = shown(16_000_000)
    mismatched: int = shown(120)


class LeafNoise(Answer):
    affected_steps: int = shown(4)
    mismatched: int = shown(80)
    elements: int = shown(65536)
    frequency: float | None = shown(0.001)


class RunNoise(Answer):
    steps: int = shown(200)
    noisy: int = shown(40)
    wcnts: float | None = shown(0.051)
    worst_finite: float | None = shown(0.051)
    worst_step: int | None = shown(12)
    unbounded: int = shown(0)
    undefined: int = shown(0)
    least_cosine: float | None = shown(0.9999)
    leaves: dict[str, LeafNoise]


class RunDrift(Answer):
    arm: str = shown("suspect")
    points: int = shown(100)
    first: int | None = shown(3)
    last: int | None = shown(100)
    last_drift: float | None = shown(0.2)
    last_relative: float | None = shown(0.02)
    rate: float | None = shown(0.01)
    nonfinite: int = shown(0)


class NodeRun(RunHead):
    """A run behind the profile."""

    counted: bool = shown(True, "Whether its numbers are in the profile.")
    note: str = shown("", "Why not.")
    executables: str | None = shown("ab12")
    findings: int = shown(17)
    evidence: str = shown("rank 1, fwd/attn, 7.5e-5, transient")
    suspect_differs: bool = shown(False)
    reference_differs: bool = shown(False)
    steps_compared: int = shown(2000)
    steps_affected: int = shown(17)
    elements_compared: int = shown(420_000_000_000)
    mismatched_elements: int = shown(1204)
    device_hours: float = shown(0.6)
    devices: list[str] = shown(["cuda:0", "cuda:1"])
    timing: Timing | None
    timeline: list[TimelineBin]
    noise: RunNoise | None
    drifts: list[RunDrift]
    loss_spikes: dict[str, list[int]] = shown({})


class Decision(Answer):
    decision: str = shown("cleared")
    reason: str = shown("board replaced")
    decided_by: str = shown("ann@example.com")
    decided_at: float = shown(AT)
    run: str | None = shown(None)


class NodeAnswer(Damage):
    """What the records say of a node."""

    node: str = shown("gpu-17")
    verdict: NodeVerdict = shown("corrupting")
    rule: str = shown("reproduced")
    sentence: str = shown("corrupting: reproduced with 2 references, null run passed")
    evidence: str = shown("rank 1, fwd/attn, 7.5e-5, transient, 2 references")
    since: float | None = shown(AT)
    missing: list[str] = shown([])
    runs_counted: int = shown(2)
    runs_matching: int = shown(0)
    runs_as_reference: int = shown(0)
    references: list[str] = shown(["gpu-3", "gpu-4"])
    workloads: list[str] = shown(["submodule"])
    steps_compared: int = shown(4000)
    steps_affected: int = shown(17)
    per_step: Rate | None
    sites_compared: int = shown(1_300_000)
    elements_compared: int = shown(420_000_000_000)
    device_hours: float = shown(1.2)
    mismatched_sites: int = shown(17)
    mismatched_elements: int = shown(1204)
    bound: Bound | None
    classes: list[ClassLine]
    devices: list[DeviceLine]
    device_count: int | None = shown(8)
    ranks: dict[str, Counted]
    layer_map: list[MapLine]
    rank_map: list[MapLine]
    severities: list[SeverityBin]
    timing: Timing
    wcnts: float | None = shown(None)
    wcnts_unbounded: bool = shown(False)
    wcnts_run: str | None = shown(None)
    leaves: dict[str, Any] = shown({})
    drift_rate: float | None = shown(None)
    runs: list[NodeRun]
    decisions: list[Decision]
    not_checked: list[str] = shown(["Other models and shapes."])


class HistoryRun(Answer):
    what: Literal["run"]
    at: float = shown(AT)
    run: NodeRun


class HistoryDecision(Answer):
    what: Literal["decision"]
    at: float = shown(AT)
    decision: Decision


class HistoryPage(NextPage):
    """Runs and decisions of a node, the newest first."""

    node: str = shown("gpu-17")
    history: list[Annotated[HistoryRun | HistoryDecision, Field(discriminator="what")]]


class Clear(Answer):
    """The decision that what was found on a node counts no more."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"reason": "board replaced, RMA 4711"}]}
    )
    reason: str = Field(min_length=1, max_length=2000, pattern=r"\S", description="Why: it is kept for ever.")
