"""Mismatch frequencies by fault event, as the instrument check judges them. Pure.

A *fault event* is a spike: a run of steps in which a class of sites mismatches, with fewer than ``APART`` clean steps
in between, whatever the number of sites, ranks and elements. Spikes are independent of each other, their elements are
not, so the interval of a frequency takes each event, and each clean step, as one cluster
(``tandem.statistics.frequency``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from tandem import formats
from tandem.paper import published
from tandem.records import RunRecords
from tandem.statistics import frequency
from tandem.vocabulary import Module, Phase

APART = 2
"""Clean steps between two events, at least; fewer do not separate, which errs towards fewer events, wider intervals."""
CONFIDENCE = 0.99
"""Of the intervals: a dozen frequencies are judged at once, and one in twenty would be too many to miss by chance."""
ENOUGH_EVENTS = 100
"""Independent events from which a frequency counts as measured."""

Column = tuple[Phase, Module]


class ClassTotals(NamedTuple):
    """One step of one class of sites."""

    step: int
    elements: int
    mismatched: int


class Measured(msgspec.Struct, frozen=True):
    """A mismatch frequency with what it rests on."""

    elements: int
    mismatched: int
    steps: int
    events: int
    low: float
    high: float
    """Of the interval at `CONFIDENCE`, events as clusters."""

    @property
    def frequency(self) -> float:
        """Mismatching / all elements."""
        return self.mismatched / self.elements if self.elements else 0.0

    def holds(self, value: float) -> bool:
        """Whether the interval holds a published value."""
        return self.low <= value <= self.high

    def line(self) -> str:
        """In words."""
        return (
            f"{formats.scientific(self.frequency)} [{formats.scientific(self.low)}, {formats.scientific(self.high)}] "
            f"({formats.plural(self.events, 'event')}, {formats.plural(self.mismatched, 'element')}, "
            f"{formats.plural(self.steps, 'step')})"
        )


def measured(steps: Iterable[ClassTotals]) -> Measured:
    """Frequency of one class of sites from its steps, in any order.

    Raises:
        ValueError: no step compared any element.
    """
    ordered = sorted(s for s in steps if s.elements)
    clusters, events = clustered(ordered)
    rate = frequency.per_element(frequency.sums(clusters), CONFIDENCE)
    if rate is None:
        raise ValueError("no element was compared")
    elements, mismatched = (sum(s[i] for s in ordered) for i in (1, 2))
    return Measured(elements, mismatched, len(ordered), events, rate.low, rate.high)


def clustered(steps: Sequence[ClassTotals]) -> tuple[list[tuple[int, int, bool]], int]:
    """(elements, mismatching elements, whether any mismatched) of each cluster, and the number of events.

    Args:
        steps: in order. Clean steps inside an event belong to it.
    """
    clusters: list[tuple[int, int, bool]] = []
    quiet: list[ClassTotals] = []
    """Clean steps since the last event: part of it if it goes on soon."""
    events, last = 0, None
    for s in steps:
        if not s.mismatched:
            quiet.append(s)
            continue
        if last is None or s.step - last > APART:
            clusters += [(q.elements, 0, False) for q in quiet]
            clusters.append((s.elements, s.mismatched, True))
            events += 1
        else:
            elements, mismatched, _ = clusters[-1]
            inside = sum(q.elements for q in quiet)
            clusters[-1] = (elements + inside + s.elements, mismatched + s.mismatched, True)
        quiet, last = [], s.step
    clusters += [(q.elements, 0, False) for q in quiet]
    return clusters, events


def of_run(records: RunRecords) -> dict[Column, Measured]:
    """The columns of the paper's table from the step records of a run's last attempt, which are exact.

    Columns in which nothing was compared are left out.
    """
    last = max((s.attempt for s in records.steps), default=0)
    found: dict[Column, list[ClassTotals]] = {column: [] for column in published.COLUMNS}
    for step in records.steps:
        if step.attempt != last or step.step < 1:
            continue
        for column, totals in found.items():
            tensor = "out" if column[0] is Phase.FWD else "dx"
            counts = step.classes.get(f"{column[0]}/{column[1]}/{tensor}")
            if counts is not None:
                totals.append(ClassTotals(step.step, counts.elements, counts.mismatched_elements))
    return {column: measured(totals) for column, totals in found.items() if totals}
