"""The charts of the reports, as Altair charts: numbers in, a chart out. Pure but for Altair itself.

Whatever is exactly zero on a logarithmic scale, and whatever is no finite number, has a lane of its own under the plot.
No series is told apart by colour alone: shape or dash differ too, and every chart's page has its data as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import Any

import altair as alt

from tandem.report.draw import INK, LINE, WIDTH

ZERO, ODD = "0", "not finite"
HEIGHT, LANE = 190, 20
TAIL = 8
"""Pixels between the plot and its lanes."""


@dataclass(frozen=True)
class Series:
    """One line or set of points over steps."""

    name: str
    """For the legend; plain text."""
    colour: str
    """A CSS variable of the page, as ``var(--suspect)``."""
    points: Sequence[tuple[float, float]]
    """(step, value), ascending by step; negative values only on a linear scale."""
    shape: str = "circle"
    dash: tuple[int, ...] = (1, 0)
    line: bool = False
    """Joined by a line, marks left out."""
    stems: bool = False
    """Each mark stands on a line from the bottom."""
    size: int = 30


@dataclass(frozen=True)
class Band:
    """A stretch of the step axis with a name of its own."""

    name: str
    first: float
    last: float


def over_steps(
    series: Sequence[Series], y: str, *, log: bool, x: str = "step", bands: Sequence[Band] = ()
) -> alt.TopLevelMixin:
    """Values over steps; the series share one scale and, if there are several, a legend.

    Args:
        series: at least one with a point.
        y: name of the quantity, with its unit if it has one.
        log: logarithmic, with a lane for exactly zero; else linear.
        x: name of the step axis.
        bands: stretches to tell apart by name; every second one is shaded.
    """
    steps = [step for s in series for step, _ in s.points] + [end for b in bands for end in (b.first, b.last)]
    low, high = min(steps), max(steps)
    scale = alt.Scale(domain=[low, high] if high > low else [low - 1, high + 1], nice=False, padding=6)
    plot = [(s, [p for p in s.points if isfinite(p[1]) and (p[1] > 0 or not log)]) for s in series]
    values = [value for _, points in plot for _, value in points]
    lanes = [
        (label, [(s, step) for s in series for step, value in s.points if inside(value)])
        for label, inside in ((ODD, lambda v: not isfinite(v)), (ZERO, lambda v: log and v == 0))
    ]
    used = [(label, marks) for label, marks in lanes if marks or (log and label == ZERO)]
    parts: list[Any] = [_bands(bands, scale)] if bands else []
    if values:
        parts.append(_plot(plot, _scale_y(values, y, log), scale, None if used else x))
    if used:
        parts.append(_lanes(used, scale, x))
    whole: alt.VConcatChart = alt.vconcat(*parts, spacing=TAIL).resolve_scale(
        x="shared", y="independent", color="shared", shape="shared"
    )
    return whole


def _plot(
    series: Sequence[tuple[Series, list[tuple[float, float]]]], y: alt.Y, x: alt.Scale, title: str | None
) -> alt.TopLevelMixin:
    axis = (
        _steps_axis(title)
        if title
        else alt.Axis(labels=False, ticks=False, title=None, domain=False, tickMinStep=1, tickCount=8)
    )
    names = [s.name for s, _ in series]
    lines = all(s.line for s, _ in series)
    legend = None if len(series) < 2 else alt.Legend(symbolType="stroke") if lines else alt.Legend()
    colour = alt.Color("name:N", legend=legend, sort=names).scale(domain=names, range=[s.colour for s, _ in series])
    layers: list[Any] = []
    for s, points in series:
        base = alt.Chart(_data(s.name, points)).encode(x=alt.X("step:Q", scale=x, axis=axis), y=y)
        if s.stems:
            layers.append(base.mark_rule(color=s.colour, opacity=0.5, aria=False).encode(y2=alt.value(HEIGHT)))
        if s.line:
            layers.append(
                base.mark_line(strokeWidth=1.8, interpolate="linear", aria=False).encode(
                    color=colour,
                    strokeDash=alt.StrokeDash("name:N", legend=legend, sort=names).scale(
                        domain=names, range=[list(t.dash) for t, _ in series]
                    ),
                )
            )
        else:
            layers.append(
                base.mark_point(filled=True, opacity=1, size=s.size, aria=False).encode(
                    color=colour,
                    shape=alt.Shape("name:N", legend=legend, sort=names).scale(
                        domain=names, range=[t.shape for t, _ in series]
                    ),
                )
            )
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def _scale_y(values: Sequence[float], title: str, log: bool) -> alt.Y:
    if not log:
        axis = alt.Axis(title=title, tickCount=5)
        return alt.Y("value:Q", axis=axis).scale(zero=False, nice=True)
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high = max(high, low + 1)
    every = max(1, ceil((high - low) / 6))
    ticks = [float(f"1e{d}") for d in range(low, high + 1, every) if -308 <= d <= 308]
    axis = alt.Axis(title=title, values=ticks, labelExpr="replace(format(datum.value, '.0e'), '+', '')")
    return alt.Y("value:Q", axis=axis).scale(
        type="log", domain=[float(f"1e{max(low, -308)}"), float(f"1e{min(high, 308)}")], nice=False
    )


def _bands(bands: Sequence[Band], x: alt.Scale) -> alt.TopLevelMixin:
    rows = [
        {
            "first": b.first,
            "last": b.last,
            "middle": (b.first + b.last) / 2,
            "name": b.name,
            "shade": 0.9 if i % 2 else 0.35,
        }
        for i, b in enumerate(bands)
    ]
    base = alt.Chart(alt.Data(values=rows))
    hidden = alt.Axis(labels=False, ticks=False, title=None, domain=False, grid=False)
    return alt.layer(
        base.mark_rect(color=LINE, aria=False).encode(
            x=alt.X("first:Q", scale=x, axis=hidden), x2="last:Q", opacity=alt.Opacity("shade:Q", scale=None)
        ),
        base.mark_text(color=INK, fontSize=11, aria=False).encode(
            x=alt.X("middle:Q", scale=x, axis=hidden), text="name:N"
        ),
    ).properties(width=WIDTH, height=LANE)


def _lanes(lanes: Sequence[tuple[str, Sequence[tuple[Series, float]]]], x: alt.Scale, title: str) -> alt.TopLevelMixin:
    labels = [label for label, _ in lanes]
    rows = [
        {"step": step, "lane": label, "name": s.name, "colour": s.colour} for label, marks in lanes for s, step in marks
    ]
    base = alt.Chart(alt.Data(values=rows))
    y = alt.Y("lane:N", sort=labels, axis=alt.Axis(title=None, grid=True, ticks=False, domain=False)).scale(
        domain=labels
    )
    return alt.layer(
        base.mark_tick(thickness=1.5, size=9, aria=False).encode(
            x=alt.X("step:Q", scale=x, axis=_steps_axis(title)), y=y, color=alt.Color("colour:N", scale=None)
        )
    ).properties(width=WIDTH, height=LANE * len(labels))


def _steps_axis(title: str) -> alt.Axis:
    return alt.Axis(title=title, format=",d", tickMinStep=1, tickCount=8, grid=False)


def _data(name: str, points: Sequence[tuple[float, float]]) -> alt.Data:
    return alt.Data(values=[{"name": name, "step": step, "value": value} for step, value in points])


GROUPS = {
    "sign": "var(--sign)",
    "exponent": "var(--exponent)",
    "mantissa": "var(--mantissa)",
    "bits": "var(--mantissa)",
}


def bit_groups(width: int) -> list[tuple[str, int, int]]:
    """(name, lowest bit, highest bit) of a floating type of that width; 16 bits are read as bfloat16.

    Tandem computes in bfloat16 or float32 only; for another width the bits have no names.
    """
    mantissa = {16: 7, 32: 23}.get(width)
    if mantissa is None:
        return [("bits", 0, width - 1)]
    return [("sign", width - 1, width - 1), ("exponent", mantissa, width - 2), ("mantissa", 0, mantissa - 1)]


def bits(counts: Sequence[int]) -> alt.TopLevelMixin:
    """How often each bit differed, most significant left; each group of bits stands apart, with its name below."""
    width, most = len(counts), max(1, *counts)
    step = WIDTH / width
    parts: list[alt.Chart] = []
    for name, low, high in bit_groups(width):
        rows = [{"bit": str(bit), "times": counts[bit]} for bit in range(high, low - 1, -1)]
        first = not parts
        axis = (
            alt.Axis(title="times", tickCount=4, format="~s")
            if first
            else alt.Axis(labels=False, ticks=False, title=None, domain=False)
        )
        parts.append(
            alt.Chart(alt.Data(values=rows))
            .mark_bar(color=GROUPS[name], aria=False)
            .encode(
                x=alt.X("bit:N", sort=None, axis=alt.Axis(title=name, labelAngle=0, labelOverlap=True)).scale(
                    paddingInner=0.15, paddingOuter=0.1
                ),
                y=alt.Y("times:Q", axis=axis).scale(domain=[0, most], nice=False),
            )
            .properties(width=step * (high - low + 1), height=140)
        )
    return alt.hconcat(*parts, spacing=10)


def severities(decades: dict[int, int]) -> alt.TopLevelMixin:
    """Tensors per decade of their median severity; wide ranges merge decades (severity reaches 1e12 and more)."""
    low, high = min(decades), max(decades)
    width = max(1, ceil((high - low + 1) / 32))
    merged: dict[int, int] = {}
    for decade, tensors in decades.items():
        merged[(decade - low) // width] = merged.get((decade - low) // width, 0) + tensors
    n = (high - low) // width + 1
    rows = [
        {"from": low + i * width + 0.04 * width, "to": low + (i + 1) * width - 0.04 * width, "tensors": merged[i]}
        for i in sorted(merged)
    ]
    end = low + n * width
    axis = alt.Axis(
        title="median relative difference of a tensor", labelExpr="'1e' + datum.value", grid=False,
        values=list(range(low, end + 1, width * max(1, ceil(n / 14)))),
    )  # fmt: skip
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(color="var(--mantissa)", aria=False)
        .encode(
            x=alt.X("from:Q", bin="binned", axis=axis).scale(domain=[low, end], nice=False),
            x2="to:Q",
            y=alt.Y("tensors:Q", axis=alt.Axis(tickMinStep=1, tickCount=4, format=",d")).scale(zero=True),
        )
    )
    return alt.layer(bars).properties(width=min(WIDTH, 80 * n), height=120)
