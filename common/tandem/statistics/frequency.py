"""How often elements and steps mismatch, with intervals that respect that corruption comes in bursts. Pure.

*Per step*: of the compared steps, those in which anything mismatched; exact (Clopper-Pearson). This is the primary
rate: a burst within a step counts once. Steps of one spike still follow one another, so where bursts last for many
steps (``tandem.statistics.timing``) this interval too is narrower than it should be.

*Per element*: mismatching / all elements. Elements of a step are not independent, so steps are taken as clusters: the
variance is that of the ratio estimator, linearised, clusters drawn with replacement (Cochran, Sampling Techniques,
1977, 6.3 and 11.7), and the interval is Clopper-Pearson on the effective sample size (Korn and Graubard, "Confidence
intervals for proportions with small expected number of positive counts estimated from survey data", Survey Methodology
24, 1998). A single burst in many steps is worth one event there, however many elements it hit.

Both rest on sums only, so they are merged over runs without the rows, and computed in whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

import msgspec

from tandem.statistics.bounds import CONFIDENCE, interval, student_t, zero_bound


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """What the intervals need of any number of steps; ``+`` merges."""

    clusters: int = 0
    """Steps in which any element was compared."""
    affected: int = 0
    """Of them, those with a mismatching tensor."""
    elements: int = 0
    mismatched: int = 0
    elements_squared: int = 0
    """Sum over the steps of (elements of the step) squared; likewise the next two."""
    mismatched_squared: int = 0
    product: int = 0
    """Elements x mismatching elements."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.clusters + other.clusters,
            self.affected + other.affected,
            self.elements + other.elements,
            self.mismatched + other.mismatched,
            self.elements_squared + other.elements_squared,
            self.mismatched_squared + other.mismatched_squared,
            self.product + other.product,
        )


def total(every: Iterable[Sums]) -> Sums:
    """Sum of any number, none included."""
    return Sums(*map(sum, zip(*map(msgspec.structs.astuple, every), strict=True)))


def sums(steps: Iterable[tuple[int, int, bool]]) -> Sums:
    """Sums of (elements compared, of them mismatching, whether any tensor mismatched) of each step.

    A tensor that was never received mismatches without counted elements. Steps without elements are left out.
    """
    n = hit = e = m = ee = mm = em = 0
    for elements, mismatched, affected in steps:
        if elements <= 0:
            continue
        n, hit, e, m = n + 1, hit + affected, e + elements, m + mismatched
        ee, mm, em = ee + elements * elements, mm + mismatched * mismatched, em + elements * mismatched
    return Sums(n, hit, e, m, ee, mm, em)


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate with its two-sided interval at `bounds.CONFIDENCE`."""

    value: float
    low: float
    high: float
    effective: float
    """Independent trials that the interval rests on."""


def per_step(s: Sums, confidence: float = CONFIDENCE) -> Rate | None:
    """Share of steps that were affected; None if none was compared."""
    if not s.clusters:
        return None
    low, high = interval(s.affected, s.clusters, confidence)
    return Rate(s.affected / s.clusters, low, high, s.clusters)


def per_element(s: Sums, confidence: float = CONFIDENCE) -> Rate | None:
    """Share of elements that mismatched, steps as clusters; None if none was compared.

    Where no element mismatched, or all did, there is no spread to estimate: each step counts as one trial
    (`bounds.zero_bound`). With a single step nothing is known of the spread: the interval is (0, 1).
    """
    if not s.elements:
        return None
    p = s.mismatched / s.elements
    if s.mismatched == 0:
        return Rate(p, 0.0, zero_bound(s.clusters, confidence), s.clusters)
    if s.clusters < 2:
        return Rate(p, 0.0, 1.0, s.clusters)
    if s.mismatched == s.elements:
        return Rate(p, 1 - zero_bound(s.clusters, confidence), 1.0, s.clusters)
    effective = _effective(s, confidence)
    low, high = interval(effective * p, effective, confidence)
    return Rate(p, min(low, p), max(high, p), effective)


def design_effect(s: Sums) -> float | None:
    """How many times larger the variance per element is than if elements were independent; None without a spread."""
    if s.clusters < 2 or not 0 < s.mismatched < s.elements:
        return None
    return _variance(s) * s.elements * s.elements / (s.mismatched * (s.elements - s.mismatched)) * s.elements


def _variance(s: Sums) -> float:
    """N / (n - 1) * sum (m_i - p e_i)^2 / E^2, the sum in whole numbers: no cancellation."""
    e, m = s.elements, s.mismatched
    spread = s.mismatched_squared * e * e - 2 * m * e * s.product + m * m * s.elements_squared
    return s.clusters * spread / ((s.clusters - 1) * e**4)


def _effective(s: Sums, confidence: float) -> float:
    """P (1 - p) / V, corrected for the few degrees of freedom of V; never more trials than elements."""
    variance, tail = _variance(s), (1 - confidence) / 2
    if variance <= 0:
        return float(s.elements)
    binomial = s.mismatched * (s.elements - s.mismatched) / s.elements**2
    correction = (NormalDist().inv_cdf(1 - tail) / student_t(tail, s.clusters - 1)) ** 2
    return min(float(s.elements), binomial / variance * correction)
