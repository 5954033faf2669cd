"""Bounds on a rate from counts. Pure, standard library only.

``clean`` must say what it proves: nothing found in n trials bounds the rate from above; something
found gives an interval.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

CONFIDENCE = 0.95
EXACT_UP_TO = 2000
"""Largest number of rarer outcomes for which ``interval`` is exact (Clopper-Pearson); beyond, the
Wilson interval differs from it by less than 1 % of its width."""


MANY_DEGREES = 100_000
"""Degrees of freedom from which Student's distribution is the normal one to five digits."""


def zero_bound(trials: int, confidence: float = CONFIDENCE) -> float:
    """Exact one-sided upper bound of the rate per trial when none of ``trials`` showed anything.

    ``1 - (1 - c) ** (1 / n)``, computed without cancellation; 1.0 for no trials.
    """
    _check(confidence)
    if trials <= 0:
        return 1.0
    return -math.expm1(math.log1p(-confidence) / trials)


def rate_bound(hours: float, confidence: float = CONFIDENCE) -> float:
    """Upper bound of events per device-hour when none occurred in ``hours`` (Poisson): ``-ln(1 - c) / hours``.

    ``math.inf`` for no time.
    """
    _check(confidence)
    return -math.log1p(-confidence) / hours if hours > 0 else math.inf


def interval(found: float, trials: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two-sided interval of a rate: Clopper-Pearson (exact), Wilson where both counts are large.

    Args:
        found: 0 <= found <= trials; an effective count need not be whole.
        trials: any size; 0 gives (0, 1).
        confidence: two-sided; each side keeps half of the rest.

    Raises:
        ValueError: the counts or the confidence make no sense.
    """
    _check(confidence)
    if not 0 <= found <= trials:
        raise ValueError(f"found {found} of {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    if min(found, trials - found) > EXACT_UP_TO:
        return wilson(found, trials, confidence)
    tail = (1 - confidence) / 2
    rest = trials - found
    if found == 0:
        return 0.0, -math.expm1(math.log(tail) / trials)
    if rest == 0:
        return math.exp(math.log(tail) / trials), 1.0
    return _beta_quantile(found, rest + 1, tail), _beta_quantile(found + 1, rest, 1 - tail)


def wilson(found: float, trials: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson score interval (E. B. Wilson, 1927) of ``found`` in ``trials`` > 0."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, z2n = found / trials, z * z / trials
    centre = (p + z2n / 2) / (1 + z2n)
    half = z * math.sqrt(p * (1 - p) / trials + z2n / trials / 4) / (1 + z2n)
    return max(0.0, centre - half), min(1.0, centre + half)


@lru_cache(maxsize=1024)
def student_t(tail: float, degrees: int) -> float:
    """The t with P(T > t) = ``tail`` (0 < tail < 0.5) of Student's distribution with ``degrees`` >= 1 of freedom.

    By P(|T| > t) = I_x(degrees / 2, 1 / 2) with x = degrees / (degrees + t^2) (DLMF 8.17).
    """
    if not 0 < tail < 0.5 or degrees < 1:
        raise ValueError(f"no quantile for a tail of {tail} with {degrees} degrees of freedom")
    if degrees > MANY_DEGREES:
        return NormalDist().inv_cdf(1 - tail)
    x = _beta_quantile(degrees / 2, 0.5, 2 * tail)
    return math.sqrt(degrees * (1 - x) / x)


def beta_cdf(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), a, b > 0.

    Continued fraction DLMF 8.17.22 by the modified Lentz method; the symmetry I_x(a, b) = 1 - I_{1-x}(b, a) where the
    fraction converges slowly.
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - _log_beta(a, b))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    tiny, c = 1e-300, 1.0
    d = 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 100_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _log_beta(a: float, b: float) -> float:
    """Logarithm of B(a, b), without the cancellation of three lgamma where one argument is huge."""
    a, b = min(a, b), max(a, b)
    if b < 1000:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    # Stirling's series for lgamma(b) - lgamma(a + b); its terms are below 1e-19 from the fourth on

    def series(z: float) -> float:
        return 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5)

    ratio = (b - 0.5) * math.log1p(a / b) + a * math.log(a + b) - a + series(a + b) - series(b)
    return math.lgamma(a) - ratio


def _beta_quantile(a: float, b: float, p: float) -> float:
    """The x with I_x(a, b) = p.

    By Newton's method in u = log x (rates span many powers of ten) on log I for the lower half, on log (1 - I) for the
    upper one, which are near straight where they are steep. A step that leaves the bracket is replaced by bisection.
    """
    lower = p < 0.5
    goal = math.log(p) if lower else math.log1p(-p)
    low, high = -800.0, 0.0
    u = math.log(a / (a + b))
    for _ in range(200):
        x = math.exp(u)
        mass = beta_cdf(a, b, x) if lower else 1 - beta_cdf(a, b, x) if x < 0.5 else beta_cdf(b, a, -math.expm1(u))
        step = math.inf
        if mass > 0:
            error = math.log(mass) - goal
            if error == 0:
                return x
            if (error < 0) == lower:
                low = u
            else:
                high = u
            density = math.exp(a * u + (b - 1) * math.log(-math.expm1(u)) - _log_beta(a, b)) if u < 0 else 0.0
            step = -error * mass / density * (1 if lower else -1) if density else math.inf
        elif lower:
            low = u
        else:
            high = u
        if not low < u + step < high:
            step = (low + high) / 2 - u
        if abs(step) <= 1e-13 * max(1.0, abs(u)) or u + step in (low, high):
            break
        u += step
    return math.exp(u)


def _check(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not between 0 and 1")
