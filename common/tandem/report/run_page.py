"""Renders a run's report."""

from __future__ import annotations

import math
from typing import Any

from tandem import formats
from tandem.records import MismatchRecord, RunRecords
from tandem.report import figures, page
from tandem.report.draw import warm_up
from tandem.runs import tables
from tandem.runs.drift import DriftPoint
from tandem.runs.summary import RunSummary, summarise
from tandem.vocabulary import ControlName, Workload

VERDICTS = {
    "match": ("✓", "No difference was found."),
    "mismatch": ("✗", "The sides computed different bits."),
    "inconclusive": ("?", "This run may not speak: a control, a record or a step is missing."),
    None: ("…", "The run has no verdict yet."),
}
"""Verdict -> sign (beside its word, never alone) and what it means."""

LEAVES = 25
"""Most gradient leaves in the table."""

VERSIONS = (
    "tandem", "image", "python", "jax", "jaxlib", "platform", "device_kind", "device_count", "driver", "cpu",
    "cpu_affinity", "flags",
)  # fmt: skip
"""Parity fields that are repeated where the report says how to repeat the run."""


def render(records: RunRecords) -> str:
    """The page of one run, as HTML text."""
    warm_up()
    s = summarise(records)
    return page.html("run.html.j2", sections(s), **values(s))


def sections(s: RunSummary) -> list[tuple[str, str]]:
    """(id, title) of the sections of a run's page."""
    return _sections(s, _anatomy(s))


def _anatomy(s: RunSummary) -> bool:
    """Whether its page has a place for where and what mismatched."""
    return s.run.workload in (Workload.SUBMODULE, Workload.GRADIENT) or bool(s.rows)


def values(s: RunSummary) -> dict[str, Any]:
    """What ``run.html.j2`` shows of a run."""
    warm_up()
    sign, meaning = VERDICTS.get(s.run.verdict, VERDICTS[None])
    anatomy = _anatomy(s)
    return {
        "s": s,
        "sign": sign,
        "meaning": meaning,
        "facts": _facts(s),
        "rq1": _rq1(s),
        "charts": figures.of_run(s),
        "anatomy": anatomy,
        "layers": page.columns(s.site_map),
        "layer_shades": page.shades(s.site_map),
        "ranks": page.columns(s.rank_map),
        "rank_shades": page.shades(s.rank_map),
        "rank_rows": page.count_rows(s.ranks),
        "replay_rows": page.replay_rows(s.replays),
        "extent_rows": page.count_rows(s.extents),
        "group_maps": _group_maps(s),
        "apart": s.drift.largest_difference() if s.drift else None,
        "last_answers": sorted(s.answers.items())[-1:],
        "leaves_shown": LEAVES,
        "parity_status": next(c.status for c in s.controls if c.name == ControlName.PARITY),
        "findings": ", ".join(f"{n:,} {cause.replace('_', '-')}" for cause, n in s.findings.items()),
        "bounds": tables.bound_lines(s),
        "fault_lines": tables.fault_lines(s),
        "versions": [(name, s.parity[name]) for name in VERSIONS if name in s.parity],
        "spec": spec_yaml(s.run.spec),
        "row_bits": _row_bits,
    }


def _sections(s: RunSummary, anatomy: bool) -> list[tuple[str, str]]:
    rq1 = s.run.workload == Workload.SUBMODULE
    rows = (
        (True, "pair", "Pair and parity"),
        (True, "controls", "Controls"),
        (s.noise, "noise", "Gradient noise"),
        (s.drift, "training", "Losses"),
        (s.drift, "drift", "Drift"),
        (s.run.workload == Workload.FINETUNE, "answers", "Held-out questions"),
        (True, "table", "Frequency table" if rq1 else "What was compared"),
        (rq1, "steps", "Over steps"),
        (anatomy, "map", "Site × layer, rank"),
        (anatomy, "bits", "Bits"),
        (anatomy, "severity", "Severity"),
        (anatomy, "first", "First mismatches"),
        (s.faults, "truth", "Injected faults"),
        (True, "limits", "What was not checked"),
        (True, "repeat", "How to repeat it"),
    )
    return [(name, title) for there, name, title in rows if there]


