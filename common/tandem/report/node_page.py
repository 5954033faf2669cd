"""Renders a node's report."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tandem import formats
from tandem.nodes.profile import SHOWN, NodeProfile, RunLine
from tandem.report import figures, page
from tandem.report.draw import warm_up
from tandem.runs.tables import bound_of
from tandem.statistics.sketch import BINS
from tandem.vocabulary import Arm, NodeVerdict

VERDICTS = {
    NodeVerdict.CORRUPTING: ("✗", "mismatch", "It must not go back to work."),
    NodeVerdict.SUSPECTED: ("!", "inconclusive", "Something speaks against it, and it is not proved."),
    NodeVerdict.CLEAN: ("✓", "match", "Nothing was found, down to the bound below."),
    NodeVerdict.UNKNOWN: ("?", "none", "Too little is recorded to speak."),
}
"""Verdict -> sign (beside its word, never alone), class of ``style.css``, what it means."""

LEAVES = 25
"""Most gradient leaves in the table."""


def render(p: NodeProfile) -> str:
    """The page of one node, as HTML text."""
    return page.html("node.html.j2", SECTIONS, **values(p))


def values(p: NodeProfile) -> dict[str, Any]:
    """What ``node.html.j2`` shows of a node."""
    warm_up()
    sign, style, meaning = VERDICTS[p.verdict]
    numbers = {run.facts.run_id: f"{i}" for i, run in enumerate(reversed(p.runs), 1)}
    shown = p.runs[:SHOWN]
    counted = [run for run in reversed(shown) if run.counted]
    when = figures.timeline([(numbers[run.facts.run_id], run.timeline) for run in counted])
    severity = figures.severities(_decades(p.severities))
    leaves = sorted(p.leaves.items(), key=lambda item: (-item[1], item[0]))
    return {
        "p": p,
        "sign": sign,
        "verdict_class": style,
        "meaning": meaning,
        "facts": _facts(p),
        "bounds": bound_of(p.bound) if p.bound else [],
        "numbers": numbers,
        "layers": page.columns(p.layer_map),
        "layer_shades": page.shades(p.layer_map),
        "ranks": page.columns(p.rank_map),
        "rank_shades": page.shades(p.rank_map),
        "when": [when] if when else [],
        "bursts": figures.bursts(p.timing),
        "bits": figures.bits(p.bits),
        "severity": [severity] if severity else [],
        "replay_rows": page.replay_rows(p.replays),
        "extent_rows": page.count_rows(p.extents),
        "findings": ", ".join(f"{n:,} {cause.replace('_', '-')}" for cause, n in p.findings.items()),
        "runs_shown": shown,
        "noisy": [run for run in shown if run.counted and run.noise],
        "drifted": [(run, *_drift(run)) for run in shown if run.counted and run.drifts],
        "leaves": leaves[:LEAVES],
        "more_leaves": max(0, len(leaves) - LEAVES),
    }


SECTIONS = (
    ("where", "Where"),
    ("when", "When"),
    ("what", "What"),
    ("model", "What it does to a model"),
    ("runs", "Runs"),
    ("decisions", "Decisions"),
    ("limits", "What was not checked"),
)


def _facts(p: NodeProfile) -> list[tuple[str, str, str]]:
    """The strip under the verdict: (number, what it counts, more)."""
    return [
        (formats.count(p.counted_runs), "counted runs", f"of {len(p.runs):,} listed, {p.matches:,} matched"),
        (formats.count(len(p.references)), "references", ""),
        (formats.short(p.steps), "steps compared", f"{p.affected_steps:,} affected"),
        (formats.short(p.elements), "elements compared", ""),
        (formats.count(p.mismatched_elements), "mismatching elements", f"in {p.mismatched_sites:,} tensors"),
        (
            formats.device_hours(p.device_hours),
            "device-hours",
            f"{p.covered:,} of {p.device_count:,} devices" if p.device_count else f"{len(p.devices):,} devices",
        ),
    ]


def _decades(sketch: dict[int, int]) -> dict[int, int]:
    out: Counter[int] = Counter()
    for number, tensors in sketch.items():
        out[number // BINS] += tensors
    return dict(sorted(out.items()))


def _drift(run: RunLine) -> tuple[float | None, float | None]:
    """Last drift / norm of the suspect and of the baseline."""
    last = {line.arm: line.last_relative for line in run.drifts}
    return last.get(Arm.SUSPECT), last.get(Arm.BASELINE)
