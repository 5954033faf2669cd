"""Counts of one step and of the run so far, kept by the reference. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.records import ClassCounts, MismatchRecord, StepRecord
from tandem.sites import Site
from tandem.vocabulary import Cause
from tandem_worker.chain import Plan

STEP_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper bounds of the classes in which steps are counted by their time."""
NOTHING = ClassCounts(0, 0, 0, 0)


@dataclass(slots=True)
class StepTally:
    """Per site class: sites (site x rank), elements, and how many of each mismatched with cause ``compute``."""

    counts: dict[str, list[int]] = field(default_factory=dict)
    rows: int = 0

    def compared(self, site: Site, ranks: int) -> None:
        entry = self.counts.setdefault(site.site_class, [0, 0, 0, 0])
        entry[0] += ranks
        entry[1] += ranks * site.elements

    def found(self, site: Site, row: MismatchRecord) -> None:
        self.rows += 1
        if row.cause is Cause.COMPUTE:
            entry = self.counts.setdefault(site.site_class, [0, 0, 0, 0])
            entry[2] += 1
            entry[3] += row.mismatched or 0

    def differs(self, site: Site) -> None:
        """One rank's tensor differed, by its digest; how many elements is not known."""
        self.counts.setdefault(site.site_class, [0, 0, 0, 0])[2] += 1

    def classes(self) -> dict[str, ClassCounts]:
        return {name: ClassCounts(*values) for name, values in self.counts.items()}


@dataclass(slots=True)
class RunTally:
    """Totals of an attempt, for progress and the closing record."""

    steps: int = 0
    sites: int = 0
    elements: int = 0
    mismatched_sites: int = 0
    mismatched_elements: int = 0
    other_findings: int = 0
    rows_total: int = 0
    rows_written: int = 0
    controls: int = 0
    faults: int = 0
    gradients: int = 0
    drifts: int = 0
    evaluations: int = 0
    link_bytes: int = 0
    full_bytes: int = 0
    device_seconds: float = 0.0
    first_mismatch: str = ""
    places: Mapping[tuple[str, str], ClassCounts] = field(default_factory=dict)
    """By phase and module. Replaced whole after each step, like the next: any thread may read them without a lock."""
    step_times: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_S) + 1)
    """Steps by their time, the last those beyond all of STEP_BOUNDS_S; step 0, the initial parameters, is in none."""
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    """Of ``step_seconds``, what the reference did not wait for its peer."""
    finished_at: float = 0.0
    """When the last step was settled, UTC seconds."""

    def add_step(self, row: StepRecord) -> None:
        self.steps += 1
        places = dict(self.places)
        for name, counts in row.classes.items():
            self.sites += counts.sites
            self.elements += counts.elements
            phase, module, _ = name.split("/", 2)
            places[phase, module] = add(places.get((phase, module), NOTHING), counts)
        self.places, self.finished_at = places, row.finished_at
        self.link_bytes += row.link_bytes
        self.full_bytes += row.full_bytes
        if row.step:
            place = bisect_left(STEP_BOUNDS_S, row.duration_s)
            self.step_times = tuple(n + (i == place) for i, n in enumerate(self.step_times))
            self.step_seconds += row.duration_s
            self.busy_seconds += row.busy_s

    def add_row(self, row: MismatchRecord, cap: int) -> bool:
        """Count a mismatch row; False if the cap says that it is not to be written."""
        self.rows_total += 1
        if row.cause is Cause.COMPUTE:
            self.mismatched_sites += 1
            self.mismatched_elements += row.mismatched or 0
        else:
            self.other_findings += 1
        if not self.first_mismatch:
            layer = "" if row.layer < 0 else f" layer {row.layer}"
            self.first_mismatch = f"step {row.step} {row.phase}/{row.module}{layer} {row.tensor} rank {row.rank}"
        if self.rows_written >= cap:
            return False
        self.rows_written += 1
        return True


def places_of(plan: Plan) -> frozenset[tuple[str, str]]:
    """Phase and module of every site of a plan."""
    return frozenset((site.phase, site.module) for op in (*plan.initial, *plan.ops) for site in op.sites)


def add(a: ClassCounts, b: ClassCounts) -> ClassCounts:
    """Both counts together."""
    return ClassCounts(
        a.sites + b.sites, a.elements + b.elements, a.mismatched_sites + b.mismatched_sites,
        a.mismatched_elements + b.mismatched_elements,
    )  # fmt: skip
