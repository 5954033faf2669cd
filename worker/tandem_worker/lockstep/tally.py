"""Counts of one step and of the run so far, kept by the reference. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.records import ClassCounts, MismatchRecord
from tandem.sites import Site
from tandem.vocabulary import Cause


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

    def add_step(self, classes: dict[str, ClassCounts]) -> None:
        self.steps += 1
        for counts in classes.values():
            self.sites += counts.sites
            self.elements += counts.elements

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
