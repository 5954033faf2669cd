"""The rows of one attempt, as the rules about runs take them, and what was found in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.records import (
    AttemptRow,
    ClosingRecord,
    ControlRecord,
    EvaluationRecord,
    MismatchRecord,
    RunRecords,
    StepRecord,
)
from tandem.vocabulary import Arm, ControlName, Role

NODE_DEVICES = "node_devices"
"""Parity field of a run in a cluster: how many devices the suspect's node has; its pod may see fewer."""
LEAST_REPEATS = 2
"""Self-replays below which nothing was repeated."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One incarnation of a run's two workers."""

    row: AttemptRow
    steps: list[StepRecord]
    mismatches: list[MismatchRecord]
    controls: list[ControlRecord]
    others: tuple[int, int, int, int]
    """Rows of faults, gradients, drifts, evaluations."""
    evaluations: list[EvaluationRecord]
    closing: ClosingRecord | None


def of_attempt(records: RunRecords, row: AttemptRow) -> Attempt:
    """Its rows among those of the run."""
    mine = row.attempt
    closings = [c for c in records.closings if c.attempt == mine]
    return Attempt(
        row=row,
        steps=sorted((s for s in records.steps if s.attempt == mine), key=lambda s: s.step),
        mismatches=[m for m in records.mismatches if m.attempt == mine],
        controls=[c for c in records.controls if c.attempt == mine],
        others=(
            sum(x.attempt == mine for x in records.faults),
            sum(x.attempt == mine for x in records.gradients),
            sum(x.attempt == mine for x in records.drifts),
            sum(x.attempt == mine for x in records.evaluations),
        ),
        evaluations=[e for e in records.evaluations if e.attempt == mine],
        closing=closings[0] if closings else None,
    )


def parity_of(controls: list[ControlRecord]) -> dict[str, str]:
    """The reference's parity fields, as an attempt's control rows hold them."""
    return {c.subject: str(c.detail.get("reference", "")) for c in controls if c.name is ControlName.PARITY}


def devices_of_node(controls: list[ControlRecord]) -> int:
    """How many devices the suspect's node has, whatever the run computed on; 0: never told."""
    told = parity_of(controls)
    counts = (told.get(field, "") for field in ("device_count", NODE_DEVICES))
    return max((int(t) for t in counts if t.isascii() and t.isdecimal() and len(t) < 7), default=0)


def differs(a: Attempt) -> bool:
    """Whether anything was found."""
    return bool(a.mismatches or counted_tensors(a) or suspect_differs(a) or unequal_answers(a))


def unequal_answers(a: Attempt) -> list[EvaluationRecord]:
    """The suspect's answers whose scores are not the reference's, bit by bit."""
    keys = {(e.step, e.task, e.question): repr(e.scores) for e in a.evaluations if e.arm == Arm.REFERENCE}
    return [
        e
        for e in a.evaluations
        if e.arm == Arm.SUSPECT and keys.get((e.step, e.task, e.question), "") not in ("", repr(e.scores))
    ]


def reference_differs(a: Attempt) -> bool:
    """Whether the reference did not repeat its own results."""
    names = (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END, ControlName.REPLAY_REFERENCE)
    return any(c.name in names and c.role is Role.REFERENCE and not c.ok for c in a.controls)


def counted_tensors(a: Attempt) -> int:
    """Tensors that differed by the steps' own counts: where nothing is synchronised, most of them have no row."""
    return sum(c.mismatched_sites for s in a.steps for c in s.classes.values())


def suspect_differs(a: Attempt) -> list[ControlRecord]:
    """Self-replays in which the suspect differs from itself while the reference, as often repeated, does not."""
    names = (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END)
    steady = {
        (c.name, c.subject): c.repeats for c in a.controls if c.name in names and c.role is Role.REFERENCE and c.ok
    }
    return [
        c
        for c in a.controls
        if c.name in names and c.role is Role.SUSPECT and not c.ok
        and steady.get((c.name, c.subject), 0) >= c.repeats >= LEAST_REPEATS
    ]  # fmt: skip
