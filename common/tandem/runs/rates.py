"""How often and when a run's steps mismatched, with intervals that respect bursts. Pure.

The steps are those that a rate may count (`tandem.runs.independent`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.records import ClassCounts, StepRecord
from tandem.runs.independent import affected
from tandem.sites import in_frequency
from tandem.statistics.frequency import Rate, design_effect, per_element, per_step, sums
from tandem.statistics.timing import Timing, timing


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one or more site classes over the steps of all attempts, at `bounds.CONFIDENCE`."""

    per_step: Rate | None
    """Of the compared steps, those in which anything mismatched; None: none was compared."""
    per_element: Rate | None
    """Mismatching / all elements, steps as clusters."""
    design_effect: float | None
    """How many times larger the variance per element is than if elements were independent."""


def class_rates(steps: Iterable[StepRecord], workload: str) -> dict[tuple[str, str], Rates]:
    """(phase, module) -> rates of what counts in the workload's table."""
    by_cell: dict[tuple[str, str], list[ClassCounts]] = {}
    for step in steps:
        for name, counts in step.classes.items():
            phase, module, family = [*name.split("/"), "", ""][:3]
            if in_frequency(family, workload):
                by_cell.setdefault((phase, module), []).append(counts)
    return {cell: _rates([c] for c in found) for cell, found in by_cell.items()}


def overall(steps: Iterable[StepRecord]) -> Rates:
    """Rates of everything that was compared in steps from 1 on: a step is affected if any tensor mismatched."""
    return _rates(list(s.classes.values()) for s in steps if s.step > 0)


def _rates(clusters: Iterable[list[ClassCounts]]) -> Rates:
    total = sums(
        (
            sum(c.elements for c in cluster),
            sum(c.mismatched_elements for c in cluster),
            any(c.mismatched_sites for c in cluster),
        )
        for cluster in clusters
    )
    return Rates(per_step(total), per_element(total), design_effect(total))


def timing_of(steps: Iterable[StepRecord]) -> Timing:
    """When the steps of each attempt mismatched, all attempts together."""
    attempts: dict[int, list[StepRecord]] = {}
    for step in steps:
        if step.step > 0:
            attempts.setdefault(step.attempt, []).append(step)
    out = Timing()
    for found in attempts.values():
        hit = [s.step for s in found if affected(s)]
        out += timing(len(found), hit)
    return out