def _facts(s: RunSummary) -> list[tuple[str, str, str]]:
    """The strip under the verdict: (number, what it counts, more)."""
    asked = f"of {s.steps_asked:,} asked" if s.steps_asked is not None else ""
    out = [
        (formats.short(s.steps), "steps compared", asked),
        (formats.short(s.sites), "tensors compared", "step × site × rank"),
        (formats.short(s.elements), "elements compared", ""),
    ]
    if not s.drift:
        out += [
            (formats.count(s.mismatched_sites), "mismatching tensors", "with equal inputs"),
            (formats.count(s.mismatched_elements), "mismatching elements", f"on {_ranks(s)}" if s.ranks else ""),
        ]
    if s.noise:
        worst, unbounded = s.noise.totals.worst_step, s.noise.totals.unbounded
        more = f"at step {worst:,}" if worst is not None else ""
        out.append((figures.number(s.noise.wcnts), "WCNTS", f"{unbounded:,} without a bound" if unbounded else more))
    if s.drift:
        first = s.drift.first_divergence
        out.append((formats.count(first) if first is not None else "none", "first step of divergence", "by digest"))
        out += [
            (figures.number(p.ratio), f"drift / norm, {p.arm}", f"after step {p.step:,}")
            for arm in s.drift.arms
            if (p := s.drift.last(arm))
        ]
    devices = formats.plural(len(s.devices), "device") if s.devices else ""
    return [*out, (formats.device_hours(s.device_hours), "device-hours", devices)]


def _ranks(s: RunSummary) -> str:
    shown = ", ".join(map(str, list(s.ranks)[:6])) + (", …" if len(s.ranks) > 6 else "")
    return f"{'rank' if len(s.ranks) == 1 else 'ranks'} {shown}"


def _rq1(s: RunSummary) -> dict[tuple[str, str], tuple[int, int]]:
    """(phase, module) -> (mismatching elements, elements), per-rank partials only."""
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for c in s.table:
        bad, all_ = out.get((c.phase, c.module), (0, 0))
        out[c.phase, c.module] = bad + c.mismatched_elements, all_ + c.elements
    return out


def _group_maps(s: RunSummary) -> list[tuple[str, list[int], list[tuple[str, dict[int, DriftPoint]]], dict[Any, int]]]:
    """Arm, exact steps, parameter groups with their drift, shades."""
    out = []
    for arm in s.drift.arms if s.drift else ():
        steps, groups = figures.group_drift(s.drift, arm) if s.drift else ([], [])
        if groups:
            out.append((arm, steps, groups, _drift_shades(groups)))
    return out


def _drift_shades(groups: list[tuple[str, dict[int, DriftPoint]]]) -> dict[tuple[int, int], int]:
    """(line, step) -> shade on a logarithmic scale; none for exactly zero, the darkest for what is not finite."""
    ratios = {(i, step): p.ratio for i, (_, cells) in enumerate(groups) for step, p in cells.items() if p.ratio}
    finite = [math.log(r) for r in ratios.values() if math.isfinite(r)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return {
        key: 1 + round((page.SHADES - 1) * (math.log(r) - low) / span) if math.isfinite(r) else page.SHADES
        for key, r in ratios.items()
    }


def _row_bits(row: MismatchRecord) -> str:
    """``14 × 3, 2 × 1``: bit × how often it differed, most significant first."""
    bits = [f"{bit} × {n:,}" for bit, n in reversed(list(enumerate(row.bits or ()))) if n]
    return ", ".join(bits) or "–"


def spec_yaml(spec: dict[str, Any]) -> str:
    """The stored spec as a file that ``tandem run`` takes, defaults included: another version may have others."""
    import yaml

    return str(yaml.safe_dump(spec, sort_keys=False, allow_unicode=False, width=100)).strip()
