"""Plain-text tables of a run, the same on a terminal and in a log. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem import formats
from tandem.records import MismatchRecord
from tandem.summary import Counts, RunSummary


def align(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Columns padded to their widest cell; the first ``left`` columns are flush left, the others right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


COUNT_HEADER = (
    "site",
    "tensors",
    "elements",
    "bad tensors",
    "bad elements",
    "frequency",
    "sev. mean",
    "median",
    "max",
)


def severity(value: float | None) -> str:
    return "-" if value is None else formats.scientific(value, 1)


def frequency(counts: Counts) -> str:
    """The share of elements that mismatch; a dash if none was compared."""
    return "-" if counts.frequency is None else formats.scientific(counts.frequency)


def count_row(counts: Counts, *, family: bool) -> list[str]:
    name = f"{counts.phase}/{counts.module}" + (f" {counts.family}" if family else "")
    return [
        name,
        formats.short(counts.sites),
        formats.short(counts.elements),
        formats.count(counts.mismatched_sites),
        formats.count(counts.mismatched_elements),
        frequency(counts),
        severity(counts.severity_mean),
        severity(counts.severity_median),
        severity(counts.severity_max),
    ]


def phase_module_table(summary: RunSummary) -> list[str]:
    """The paper's table: one line per phase x module, per-rank partials before the reduction only."""
    if not summary.table:
        return other_table(summary) or ["no site was compared"]
    return align(COUNT_HEADER, (count_row(c, family=len_families(summary, c) > 1) for c in summary.table))


def len_families(summary: RunSummary, counts: Counts) -> int:
    """How many tensor families of the table share this line's phase and module."""
    return sum((c.phase, c.module) == (counts.phase, counts.module) for c in summary.table)


def other_table(summary: RunSummary, *, only_bad: bool = False) -> list[str]:
    """Every other tensor family, a line each; empty if there is none to show."""
    shown = [c for c in summary.others if c.mismatched_sites or not only_bad]
    return align(COUNT_HEADER, (count_row(c, family=True) for c in shown)) if shown else []


def control_table(summary: RunSummary) -> list[str]:
    return align(
        ("control", "side", "status", "records", "repeats"),
        (
            (
                formats.clean(c.name).replace("_", " "),
                c.role,
                c.status if c.status != "failed" else f"FAILED ({c.failed} of {c.records})",
                str(c.records),
                str(c.repeats) if c.repeats else "-",
            )
            for c in summary.controls
        ),
        left=3,
    )


def place(row: MismatchRecord) -> str:
    """``step 96 fwd/attn layer 3 out rank 1``."""
    layer = "" if row.layer < 0 else f" layer {row.layer}"
    return f"step {row.step} {row.phase}/{row.module}{layer} {formats.clean(row.tensor)} rank {row.rank}"


def bound_lines(summary: RunSummary) -> list[str]:
    """The bound in words, one line a unit; empty if something was found or nothing was compared."""
    b = summary.bound
    if b is None:
        return []
    level = formats.percent(b.confidence)
    out = []
    if b.per_step is not None:
        out.append(f"at {level}: corruption in more than {formats.percent(b.per_step)} of steps is excluded")
    if b.per_device_hour is not None:
        out.append(f"at {level}: more than {b.per_device_hour:.2g} corrupting events per device-hour are excluded")
    if b.per_element is not None:
        out.append(
            f"at {level}: beside it, {formats.scientific(b.per_element, 1)} per element "
            "(as if elements were independent, which bursts make them not)"
        )
    return out


def fault_lines(summary: RunSummary) -> list[str]:
    """The injector's truth beside the counts; empty for a real run."""
    f = summary.faults
    if f is None:
        return []
    out = [
        f"injected: {formats.plural(f.changed_elements, 'element')} changed in {formats.plural(f.records, 'place')}"
        + (
            " (" + ", ".join(f"{formats.clean(level)} {n:,}" for level, (_, n) in f.by_level.items()) + ")"
            if f.by_level
            else ""
        )
    ]
    if f.output_sites:
        out.append(
            f"found:    {f.found_sites:,} of {f.output_sites:,} faulty outputs, "
            f"{f.found_elements:,} of {f.output_changed:,} elements"
            + (", equal to the injector's log" if f.exact else f"; {f.unequal:,} differ from the injector's log")
        )
    return out
