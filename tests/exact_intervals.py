"""Intervals by numerical integration in numpy alone, for tests that compute a page's numbers by another path."""

from __future__ import annotations

import math

import numpy as np

LEVEL = 0.95
_LOGIT = np.linspace(-80, 80, 400_001)


def beta_quantile(share: float, a: float, b: float) -> float:
    """Of the beta distribution, whose density over ln(x / (1 - x)) is smooth."""
    log = a * _LOGIT - (a + b) * np.logaddexp(0, _LOGIT)
    at = float(np.interp(share, *_cumulative(np.exp(log - log.max()))))
    return 1 / (1 + math.exp(-at))


def _cumulative(density: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distribution of a density over `_LOGIT`, where it rises, and the places."""
    summed = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    rises = np.concatenate([[True], np.diff(summed) > 0])
    return summed[rises] / summed[-1], _LOGIT[rises]


def _quantile(density: np.ndarray, share: float) -> float:
    return float(np.interp(share, *_cumulative(density)))


def clopper_pearson(found: float, of: float) -> tuple[float, float]:
    """Two-sided at `LEVEL`; the counts may be effective ones."""
    tail = (1 - LEVEL) / 2
    low = beta_quantile(tail, found, of - found + 1) if found else 0.0
    high = beta_quantile(1 - tail, found + 1, of - found) if found < of else 1.0
    return low, high


def design_effect(clusters: list[np.ndarray]) -> float:
    """Variance of the share of true elements with whole clusters drawn, over that of independent elements."""
    everything = np.concatenate(clusters)
    p = everything.mean()
    return _variance(clusters) / (p * (1 - p) / everything.size)


def per_element(clusters: list[np.ndarray]) -> tuple[float, float]:
    """Interval of the share of true elements, on the effective sample size (Korn and Graubard 1998)."""
    tail, n = (1 - LEVEL) / 2, len(clusters)
    p = np.concatenate(clusters).mean()
    normal = _quantile(np.exp(-(_LOGIT**2) / 2), 1 - tail)
    student = _quantile((1 + _LOGIT**2 / (n - 1)) ** (-n / 2), 1 - tail)
    effective = p * (1 - p) / _variance(clusters) * (normal / student) ** 2
    return clopper_pearson(effective * p, effective)


def _variance(clusters: list[np.ndarray]) -> float:
    """Of the ratio estimator, linearised; clusters drawn with replacement (Cochran 1977)."""
    everything = np.concatenate(clusters)
    residuals = np.array([c.sum() - everything.mean() * c.size for c in clusters])
    return float(len(clusters) / (len(clusters) - 1) * (residuals**2).sum() / everything.size**2)
