"""A mergeable sketch of severities: counts in bins of equal ratio. Pure.

As DDSketch (Masson, Rim, Lee: VLDB 2019), with `BINS` bins a power of ten: a quantile read from it is off by at most
`RELATIVE_ERROR` of its value, however many sketches were added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

BINS = 10
"""Per power of ten."""
RELATIVE_ERROR = 10 ** (0.5 / BINS) - 1


def bin_of(value: float) -> int:
    """Number of the bin of a positive finite value: floor(BINS * log10(value))."""
    return math.floor(BINS * math.log10(value))


def sketch(values: Iterable[float]) -> dict[int, int]:
    """Counts by bin, in the order of bins; what is not positive and finite is left out."""
    counts: dict[int, int] = {}
    for value in values:
        if value > 0 and math.isfinite(value):
            counts[bin_of(value)] = counts.get(bin_of(value), 0) + 1
    return dict(sorted(counts.items()))


def merge(sketches: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sum of sketches, in the order of bins."""
    total: dict[int, int] = {}
    for one in sketches:
        for number, count in one.items():
            total[number] = total.get(number, 0) + count
    return dict(sorted(total.items()))


def quantile(counts: Mapping[int, int], q: float) -> float | None:
    """Value below which a share ``q`` lies: the geometric middle of its bin; None if nothing was counted."""
    total = sum(counts.values())
    seen = 0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= max(q * total, 1):
            return float(10 ** min((number + 0.5) / BINS, 308.2))
    return None
