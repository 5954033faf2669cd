"""What a run found: the object of `tandem show --json` (docs/json.md)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from tandem.vocabulary import Arm
from tandem_api.answers.base import Answer, Bound, ClassCounts, Counted, Damage, RunHead, Severities, Timing, shown


class Share(Answer):
    share: float | None = shown(0.0085)
    low: float | None = shown(0.005)
    high: float | None = shown(0.0136)


class OtherTensors(ClassCounts):
    frequency: float | None = shown(7.5e-5)


class TableLine(OtherTensors):
    per_step: Share | None
    per_element: Share | None


class FirstMismatch(Severities):
    attempt: int = shown(1)
    step: int = shown(96)
    site: int = shown(31)
    phase: str = shown("fwd")
    module: str = shown("attn")
    layer: int = shown(3)
    tensor: str = shown("out")
    rank: int = shown(1)
    cause: str = shown("compute")
    elements: int = shown(65536)
    mismatched: int | None = shown(12)
    first_index: int | None = shown(17)
    extent: str | None = shown("tile")
    replay: str = shown("transient")


class NoiseLeaf(Answer):
    leaf: str = shown("attn.3.wq")
    steps: int = shown(4)
    mismatched: int = shown(80)
    elements: int = shown(65536)
    frequency: float | None = shown(0.001)
    worst: float | None = shown(0.01)
    worst_step: int | None = shown(12)
    cosine: float | None = shown(0.9999)


class Noise(Answer):
    wcnts: float | None = shown(0.051)
    largest_finite: float | None = shown(0.051)
    largest_finite_step: int | None = shown(12)
    steps: int = shown(200)
    noisy_steps: int = shown(40)
    unbounded_steps: int = shown(0)
    undefined_steps: int = shown(0)
    unmeasured_steps: int = shown(0)
    least_cosine: float | None = shown(0.9999)
    leaves: list[NoiseLeaf]


class LossApart(Answer):
    step: int = shown(80)
    difference: float | None = shown(0.02)


class DriftArm(Answer):
    arm: str = shown("suspect")
    first_step: int | None = shown(3)
    last_step: int | None = shown(100)
    last_drift: float | None = shown(0.2)
    last_relative: float | None = shown(0.02)
    growth_per_step: float | None = shown(0.01)
    nonfinite: int = shown(0)


class DriftGroup(Answer):
    arm: str = shown("suspect")
    step: int = shown(100)
    group: str = shown("attn.3")
    drift: float | None = shown(0.05)
    relative: float | None = shown(0.01)


class Drift(Answer):
    first_divergence: int | None = shown(3)
    largest_loss_difference: LossApart | None
    loss_spikes: dict[str, list[int]] = shown({"suspect": [41]})
    resumed: dict[str, int] = shown({})
    arms: list[DriftArm]
    groups: list[DriftGroup]


class Found(Answer):
    found: int = shown(90)
    of: int = shown(100)
    share: float | None = shown(0.9)
    low: float | None = shown(0.83)
    high: float | None = shown(0.94)


class Against(Answer):
    disagreement: Found
    only_arm: int = shown(1)
    only_reference: int = shown(2)
    difference: float | None = shown(-0.01)
    difference_interval: list[float | None] = shown([-0.03, 0.01])
    p_value: float | None = shown(1.0)
    equal_scores: int = shown(80)
    missing: int = shown(0)


class AnswerLine(Answer):
    step: int = shown(400)
    task: str = shown("arc", "Empty: all tasks.")
    arm: Arm = shown("suspect")
    accuracy: Found
    unanswered: int = shown(0)
    against_reference: Against | None


class Control(Answer):
    name: str = shown("self_replay_start")
    role: str = shown("suspect")
    status: str = shown("ok")
    records: int = shown(12)
    failed: int = shown(0)
    repeats: int | None = shown(8)
    failures: list[str] = shown([])


class FaultLevel(Answer):
    records: int = shown(17)
    changed_elements: int = shown(1204)


class FaultLog(Answer):
    records: int = shown(17)
    changed_elements: int = shown(1204)
    by_level: dict[str, FaultLevel]
    output_sites: int = shown(17)
    output_changed: int = shown(1204)
    found_sites: int = shown(17)
    found_elements: int = shown(1204)
    unequal: int = shown(0)
    unexplained_sites: int = shown(0)
    exact: bool = shown(True)


class SummaryAnswer(Damage, RunHead):
    """Everything that the records of a run say."""

    sentence: str = shown("mismatch: 1,204 of 4.2e11 elements in 17 sites")
    state: str = shown("finished")
    synthetic: bool = shown(False)
    spec: dict[str, Any] = shown({"workload": "submodule"})
    fingerprint: str | None = shown("ab12cd34")
    parity: dict[str, Any] = shown({"jaxlib": "0.10.2"})
    attempts: int = shown(1)
    attempts_closed: int = shown(1)
    steps_compared: int = shown(2000)
    sites_compared: int = shown(1_300_000)
    elements_compared: int = shown(420_000_000_000)
    mismatched_sites: int = shown(17)
    mismatched_elements: int = shown(1204)
    table: list[TableLine]
    other_tensors: list[OtherTensors]
    first_mismatch: FirstMismatch | None
    ranks: dict[str, Counted]
    layers: dict[str, Counted]
    steps_affected: Share | None
    timing: Timing
    gradient_noise: Noise | None
    drift: Drift | None
    answers: list[AnswerLine]
    controls: list[Control]
    devices: list[str] = shown(["cuda:0", "cuda:1"])
    device_hours: float = shown(0.6)
    bound: Bound | None
    mismatch_rows: int = shown(17)
    mismatch_rows_total: int = shown(17)
    capped: bool = shown(False)
    link_bytes: int = shown(1_000_000)
    full_bytes: int = shown(5_000_000_000)
    duration_s: float = shown(640.0)
    fault_log: FaultLog | None
    not_checked: list[str] = Field(examples=[["Communication between nodes"]])
