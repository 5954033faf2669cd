"""A node's profile as text lines, the same on a terminal and in a log. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem import formats
from tandem.nodes.profile import SHOWN, ClassProfile, NodeProfile, RunLine
from tandem.runs import tables
from tandem.statistics.drift import DriftLine
from tandem.statistics.frequency import Rate
from tandem.statistics.noise import Noise
from tandem.statistics.timing import Timing


def lines(p: NodeProfile) -> list[str]:
    """The whole page."""
    out = [formats.clean(p.sentence, 2000)]
    if p.evidence:
        out.append(f"found: {formats.clean(p.evidence, 400)}")
    if p.missing:
        out += ["", "missing for a firmer verdict", *(f"  - {formats.clean(m)}" for m in p.missing)]
    out += ["", *_facts(p)]
    if p.bound is not None:
        out += ["", *tables.bound_of(p.bound)]
    if p.classes:
        out += ["", "site classes: per element with steps as clusters, per step exact; intervals at 95 %"]
        out += class_table(p.classes)
    if any(d.mismatched_sites for d in p.devices):
        out += ["", *_device_table(p)]
    out += ["", "runs, newest first", *_run_table(p.runs[:SHOWN])]
    if len(p.runs) > SHOWN:
        out.append(f"  and {len(p.runs) - SHOWN:,} older: tandem node {formats.clean(p.node, 100)} --json")
    if p.decisions:
        out += ["", "decisions"]
        out += [
            f"  {formats.when(d.decided_at)}  {formats.clean(d.decision)} by {formats.clean(d.decided_by, 60)}: "
            f"{formats.clean(d.reason)}"
            for d in p.decisions
        ]
    return [*out, "", "not checked", *(f"  - {item}" for item in p.not_checked)]


def class_table(classes: Sequence[ClassProfile]) -> list[str]:
    """One line a class: frequency per element and per step, each with its interval, and severity."""
    header = ("site class", "elements", "bad", "per element", "interval", "bad steps", "per step", "sev. median", "max")
    return tables.align(
        header,
        (
            (
                f"{c.phase}/{c.module} {c.family}",
                formats.short(c.elements),
                formats.count(c.mismatched_elements),
                "-" if c.per_element is None else formats.scientific(c.per_element.value),
                interval(c.per_element),
                f"{c.affected_steps:,} of {c.steps:,}",
                interval(c.per_step),
                tables.severity(c.severity_median),
                tables.severity(c.severity_max),
            )
            for c in classes
        ),
    )


def interval(r: Rate | None) -> str:
    """``1.2e-3 to 4.5e-3``."""
    return "-" if r is None else f"{formats.scientific(r.low, 1)} to {formats.scientific(r.high, 1)}"


def timing_words(t: Timing) -> str:
    """``first at step 96; 17 affected steps in 4 bursts, the longest 9; burstiness 0.61``."""
    if not t.affected:
        return "no step was affected"
    words = [
        f"first at step {t.onset:,}",
        f"{formats.plural(t.affected, 'affected step')} in {formats.plural(t.bursts, 'burst')}, "
        f"the longest {t.longest_burst:,}",
    ]
    if t.burstiness is not None:
        words.append(f"mean gap {t.mean_gap:.3g} steps, longest {t.longest_gap:,}, burstiness {t.burstiness:.2f}")
    return "; ".join(words)


def noise_words(n: Noise) -> str:
    """``WCNTS 0.051 at step 12; 40 of 200 steps noisy``."""
    return f"WCNTS {wcnts(n.wcnts)}" + (
        (f" at step {n.worst_step:,}" if n.worst_step is not None and not n.unbounded else "")
        + f"; {n.noisy:,} of {formats.plural(n.steps, 'step')} noisy"
        + (f", {n.unbounded:,} without a bound" if n.unbounded else "")
        + (f", {n.undefined:,} without a ratio" if n.undefined else "")
    )


def drift_words(line: DriftLine) -> str:
    """``suspect: first differs at step 3; drift 0.2 (0.02 of the norm) at step 100; ln drift grows 0.01 a step``."""
    if line.first is None:
        return f"{line.arm}: no drift"
    words = [f"{line.arm}: first differs at step {line.first:,}"]
    if line.last_drift is not None:
        part = "" if line.last_relative is None else f" ({line.last_relative:.2g} of the norm)"
        words.append(f"drift {line.last_drift:.3g}{part} at step {line.last:,}")
    if line.rate is not None:
        words.append(f"ln drift grows {line.rate:.2g} a step")
    if line.nonfinite:
        words.append(f"{line.nonfinite:,} points not finite")
    return "; ".join(words)


def wcnts(value: float | None) -> str:
    return "-" if value is None else "unbounded" if math.isinf(value) else f"{value:.3g}"


def _uncounted(p: NodeProfile) -> str:
    return " (those of a training after its first difference enter no rate)" if p.timing.steps < p.steps else ""


def _facts(p: NodeProfile) -> list[str]:
    facts = {
        "node": formats.clean(p.node, 100),
        "runs": f"{p.counted_runs:,} counted ({p.matches:,} matched), {len(p.runs):,} listed, reference in "
        f"{p.as_reference:,}; workloads {', '.join(p.workloads) or 'none'}",
        "against": ", ".join(formats.clean(r, 60) for r in p.references) or "no reference",
        "compared": f"{formats.plural(p.steps, 'step')}, {formats.short(p.sites)} tensors, "
        f"{formats.short(p.elements)} elements, {formats.device_hours(p.device_hours)} device-hours",
        "devices": (f"{p.covered} of {p.device_count} covered" if p.device_count else f"{len(p.devices)} covered"),
        "affected": f"{p.affected_steps:,} of {formats.plural(p.timing.steps, 'step')}{_uncounted(p)}"
        + (f", {interval(p.per_step)} of all steps" if p.per_step is not None else ""),
        "mismatching": f"{p.mismatched_sites:,} tensors, {p.mismatched_elements:,} elements",
    }
    if p.timing.affected:
        facts["time"] = timing_words(p.timing)
    if p.replays:
        facts["replays"] = ", ".join(f"{k.replace('_', ' ')} {n:,}" for k, n in p.replays.items())
    if p.wcnts is not None:
        facts["WCNTS"] = wcnts(p.wcnts)
    if p.drift_rate is not None:
        facts["drift"] = f"ln drift grows {p.drift_rate:.2g} a step (median of its training runs)"
    if p.findings:
        facts["other findings"] = ", ".join(f"{formats.clean(k)} {n:,}" for k, n in p.findings.items())
    width = max(map(len, facts))
    return [f"{name.ljust(width)}  {value}" for name, value in facts.items()]


def _device_table(p: NodeProfile) -> list[str]:
    return tables.align(
        ("device", "rank", "device-hours", "bad tensors", "bad elements"),
        (
            (
                formats.clean(d.name, 60) + ("" if d.present else " (replaced since)"),
                "-" if d.rank is None else str(d.rank),
                formats.device_hours(d.hours),
                formats.count(d.mismatched_sites),
                formats.count(d.mismatched_elements),
            )
            for d in p.devices
        ),
    )


def _run_table(runs: Sequence[RunLine]) -> list[str]:
    if not runs:
        return ["  none"]
    return tables.align(
        ("run", "began", "kind", "workload", "model", "other side", "verdict", "", "steps", "affected"),
        (
            (
                str(r.facts.run_id),
                formats.when(r.facts.created_at),
                r.facts.kind,
                r.facts.workload,
                formats.clean(r.facts.model, 40),
                formats.clean(r.facts.reference, 40),
                r.facts.verdict or "running",
                formats.clean(r.note, 200),
                formats.count(r.facts.steps),
                formats.count(r.facts.affected_steps),
            )
            for r in runs
        ),
        left=8,
    )
