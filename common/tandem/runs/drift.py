"""Drift of a run (RQ3): what the records of workloads ``training`` and ``finetune`` say, as one structure. Pure.

The drift of an arm after a step is ||p_a - p_r||, the L2 distance of its parameters from the reference's, estimated
from linear sketches or measured exactly; beside it stands the ratio to ||p_r||.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem import formats
from tandem.records import DriftRecord, RunRecords, StepRecord
from tandem.runs.lineage import counts, lineage, resumed_at
from tandem.statistics.drift import DriftLine, drift_lines, spikes_of
from tandem.vocabulary import Arm, Cause, ControlName

EXACT = "exact"


@dataclass(frozen=True, slots=True)
class StepValues:
    """Losses and gradient norms of one step; None: not recorded."""

    step: int
    loss_reference: float | None
    loss_suspect: float | None
    grad_norm_reference: float | None
    grad_norm_suspect: float | None


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """Distance of one arm's parameters, or of one group of them, from the reference's after a step."""

    step: int
    arm: str
    part: str
    exact: bool
    drift: float | None
    """None where neither the sketch nor an exact measurement could say."""
    norm: float | None
    error: float
    """One standard deviation of the drift's relative error; 0 if exact."""
    loss: float | None
    """The arm's own, for the baseline."""
    grad_norm: float | None

    @property
    def ratio(self) -> float | None:
        """Drift / ||p_r||; infinite where the drift is not finite."""
        if self.drift is None or self.norm is None:
            return None
        if not math.isfinite(self.drift):
            return math.inf
        if self.drift == 0:
            return 0.0
        return self.drift / self.norm if self.norm > 0 else math.inf


@dataclass(frozen=True)
class DriftSummary:
    """All of RQ3 that a run's records hold, of the last course of training (see `lineage`)."""

    steps: list[StepValues]
    points: list[DriftPoint]
    """Of the whole model, by arm, step and method."""
    groups: list[DriftPoint]
    """Exact ones of single parameter groups."""
    lines: list[DriftLine]
    """Onset, end and rate of each arm that has drift (`tandem.statistics.drift`)."""
    spikes: dict[str, list[int]]
    """Arm -> steps at which a spike of its loss begins (`tandem.statistics.drift.loss_spikes`)."""
    first_divergence: int | None
    """First step with a digest that differed, also where an earlier run or attempt had it; None: all were equal."""
    resumed: dict[int, int]
    """Attempt -> step of the checkpoint from which it went on."""
    started_from: int
    """The step before the first one recorded; above 0 for a run that goes on from an earlier one."""

    @property
    def arms(self) -> list[str]:
        """Arms that have drift, the suspect first."""
        found = {p.arm for p in self.points}
        return [a.value for a in (Arm.SUSPECT, Arm.BASELINE) if a in found]

    def last(self, arm: str) -> DriftPoint | None:
        """The last known drift of an arm, an exact one before an estimate of the same step."""
        known = [p for p in self.points if p.arm == arm and p.drift is not None]
        return max(known, key=lambda p: (p.step, p.exact), default=None)

    def largest_difference(self) -> tuple[int, float] | None:
        """(step, |loss_s - loss_r|) where the losses were furthest apart; None if no step has both.

        A loss of one side alone that is not finite counts as infinitely far.
        """
        apart = [(v.step, loss_difference(v)) for v in self.steps]
        known = [(step, d) for step, d in apart if d is not None]
        return max(known, key=lambda pair: (pair[1], -pair[0]), default=None)


def loss_difference(values: StepValues) -> float | None:
    """|loss_s - loss_r|: infinite if exactly one is not finite, 0 if neither is, None if one was not recorded."""
    r, s = values.loss_reference, values.loss_suspect
    if r is None or s is None:
        return None
    if math.isfinite(r) and math.isfinite(s):
        return abs(s - r)
    return math.inf if math.isfinite(r) != math.isfinite(s) else 0.0


def summarise_drift(records: RunRecords) -> DriftSummary:
    """RQ3 of a run; the order of the records does not matter."""
    course = lineage(records)
    steps = {
        s.step: s
        for s in sorted(records.steps, key=lambda s: s.attempt)
        if s.step > 0 and counts(course, s.attempt, s.step)
    }
    rows = {
        (d.arm, d.step, d.part, d.method): d
        for d in sorted(records.drifts, key=lambda d: d.attempt)
        if counts(course, d.attempt, d.step)
    }
    points = [_point(rows[key]) for key in sorted(rows)]
    differed = {step for step, row in steps.items() if _differed(row)}
    differed |= {
        m.step
        for m in records.mismatches
        if counts(course, m.attempt, m.step) and (m.step > 0 or m.cause is not Cause.DERIVED)
    }
    # What differed in a loaded checkpoint began before it: the checkpoint says when, and its rows are of step 0.
    differed |= {
        c.detail["diverged"]
        for c in records.controls
        if c.name is ControlName.RESUMED and c.attempt in course and c.detail.get("diverged", 0) > 0
    }
    return DriftSummary(
        steps=[
            StepValues(n, s.loss_reference, s.loss_suspect, s.grad_norm_reference, s.grad_norm_suspect)
            for n, s in sorted(steps.items())
        ],
        points=[p for p in points if not p.part],
        groups=[p for p in points if p.part and p.exact],
        lines=drift_lines(list(rows.values())),
        spikes=spikes_of(steps.values(), rows.values()),
        first_divergence=min(differed, default=None),
        resumed={a: step for a, step in resumed_at(records.controls).items() if a in course},
        started_from=min(steps, default=1) - 1,
    )


def _point(d: DriftRecord) -> DriftPoint:
    return DriftPoint(d.step, d.arm, d.part, d.method == EXACT, d.drift, d.norm, d.error, d.loss, d.grad_norm)


def _differed(step: StepRecord) -> bool:
    return any(c.mismatched_sites for c in step.classes.values())


def not_measured(drift: DriftSummary, *, asked: bool) -> list[str]:
    """What a reader must not conclude of RQ3; ``asked``: the run was to have a baseline."""
    out = []
    if drift.started_from:
        out.append(f"Steps 1 to {drift.started_from:,}: this run goes on from a checkpoint of an earlier one.")
    known = {(p.arm, p.step) for p in drift.points if p.drift is not None}
    unknown = {(p.arm, p.step) for p in drift.points} - known
    if unknown:
        out.append(
            f"The drift after {formats.plural(len(unknown), 'step')}: the sketch could not be trusted, and no "
            "exact measurement was due."
        )
    baseline = [p for p in drift.points if p.arm == Arm.BASELINE]
    if asked and not any(p.exact for p in baseline):  # what it ends with
        reached, last = max((p.step for p in baseline), default=0), max((v.step for v in drift.steps), default=0)
        out.append(
            "How far another seed alone would have drifted by the end: the baseline, which was asked for, was not "
            f"trained to the end ({reached:,} of {formats.plural(last, 'step')})."
        )
    elif not baseline:
        out.append("How far another seed alone would have drifted: the run has no baseline (--baseline seed).")
    if drift.first_divergence is not None and drift.steps and drift.first_divergence < drift.steps[-1].step:
        out.append(
            f"How often errors come after step {drift.first_divergence:,}: the sides are apart from then on, and what "
            "follows from one difference enters no rate."
        )
    out.append("Where a difference began inside a step: nothing is synchronised, so that it reaches all that follows.")
    return out
