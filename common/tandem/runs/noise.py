"""Gradient noise of a run (RQ2), as one structure: what the records of workload ``gradient`` say. Pure.

Ratios and their rules are those of `tandem.statistics.noise`; here they stand step by step and leaf by leaf.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tandem import formats
from tandem.records import GradientRecord, MismatchRecord, RunRecords, StepRecord
from tandem.statistics.noise import Noise, noise, ratio
from tandem.vocabulary import Phase

_GRADIENT = f"{Phase.BWD}/"


@dataclass(frozen=True, slots=True)
class NoisePoint:
    """The whole gradient in one step."""

    attempt: int
    step: int
    measured: bool
    """False where leaves differed and their noise was never recorded."""
    ratio: float | None
    """Noise / signal; 0 where the digests of all leaves were equal; None without a measurement, or without a finite
    gradient of the reference."""
    noise: float | None
    signal: float | None
    """None for a step whose leaves were all equal: only digests moved."""
    cosine: float | None
    mismatched: int
    elements: int


@dataclass(frozen=True, slots=True)
class LeafLine:
    """One gradient leaf that ever differed."""

    leaf: str
    affected: int
    """Steps in which it mismatched."""
    mismatched: int
    elements: int
    """Compared: of the leaf times steps."""
    worst: float | None
    """Largest noise-to-signal ratio of the leaf alone; infinite: unbounded."""
    worst_step: int
    cosine: float | None
    """At that step."""

    @property
    def frequency(self) -> float:
        """Mismatching / compared elements."""
        return self.mismatched / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class NoiseSummary:
    """All of RQ2 that a run's records hold."""

    points: list[NoisePoint]
    totals: Noise
    """Over the measured steps of all attempts."""
    unmeasured: int
    """Steps whose gradients differed and whose noise was never recorded: WCNTS may be larger."""
    leaves: list[LeafLine]
    """The worst first."""

    @property
    def wcnts(self) -> float | None:
        """Largest ratio over the measured steps; None if no step was measured."""
        return self.totals.wcnts


def summarise_noise(records: RunRecords) -> NoiseSummary:
    """RQ2 of a run; the order of the records does not matter."""
    steps = {(s.attempt, s.step): s for s in records.steps if s.step > 0}
    whole = {(g.attempt, g.step): g for g in records.gradients if not g.leaf}
    differed = {(m.attempt, m.step) for m in records.mismatches if m.phase is Phase.BWD}
    points = [
        _measured(whole[key]) if key in whole else _without_row(steps[key], key in differed)
        for key in sorted(steps.keys() | whole.keys())
        if key in whole or any(name.startswith(_GRADIENT) for name in steps[key].classes)
    ]
    unmeasured = sum(not p.measured for p in points)
    totals = noise(records.gradients, len(points) - unmeasured)
    return NoiseSummary(points, totals, unmeasured, _leaves(records.gradients, totals))


def _measured(g: GradientRecord) -> NoisePoint:
    return NoisePoint(
        g.attempt, g.step, True, ratio(g.noise, g.signal), g.noise, g.signal, g.cosine, g.mismatched, g.elements
    )


def _without_row(step: StepRecord, differed: bool) -> NoisePoint:
    classes = [c for name, c in step.classes.items() if name.startswith(_GRADIENT)]
    equal = not differed and not any(c.mismatched_sites for c in classes)
    value = 0.0 if equal else None
    mismatched, elements = sum(c.mismatched_elements for c in classes), sum(c.elements for c in classes)
    return NoisePoint(step.attempt, step.step, equal, value, value, None, None, mismatched, elements)


def _leaves(rows: Iterable[GradientRecord], totals: Noise) -> list[LeafLine]:
    by_leaf: dict[str, list[GradientRecord]] = defaultdict(list)
    for row in rows:
        if row.leaf:
            by_leaf[row.leaf].append(row)
    out = []
    for leaf, found in by_leaf.items():
        worst = max(found, key=lambda g: (_size(ratio(g.noise, g.signal)), -g.step, -g.attempt))
        sums = totals.leaves[leaf]
        out.append(
            LeafLine(
                leaf=leaf,
                affected=sums.affected,
                mismatched=sums.mismatched,
                elements=sums.elements,
                worst=ratio(worst.noise, worst.signal),
                worst_step=worst.step,
                cosine=worst.cosine,
            )
        )
    return sorted(out, key=lambda n: (-_size(n.worst), -n.mismatched, n.leaf))


def _size(value: float | None) -> float:
    return -1.0 if value is None or math.isnan(value) else value


def not_measured(s: NoiseSummary, mismatches: Iterable[MismatchRecord]) -> list[str]:
    """What a reader must not conclude of RQ2."""
    out = []
    if s.unmeasured:
        out.append(
            f"The noise of {formats.plural(s.unmeasured, 'step')} whose gradients differed: WCNTS may be larger."
        )
    if s.totals.undefined:
        out.append(
            f"The noise of {formats.plural(s.totals.undefined, 'step')} in which the reference's own gradient is not "
            "finite: no ratio exists."
        )
    if lost := sum(m.mismatched is None for m in mismatches if m.phase is Phase.BWD):
        out.append(f"{lost:,} gradient leaves that differed and were never received: WCNTS may be larger.")
    out.append(
        "What the noise adds up to: parameters are synchronised after every step, so each starts from equal ones."
    )
    return out
