"""Plain-text tables of a run, the same on a terminal and in a log. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tandem import formats
from tandem.records import MismatchRecord
from tandem.runs.summary import Bound, Counts, RunSummary

if TYPE_CHECKING:
    from tandem.answers import Share


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
    return [] if summary.bound is None else bound_of(summary.bound)


def bound_of(b: Bound) -> list[str]:
    """A bound in words, one line a unit."""
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


def noise_lines(summary: RunSummary) -> list[str]:
    """Gradient noise of a run: WCNTS and the ten worst leaves; empty for other workloads."""
    s = summary.noise
    if s is None:
        return []
    t = s.totals
    worst = "" if t.worst is None or not t.worst else f", largest finite {measured(t.worst)} at step {t.worst_step}"
    out = [f"WCNTS {measured(s.wcnts)}: noise in {t.noisy:,} of {formats.plural(t.steps, 'step')}{worst}"]
    if s.unmeasured:
        out.append(f"noise of {formats.plural(s.unmeasured, 'step')} not measured: WCNTS may be larger")
    if s.leaves:
        head = ("leaf", "steps", "mismatching", "frequency", "worst noise/signal", "at step", "cosine")
        rows = (
            (formats.clean(n.leaf), f"{n.affected:,}", f"{n.mismatched:,}", formats.scientific(n.frequency),
             measured(n.worst), f"{n.worst_step:,}", measured(n.cosine, 6))
            for n in s.leaves[:10]
        )  # fmt: skip
        out += align(head, rows)
    return out


def drift_lines(summary: RunSummary) -> list[str]:
    """Drift of a run's arms, first divergence, loss spikes; empty for other workloads."""
    s = summary.drift
    if s is None:
        return []
    first = "none, every digest was equal" if s.first_divergence is None else f"step {s.first_divergence:,}"
    out = [f"first divergence: {first}"]
    if apart := s.largest_difference():
        out.append(f"losses furthest apart: {measured(apart[1])} at step {apart[0]:,}")
    for arm, steps in s.spikes.items():
        shown = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
        out.append(f"loss spikes of the {arm}: {len(steps):,}, beginning at step {shown}")
    if s.lines:
        head = ("arm", "drift from step", "last step", "drift", "drift/norm", "growth per step")
        rows = (
            (formats.clean(n.arm), _whole(n.first), _whole(n.last), measured(n.last_drift), measured(n.last_relative),
             measured(n.rate))
            for n in s.lines
        )  # fmt: skip
        out += align(head, rows)
    return out


def answer_lines(summary: RunSummary) -> list[str]:
    """The fine-tuning table after the last evaluated step; empty if nothing was evaluated."""
    if not summary.answers:
        return []
    step = max(summary.answers)
    head = ("task", "arm", "questions", "accuracy", "disagreement", "difference (95 %)", "p")
    rows = []
    for r in summary.answers[step]:
        a = r.against
        rows.append(
            (
                formats.clean(r.task) or "all tasks",
                r.arm.value,
                f"{r.accuracy.of:,}",
                share(r.accuracy),
                share(a.disagreement) if a else "-",
                "-"
                if a is None or a.difference is None
                else f"{a.difference * 100:+.2f} ({a.difference_interval[0] * 100:+.2f} to "
                f"{a.difference_interval[1] * 100:+.2f})",
                measured(a.p_value, 2) if a else "-",
            )
        )
    return [f"held-out questions, after step {step:,}", *align(head, rows, left=2)]


def share(s: Share) -> str:
    """``90.79 % (88.10 to 93.04)``."""
    if s.share is None:
        return "-"
    return f"{s.share * 100:.2f} % ({s.interval[0] * 100:.2f} to {s.interval[1] * 100:.2f})"


def measured(value: float | None, digits: int = 3) -> str:
    """A measured value: a dash if there is none, ``inf`` and ``nan`` by name."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    return f"{value:.{digits + 1}g}" if 1e-3 <= abs(value) < 1e5 else formats.scientific(value, digits)


def _whole(n: int | None) -> str:
    return "-" if n is None else f"{n:,}"
