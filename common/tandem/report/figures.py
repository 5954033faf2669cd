"""Figures of a run's report: each a chart with its name, what it shows in words, and its data as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tandem import formats
from tandem.answers import ArmResult
from tandem.nodes.run_profile import TimelineBin
from tandem.report import charts
from tandem.report.charts import Band, Series
from tandem.report.draw import draw
from tandem.report.series import Bin, bins, thinned
from tandem.runs import tables
from tandem.runs.drift import DriftPoint, DriftSummary, loss_difference
from tandem.runs.noise import NoiseSummary
from tandem.runs.parts import StepPoint
from tandem.runs.summary import RunSummary
from tandem.statistics.timing import Timing
from tandem.vocabulary import Arm

COLOURS = {Arm.REFERENCE: "var(--reference)", Arm.SUSPECT: "var(--suspect)", Arm.BASELINE: "var(--baseline)"}
TITLES = {Arm.SUSPECT.value: "suspect", Arm.BASELINE.value: "baseline (reference, other seed)"}


@dataclass(frozen=True)
class Figure:
    """A chart, and the same numbers as a table."""

    name: str
    svg: Markup
    note: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    """As shown in the chart: a long series is thinned alike in both."""


def number(value: float | None, digits: int = 3) -> str:
    """As `tables.measured`, with a real dash."""
    return "–" if value is None else tables.measured(value, digits)


def frequency(points: Sequence[StepPoint], timing: Timing, attempt: int | None = None) -> Figure | None:
    """Mismatch frequency over the steps of one attempt; None if no per-rank partial was compared."""
    data = bins([(p.step, p.partial_elements, p.partial_mismatched) for p in points if p.partial_elements])
    if not data:
        return None
    name = "Mismatch frequency over steps" + (f", attempt {attempt}" if attempt is not None else "")
    chart = charts.over_steps(
        [Series("suspect", "var(--heat)", [(b.middle, b.frequency) for b in data], stems=True)],
        "mismatching / all elements",
        log=True,
    )
    rows = [(b.label, f"{b.elements:,}", f"{b.mismatched:,}", formats.scientific(b.frequency)) for b in data]
    note = f"Per-rank partials, logarithmic; exactly zero has a line of its own. {_bins_note(data)} {bursts(timing)}"
    return Figure(name, draw(chart, name), note.strip(), ("steps", "elements", "mismatching", "frequency"), rows)


def _bins_note(data: Sequence[Bin]) -> str:
    bad = sum(b.mismatched > 0 for b in data)
    width = data[0].last - data[0].first + 1
    if width == 1:
        return f"{bad:,} of {formats.plural(len(data), 'step')} had a mismatch."
    return f"Each mark adds up {width:,} steps; {bad:,} of {len(data):,} marks have a mismatch."


def bursts(t: Timing) -> str:
    """When steps mismatched, in a sentence; empty if none did."""
    if not t.affected:
        return ""
    times = (
        f"All tensors together: {t.affected:,} of {formats.plural(t.steps, 'step')} affected, the first is step "
        f"{t.onset:,}; {formats.plural(t.bursts, 'burst')} (affected steps without a clean one in between), the "
        f"longest of {formats.plural(t.longest_burst, 'step')}."
    )
    if t.burstiness is not None:
        times += f" Burstiness of the gaps {t.burstiness:+.2f} (−1 regular, 0 as by chance, towards 1 in bursts)."
    return times


def bits(counts: Mapping[int, Sequence[int]]) -> list[Figure]:
    """One figure for each width of elements."""
    out = []
    for width, times in counts.items():
        dtype = {16: " (bfloat16)", 32: " (float32)"}.get(width, "")
        name = f"Differing bits of {width}-bit elements{dtype}"
        groups = charts.bit_groups(width)
        rows = [
            (str(bit), next(g for g, low, high in groups if low <= bit <= high), f"{times[bit]:,}")
            for bit in reversed(range(width))
        ]
        out.append(Figure(name, draw(charts.bits(times), name), "", ("bit", "part", "times"), rows))
    return out


def severities(decades: Mapping[int, int]) -> Figure | None:
    """Tensors by the decade of their median severity; None if none has a severity."""
    if not decades:
        return None
    name = "Mismatching tensors by their median severity"
    rows = [(f"1e{d} to 1e{d + 1}", f"{n:,}") for d, n in sorted(decades.items())]
    return Figure(name, draw(charts.severities(dict(decades)), name), "", ("median severity", "tensors"), rows)


def timeline(runs: Sequence[tuple[str, Sequence[TimelineBin]]]) -> Figure | None:
    """Mismatch frequency of a node's runs one after another; None if none compared a per-rank partial.

    Args:
        runs: name and bins of each, oldest first.
    """
    name, done = "Mismatch frequency over the steps of all counted runs", 0
    bands, points, rows = [], [], []
    for run, found in runs:
        start = done
        for b in found:
            if b.elements:
                points.append((done + b.steps / 2, b.mismatched / b.elements))
                last = b.first + b.steps - 1
                rows.append(
                    (run, f"{b.first:,}" if b.steps == 1 else f"{b.first:,} to {last:,}", f"{b.elements:,}",
                     f"{b.mismatched:,}", formats.scientific(b.mismatched / b.elements))
                )  # fmt: skip
                done += b.steps
        if done > start:
            bands.append(Band(run, start, done))
    if not points:
        return None
    chart = charts.over_steps(
        [Series("node", "var(--heat)", points, stems=True)], "mismatching / all elements", log=True,
        x="steps compared, one run after another", bands=bands,
    )  # fmt: skip
    note = "Per-rank partials, logarithmic; exactly zero has a line of its own. A band is a run, numbered as below."
    return Figure(name, draw(chart, name), note, ("run", "steps", "elements", "mismatching", "frequency"), rows)


# -- RQ2 -----------------------------------------------------------------------------------------------


def noise(s: NoiseSummary) -> list[Figure]:
    """Noise-to-signal over steps, and the angle between the gradients."""
    out = []
    several = len({p.attempt for p in s.points}) > 1
    for attempt in sorted({p.attempt for p in s.points}):
        mine = {p.step: p for p in s.points if p.attempt == attempt}
        of = f", attempt {attempt}" if several else ""
        shown = thinned([(p.step, p.ratio) for p in mine.values() if p.ratio is not None])
        if not shown:
            continue
        name = "Noise-to-signal of the gradient over steps" + of
        chart = charts.over_steps(
            [Series("suspect", COLOURS[Arm.SUSPECT], shown, stems=True)], "‖g_s − g_r‖ / ‖g_r‖", log=True
        )
        rows = [
            (f"{step:,}", number(ratio), number(mine[step].noise), number(mine[step].signal),
             number(mine[step].cosine, 6), f"{mine[step].mismatched:,}")
            for step, ratio in shown
        ]  # fmt: skip
        head = ("step", "noise / signal", "noise", "signal", "cosine", "mismatching elements")
        note = "Logarithmic; steps whose gradients were equal to the bit are on the line of zero." + _shown(shown, mine)
        out.append(Figure(name, draw(chart, name), note, head, rows))
        apart = thinned([(p.step, max(0.0, 1 - p.cosine)) for p in mine.values() if p.cosine is not None])
        if apart:
            name = "Angle between the two gradients over steps" + of
            chart = charts.over_steps([Series("suspect", COLOURS[Arm.SUSPECT], apart)], "1 − cosine", log=True)
            angles = [(f"{step:,}", number(value), number(mine[int(step)].cosine, 6)) for step, value in apart]
            note = "Only steps that differed; 0: the same direction, 1: at right angles, 2: opposite." + _shown(
                apart, [p for p in mine.values() if p.cosine is not None]
            )
            out.append(Figure(name, draw(chart, name), note, ("step", "1 − cosine", "cosine"), angles))
    return out


def _shown(shown: Sequence[object], of: Iterable[object]) -> str:
    total = sum(1 for _ in of)
    return (
        f" {len(shown):,} of {total:,} points, every stretch with its least and greatest." if len(shown) < total else ""
    )


# -- RQ3 -----------------------------------------------------------------------------------------------


def training(s: DriftSummary) -> list[Figure]:
    """Losses, their difference, gradient norms."""
    baseline = {p.step: p for p in s.points if p.arm == Arm.BASELINE}
    losses = {
        Arm.REFERENCE: [(v.step, v.loss_reference) for v in s.steps],
        Arm.SUSPECT: [(v.step, v.loss_suspect) for v in s.steps],
        Arm.BASELINE: [(p.step, p.loss) for p in baseline.values()],
    }
    norms = {
        Arm.REFERENCE: [(v.step, v.grad_norm_reference) for v in s.steps],
        Arm.SUSPECT: [(v.step, v.grad_norm_suspect) for v in s.steps],
        Arm.BASELINE: [(p.step, p.grad_norm) for p in baseline.values()],
    }
    out = [_lines("Losses over steps", "loss", losses)]
    apart = [(v.step, d) for v in s.steps if (d := loss_difference(v)) is not None]
    if apart:
        shown = thinned(apart)
        name = "Difference of the losses over steps"
        chart = charts.over_steps([Series("suspect", COLOURS[Arm.SUSPECT], shown)], "|loss_s − loss_r|", log=True)
        note = "Logarithmic; losses that are equal to the bit are on the line of zero." + _shown(shown, apart)
        rows = [(f"{step:,}", number(value)) for step, value in shown]
        out.append(Figure(name, draw(chart, name), note, ("step", "|loss_s − loss_r|"), rows))
    out.append(_lines("Gradient norms over steps", "L2 norm before clipping", norms))
    return [f for f in out if f is not None]


_DASHES = {Arm.REFERENCE: (1, 0), Arm.SUSPECT: (6, 3), Arm.BASELINE: (2, 3)}


def _lines(name: str, y: str, arms: Mapping[Arm, Sequence[tuple[int, float | None]]]) -> Figure | None:
    known = {a: [(step, v) for step, v in points if v is not None] for a, points in arms.items()}
    shown = {a: thinned(points) for a, points in known.items() if points}
    if not shown:
        return None
    series = [
        Series(TITLES.get(a, a.value), COLOURS[a], points, line=True, dash=_DASHES[a]) for a, points in shown.items()
    ]
    values = {a: dict(points) for a, points in known.items()}
    steps = sorted({step for points in shown.values() for step, _ in points})
    rows = [(f"{step:,}", *(number(values[a].get(int(step)), 5) for a in shown)) for step in steps]
    note = "Where lines lie on one another the sides agree; the difference is below." if len(shown) > 1 else ""
    return Figure(
        name, draw(charts.over_steps(series, y, log=False), name), note if "Loss" in name else "",
        ("step", *(s.name for s in series)), rows,
    )  # fmt: skip


def drift(s: DriftSummary) -> list[Figure]:
    """Drift, and drift / norm, over steps: estimates and exact points apart."""
    out = []
    kinds: tuple[tuple[str, str, Callable[[DriftPoint], float | None]], ...] = (
        ("Drift of the parameters over steps", "‖p_a − p_r‖", lambda p: p.drift),
        ("Drift relative to the parameters over steps", "‖p_a − p_r‖ / ‖p_r‖", lambda p: p.ratio),
    )
    for name, y, value in kinds:
        series, rows = [], []
        for arm in s.arms:
            for exact in (False, True):
                points = {p.step: p for p in s.points if p.arm == arm and p.exact is exact}
                shown = thinned([(step, v) for step, p in points.items() if (v := value(p)) is not None])
                if not shown:
                    continue
                way = "exact" if exact else "sketch estimate"
                series.append(
                    Series(
                        f"{arm}, {way}", COLOURS[Arm(arm)], shown, size=80 if exact else 16,
                        shape=_SHAPES[Arm(arm), exact],
                    )
                )  # fmt: skip
                rows += [
                    (
                        f"{step:,}",
                        arm,
                        way,
                        number(v),
                        "0" if exact else f"± {formats.percent(points[int(step)].error)}",
                    )
                    for step, v in shown
                ]
        if not series:
            continue
        note = (
            "Logarithmic, zero on its own line. Large marks are exact, small ones estimated from linear sketches; "
            "their error is one standard deviation. The baseline is what another seed alone does."
        )
        out.append(
            Figure(
                name, draw(charts.over_steps(series, y, log=True), name), note if Arm.BASELINE in s.arms
                else note.replace(" The baseline is what another seed alone does.", ""),
                ("step", "arm", "measured", y, "error"), rows,
            )
        )  # fmt: skip
    return out


def answers(by_step: Mapping[int, Sequence[ArmResult]]) -> Figure | None:
    """Accuracy on all held-out questions over the steps after which they were asked; None for fewer than two."""
    points = {
        arm: [(step, r.accuracy.share) for step, found in by_step.items() for r in found if not r.task and r.arm is arm]
        for arm in Arm
    }
    return _lines("Accuracy over steps", "share of right answers", points) if len(by_step) > 1 else None


_SHAPES = {
    (Arm.SUSPECT, False): "circle",
    (Arm.SUSPECT, True): "diamond",
    (Arm.BASELINE, False): "triangle-up",
    (Arm.BASELINE, True): "square",
}


def group_drift(s: DriftSummary, arm: str) -> tuple[list[int], list[tuple[str, dict[int, DriftPoint]]]]:
    """(exact steps, parameter group -> step -> its drift) of an arm; at most the first and the last 11 steps."""
    steps = sorted({p.step for p in s.groups if p.arm == arm})
    if len(steps) > 12:
        steps = [steps[0], *steps[-11:]]
    groups: dict[str, dict[int, DriftPoint]] = {}
    for p in s.groups:
        if p.arm == arm and p.step in steps:
            groups.setdefault(p.part, {})[p.step] = p
    return steps, sorted(groups.items(), key=lambda item: _group_order(item[0]))


def _group_order(name: str) -> tuple[int, int, str]:
    """Embedding, then layer by layer, then the head."""
    module, _, layer = name.partition(".")
    rank = {"embed": 0, "attn": 1, "ffn": 1, "head": 2}.get(module, 3)
    return rank, int(layer) if layer.isdigit() else -1, module


def of_run(s: RunSummary) -> dict[str, list[Figure]]:
    """Every figure of a run's page, by section."""
    attempts = sorted({p.attempt for p in s.over_steps})
    steps = [
        frequency(
            [p for p in s.over_steps if p.attempt == attempt and p.step > 0],
            s.timing if len(attempts) == 1 else Timing(),
            attempt if len(attempts) > 1 else None,
        )
        for attempt in attempts
    ]
    severity = severities(s.severities)
    return {
        "steps": [f for f in steps if f],
        "bits": bits(s.bits),
        "severity": [severity] if severity else [],
        "noise": noise(s.noise) if s.noise else [],
        "training": training(s.drift) if s.drift else [],
        "drift": drift(s.drift) if s.drift else [],
        "answers": [f for f in (answers(s.answers),) if f],
    }
