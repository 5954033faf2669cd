"""Charts of the report as inline SVG. Pure: numbers in, markup out.

Colours, fonts and dark mode come from the page's style sheet by class; every mark carries a ``<title>``; the page
puts the same data in a table under each chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup, escape

from tandem import formats

WIDTH, LEFT, RIGHT, TOP = 760, 66, 12, 14
PLOT = WIDTH - LEFT - RIGHT


@dataclass(frozen=True, slots=True)
class Bin:
    """Consecutive steps that share one mark."""

    first: int
    last: int
    elements: int
    mismatched: int

    @property
    def frequency(self) -> float:
        return self.mismatched / self.elements if self.elements else 0.0

    @property
    def label(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


def bins(points: Sequence[tuple[int, int, int]], most: int = 180) -> list[Bin]:
    """(step, elements, mismatched), ascending by step, as at most ``most`` bins with the same number of steps."""
    if not points:
        return []
    low, high = points[0][0], points[-1][0]
    width = max(1, ceil((high - low + 1) / most))
    sums: dict[int, list[int]] = {}
    for step, elements, mismatched in points:
        total = sums.setdefault((step - low) // width, [0, 0])
        total[0] += elements
        total[1] += mismatched
    return [
        Bin(low + i * width, min(low + (i + 1) * width - 1, high), elements, mismatched)
        for i, (elements, mismatched) in sorted(sums.items())
    ]


def frequency_chart(data: Sequence[Bin], name: str) -> Markup:
    """Mismatch frequency over steps: logarithmic, with a lane of its own for exactly zero."""
    height, lane, axis = 240, 26, 34
    bottom = height - axis - lane
    values = [b.frequency for b in data if b.mismatched]
    low = floor(log10(min(values))) if values else -6
    high = max(low + 1, ceil(log10(max(values)))) if values else 0
    if not data:
        return Markup()
    first, span = data[0].first, max(1, data[-1].last - data[0].first)

    def x(step: float) -> float:
        return LEFT + PLOT * (step - first) / span if len(data) > 1 else LEFT + PLOT / 2

    def y(frequency: float) -> float:
        return TOP + (bottom - TOP) * (high - log10(frequency)) / (high - low)

    zero = bottom + lane / 2 + 4
    parts = []
    every = max(1, ceil((high - low) / 6))
    for decade in range(low, high + 1, every) if values else ():
        parts.append(_line(LEFT, y(10.0**decade), WIDTH - RIGHT, y(10.0**decade), "grid"))
        parts.append(_text(LEFT - 8, y(10.0**decade) + 4, f"1e{decade}", "end"))
    parts.append(_line(LEFT, zero, WIDTH - RIGHT, zero, "axis"))
    parts.append(_text(LEFT - 8, zero + 4, "0", "end"))
    for tick in _ticks(data[0].first, data[-1].last):
        parts.append(_line(x(tick), zero, x(tick), zero + 5, "axis"))
        anchor = "end" if x(tick) > WIDTH - RIGHT - 20 else "middle"
        parts.append(_text(x(tick), zero + 19, f"{tick:,}", anchor))
    parts.append(_text(WIDTH - RIGHT, height - 2, "step", "end", "label"))
    for b in data:
        middle = x((b.first + b.last) / 2)
        title = f"step {b.label}: {b.mismatched:,} of {b.elements:,} elements ({formats.scientific(b.frequency)})"
        if b.mismatched:
            parts.append(
                Markup('<g class="bad">{}<circle cx="{}" cy="{}" r="3.2"><title>{}</title></circle></g>').format(
                    _line(middle, zero, middle, y(b.frequency), "stem"), _n(middle), _n(y(b.frequency)), title
                )
            )
        else:
            parts.append(
                Markup('<rect class="zero" x="{}" y="{}" width="2" height="6"><title>{}</title></rect>').format(
                    _n(middle - 1), _n(zero - 3), title
                )
            )
    return _svg(height, name, parts)


def bits_chart(counts: Sequence[int], name: str) -> Markup:
    """How often each bit differed, most significant left; sign, exponent and mantissa are named under the axis."""
    width = len(counts)
    groups = bit_groups(width)
    height, bottom = 200, 140
    step = PLOT / width
    most = max(1, *counts)
    parts = []
    for i in range(width):
        bit = width - 1 - i
        count = counts[bit]
        kind = next(g for g, low, high in groups if low <= bit <= high)
        tall = max(2.0, (bottom - TOP) * count / most) if count else 0.0
        parts.append(
            Markup('<rect class="bar {}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
                kind,
                _n(LEFT + i * step + 1),
                _n(bottom - tall),
                _n(step - 2),
                _n(tall),
                f"bit {bit} ({kind}): {count:,}",
            )
        )
        if width <= 16 or bit % 4 == 0 or bit == width - 1:
            parts.append(_text(LEFT + (i + 0.5) * step, bottom + 15, str(bit), "middle"))
    parts += [
        _line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis"),
        _text(LEFT - 8, TOP + 8, formats.short(max(counts)), "end"),
        _text(LEFT - 8, bottom + 4, "0", "end"),
    ]
    for kind, low, high in groups:
        left, right = LEFT + (width - 1 - high) * step, LEFT + (width - low) * step
        parts.append(_line(left + 2, bottom + 23, right - 2, bottom + 23, f"rule {kind}"))
        parts.append(_text((left + right) / 2, bottom + 39, kind, "middle", "label"))
    return _svg(height, name, parts)


def bit_groups(width: int) -> list[tuple[str, int, int]]:
    """(name, lowest bit, highest bit) of a floating type of that width; 16 bits are read as bfloat16.

    Tandem computes in bfloat16 or float32 only; for another width the bits have no names.
    """
    mantissa = {16: 7, 32: 23}.get(width)
    if mantissa is None:
        return [("bits", 0, width - 1)]
    return [("sign", width - 1, width - 1), ("exponent", mantissa, width - 2), ("mantissa", 0, mantissa - 1)]


def severity_chart(decades: dict[int, int], name: str) -> Markup:
    """Rows per decade of their median severity."""
    if not decades:
        return Markup()
    low, high = min(decades), max(decades)
    # Far outliers (severity reaches 1e12 and more) would leave the rest a hair wide: merge decades instead.
    width = max(1, ceil((high - low + 1) / 32))
    merged: dict[int, int] = {}
    for decade, rows in decades.items():
        merged[(decade - low) // width] = merged.get((decade - low) // width, 0) + rows
    n = (high - low) // width + 1
    height, bottom = 180, 132
    step = min(80.0, PLOT / n)
    most = max(merged.values())
    right = LEFT + n * step
    parts = [_line(LEFT, bottom, right, bottom, "axis")]
    every = max(1, ceil(n / 14))
    for i in range(n):
        rows = merged.get(i, 0)
        start = low + i * width
        tall = max(2.0, (bottom - TOP) * rows / most) if rows else 0.0
        parts.append(
            Markup('<rect class="bar mantissa" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
                _n(LEFT + i * step + 1),
                _n(bottom - tall),
                _n(step - 2),
                _n(tall),
                f"1e{start} to 1e{start + width}: {rows:,} rows",
            )
        )
        if i % every == 0:
            parts.append(_text(LEFT + i * step, bottom + 16, f"1e{start}", "middle"))
    if n % every == 0:
        parts.append(_text(right, bottom + 16, f"1e{low + n * width}", "end" if right > WIDTH - 40 else "middle"))
    parts += [
        _text(LEFT - 8, TOP + 8, f"{most:,}", "end"),
        _text(LEFT - 8, bottom + 4, "0", "end"),
        _text(LEFT, bottom + 38, "median relative difference of a tensor", "start", "label"),
    ]
    return _svg(height, name, parts)


def _ticks(first: int, last: int, most: int = 8) -> list[int]:
    if last == first:
        return [first]
    raw = (last - first) / most
    scale = 10 ** floor(log10(raw)) if raw >= 1 else 1
    step = max(1, next(int(scale * m) for m in (1, 2, 5, 10) if scale * m >= raw or m == 10))
    inner = [t for t in range((first // step + 1) * step, last + 1, step) if t - first >= step / 2]
    return [first, *inner]


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, _n(x1), _n(y1), _n(x2), _n(y2))


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(kind, _n(x), _n(y), anchor, text)


def _svg(height: int, name: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, height, escape(name), Markup("").join(parts)
    )
