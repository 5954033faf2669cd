"""Statistics of the benchmarks. Pure.

Everything rests on order statistics: no assumption about the shape of the noise, and the same numbers give the same
bounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

ERROR = 0.05
"""Each bound of an estimate is wrong with at most this probability."""

M = TypeVar("M", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantile of a sample with one-sided 95 % bounds of the population's quantile.

    A bound for which the sample is too small is the sample's extreme.
    """

    value: float
    low: float
    high: float
    runs: int


def quantile(values: Sequence[float], q: float = 0.5) -> Estimate:
    """Estimate a quantile.

    The k-th smallest of n values is a lower bound if fewer than k values lie at or below the true quantile
    with probability at most 5 %; that number is binomial (n, q). For the median this is the sign test.

    Args:
        values: independent measurements, at least one, no NaN.
        q: between 0 and 1.

    Raises:
        ValueError: no values, or NaN among them.
    """
    if not values or any(math.isnan(v) for v in values):
        raise ValueError("a quantile needs at least one value, and no NaN")
    ranked, n = sorted(values), len(values)
    below = _cumulative(n, q)
    low = max((k for k in range(1, n + 1) if below[k - 1] <= ERROR), default=1)
    high = min((k for k in range(1, n + 1) if 1 - below[k - 1] <= ERROR), default=n)
    return Estimate(_interpolated(ranked, q), ranked[low - 1], ranked[high - 1], n)


def ratios(blocks: Sequence[Mapping[M, float]], over: M, under: M) -> list[float]:
    """``over`` / ``under`` within each block: what disturbs the machine for longer than a block cancels.

    Raises:
        ValueError: a block lacks one of them, or ``under`` is not above 0.
    """
    for block in blocks:
        if over not in block or under not in block or block[under] <= 0:
            raise ValueError(f"a block has no usable {over!r} and {under!r}: {dict(block)}")
    return [block[over] / block[under] for block in blocks]


def shuffled_blocks(kinds: Sequence[M], blocks: int, seed: int) -> list[list[M]]:
    """Every kind once in each block, in a seeded random order, so that no kind always follows the same one."""
    rng = random.Random(seed)
    return [rng.sample(list(kinds), len(kinds)) for _ in range(blocks)]


def _cumulative(n: int, q: float) -> list[float]:
    """P(B <= k) for k = 0 .. n of a binomial (n, q)."""
    total, found = 0.0, []
    for k in range(n + 1):
        total += math.comb(n, k) * q**k * (1 - q) ** (n - k)
        found.append(min(total, 1.0))
    return found


def _interpolated(ranked: Sequence[float], q: float) -> float:
    """Linear between the two nearest order statistics (Hyndman and Fan 1996, type 7)."""
    place = q * (len(ranked) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    if ranked[low] == ranked[high]:
        return ranked[low]
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])
