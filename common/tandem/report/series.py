"""Thins long series for charts and their tables without hiding what a reader looks for. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 180
"""Most marks of one series in a chart."""


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
    def middle(self) -> float:
        return (self.first + self.last) / 2

    @property
    def label(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


def bins(points: Sequence[tuple[int, int, int]], most: int = MOST) -> list[Bin]:
    """(step, elements, mismatched), ascending by step, as at most ``most`` bins with the same number of steps."""
    if not points:
        return []
    low, high = points[0][0], points[-1][0]
    width = max(1, math.ceil((high - low + 1) / most))
    sums: dict[int, list[int]] = {}
    for step, elements, mismatched in points:
        total = sums.setdefault((step - low) // width, [0, 0])
        total[0] += elements
        total[1] += mismatched
    return [
        Bin(low + i * width, min(low + (i + 1) * width - 1, high), elements, mismatched)
        for i, (elements, mismatched) in sorted(sums.items())
    ]


def thinned(points: Sequence[tuple[int, float]], most: int = MOST) -> list[tuple[int, float]]:
    """(step, value), ascending by step, as at most ``most`` of these very points, the first and the last among them.

    Each stretch of steps keeps its least and its greatest value (min-max decimation: Steinarsson, "Downsampling Time
    Series for Visual Representation", 2013), so that a spike of one step stays. A value that is not finite counts as
    the greatest.
    """
    if len(points) <= most:
        return list(points)
    width = (len(points) - 2) / max(1, (most - 2) // 2)
    stretches: dict[int, list[tuple[int, float]]] = {}
    for i, point in enumerate(points[1:-1]):
        stretches.setdefault(int(i / width), []).append(point)
    kept = {points[0], points[-1]}
    for stretch in stretches.values():
        kept |= {min(stretch, key=_height), max(stretch, key=_height)}
    return sorted(kept, key=lambda point: point[0])


def _height(point: tuple[int, float]) -> float:
    return point[1] if math.isfinite(point[1]) else math.inf
