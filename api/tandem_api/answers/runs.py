"""Runs, their records and their launch."""

from __future__ import annotations

from typing import Any, Literal

from tandem.vocabulary import Arm, AttemptState, Cause, Extent, Kind, Module, Phase, ReplayClass, Workload
from tandem_api.answers.base import AT, RUN, Answer, NextPage, RunHead, Severities, shown


class RunItem(RunHead):
    """One run of the list, as `tandem runs --json` has it."""

    state: Literal["running", "finished"] = shown("finished")
    synthetic: bool = shown(False, "Faults were injected: it says nothing about a node.")
    attempts: int = shown(1)
    step_rows: int = shown(2001, "Stored steps, step 0 included.")
    sites_compared: int = shown(1_300_000)
    elements_compared: int = shown(420_000_000_000)
    mismatched_sites: int = shown(17)
    mismatched_elements: int = shown(1204)


class ConditionAnswer(Answer):
    type: str = shown("Paired")
    status: str = shown("True")
    reason: str = shown("Chosen")
    message: str = shown("")
    since: float | None = shown(AT)


class LaunchAnswer(Answer):
    """What was asked for, and how it stands with whoever runs it."""

    run: str = shown(RUN, "Id that the run has, or will have.")
    name: str = shown("run-4f2a", "Of the PairRun; on one machine the run's id.")
    state: Literal["pending", "running", "finished", "failed"] = shown("pending")
    reason: str = shown("NoReference", "Why it waits or failed.")
    message: str = shown("no reference for gpu-17 among 3 nodes (Unlike 3)")
    created_at: float = shown(AT)
    kind: Kind = shown("suspect")
    workload: Workload = shown("submodule")
    model: str = shown("small")
    synthetic: bool = shown(False)
    node: str | None = shown("gpu-17")
    reference: str | None = shown(None)
    spec: dict[str, Any] = shown({"workload": "submodule", "steps": 2000}, "As it was asked for.")
    conditions: list[ConditionAnswer] = shown([])
    progress: dict[str, Any] | None = shown(None, "Latest progress of a run on this machine, from its supervisor.")


class RunPage(NextPage):
    runs: list[RunItem]
    pending: list[LaunchAnswer] = shown(
        [], "Launches that have no stored run yet, the newest first; on the first page of a list without filters only."
    )


class FirstPlace(Answer):
    attempt: int = shown(1)
    step: int = shown(96)
    site: str = shown("fwd/attn layer 3 out")
    rank: int = shown(1)
    mismatched: int | None = shown(12, "Elements; null if the tensor was never received.")


class ProgressAnswer(Answer):
    """How a run stands in the database."""

    attempt: int = shown(1, "The newest.")
    step: int | None = shown(412, "Its last stored step.")
    sites_compared: int = shown(1_300_000, "Of all attempts together, as what follows.")
    elements_compared: int = shown(420_000_000_000)
    mismatched_sites: int = shown(17)
    mismatched_elements: int = shown(1204)
    other_findings: int = shown(0)
    first_mismatch: FirstPlace | None
    steps_per_s: float | None = shown(3.1, "Of the newest hundred stored steps; null before two, and once it is over.")


class AttemptAnswer(Answer):
    attempt: int = shown(1)
    state: AttemptState = shown("closed")
    reason: str = shown("completed")
    started_at: float = shown(AT)
    ended_at: float | None = shown(AT + 590)
    fingerprint: str | None = shown("ab12cd34")
    parity: dict[str, Any] = shown({"jaxlib": "0.10.2"})
    reference_host: str = shown("gpu-3")
    suspect_host: str = shown("gpu-17")
    devices: int = shown(8)


class StoredRun(RunItem):
    sentence: str = shown("mismatch: 1,204 of 4.2e11 elements in 17 sites, all on rank 1")
    spec: dict[str, Any] = shown({"workload": "submodule", "steps": 2000}, "Everything that was asked for.")
    records_dropped_at: float | None = shown(None, "When retention dropped its rows.")
    attempt_list: list[AttemptAnswer]
    progress: ProgressAnswer | None


class RunAnswer(Answer):
    """A run: what is stored, what was asked for, or both."""

    run: str = shown(RUN)
    state: Literal["pending", "running", "finished", "failed"] = shown("running")
    stored: StoredRun | None
    launch: LaunchAnswer | None


class StepAnswer(Answer):
    attempt: int = shown(1)
    step: int = shown(412)
    classes: dict[str, tuple[int, int, int, int]] = shown(
        {"fwd/attn/out": (8, 8000, 1, 12)}, "Site class: sites, elements, mismatching sites, mismatching elements."
    )
    rows: int = shown(1, "Mismatch rows of the step, before any cap.")
    loss_reference: float | None = shown(2.5)
    loss_suspect: float | None = shown(2.5)
    grad_norm_reference: float | None = shown(1.25)
    grad_norm_suspect: float | None = shown(1.25)
    duration_s: float = shown(0.32)
    busy_s: float = shown(0.3)
    link_bytes: int = shown(1024)
    full_bytes: int = shown(10_000_000)
    window_max: int = shown(5)
    generation: int = shown(0)
    finished_at: float = shown(AT)
    sync: str = shown("optimistic")


class MismatchAnswer(Severities):
    """One rank's tensor that differed at one site; columns as in docs/records.md."""

    attempt: int = shown(1)
    step: int = shown(96)
    site: int = shown(31)
    rank: int = shown(1)
    phase: Phase = shown("fwd")
    module: Module = shown("attn")
    layer: int = shown(3)
    tensor: str = shown("out")
    cause: Cause = shown("compute")
    elements: int = shown(65536)
    mismatched: int | None = shown(12)
    zero_reference: int | None = shown(0)
    nonfinite: int | None = shown(0)
    nullified: int | None = shown(0)
    bits: list[int] | None = shown([0, 0, 12])
    first_index: int | None = shown(17)
    extent: Extent | None = shown("tile")
    box: list[list[int]] | None = shown([[0, 1], [2, 3]])
    replay: ReplayClass = shown("transient")
    replays: int = shown(3)
    replays_right: int = shown(3)
    generation: int = shown(1)
    detected_at: float = shown(AT)


class EvaluationAnswer(Answer):
    attempt: int = shown(1)
    step: int = shown(400)
    task: str = shown("arc")
    question: str = shown("arc-17")
    arm: Arm = shown("suspect")
    scores: list[float | None] = shown([-1.2, -0.4, -2.0, -3.1])
    chosen: int = shown(1)
    answer: int = shown(1)


class StepPage(NextPage):
    run: str = shown(RUN)
    steps: list[StepAnswer]


class MismatchPage(NextPage):
    run: str = shown(RUN)
    mismatches: list[MismatchAnswer]


class EvaluationPage(NextPage):
    run: str = shown(RUN)
    evaluations: list[EvaluationAnswer]
