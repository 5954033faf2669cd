"""Bounds on rates, against scipy's beta distribution."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betainc
from scipy.stats import beta, binom

from tandem.statistics.bounds import EXACT_UP_TO, beta_cdf, interval, rate_bound, wilson, zero_bound


@given(st.integers(1, 10**15), st.floats(0.5, 0.9999))
def test_nothing_found_bounds_the_rate_exactly(trials: int, confidence: float) -> None:
    bound = zero_bound(trials, confidence)
    assert bound == pytest.approx(beta.ppf(confidence, 1, trials), rel=1e-9)
    # at the bound, seeing nothing has probability 1 - confidence
    assert trials * math.log1p(-bound) == pytest.approx(math.log1p(-confidence), rel=1e-9)


def test_no_trials_and_no_hours_prove_nothing() -> None:
    assert zero_bound(0) == 1.0
    assert rate_bound(0) == math.inf
    assert interval(0, 0) == (0.0, 1.0)


@given(st.floats(1e-6, 1e6), st.floats(0.5, 0.9999))
def test_the_bound_per_hour_is_that_of_a_poisson_process(hours: float, confidence: float) -> None:
    assert math.exp(-rate_bound(hours, confidence) * hours) == pytest.approx(1 - confidence)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, EXACT_UP_TO), st.integers(0, 10**9), st.sampled_from([0.9, 0.95, 0.99]))
def test_the_exact_interval_is_clopper_pearson(found: int, rest: int, confidence: float) -> None:
    trials, tail = found + rest, (1 - confidence) / 2
    if trials == 0:
        return
    low, high = interval(found, trials, confidence)
    # by the distribution function: scipy's own quantile is off by up to 1e-6 here
    assert betainc(found, rest + 1, low) == pytest.approx(tail, rel=1e-7) if found else low == 0
    assert betainc(found + 1, rest, high) == pytest.approx(1 - tail, rel=1e-7) if rest else high == 1
    assert low <= found / trials <= high


def test_the_exact_interval_covers_at_least_as_often_as_it_says() -> None:
    trials, rate = 30, 0.13
    ends = [interval(k, trials) for k in range(trials + 1)]
    covered = sum(binom.pmf(k, trials, rate) for k, (low, high) in enumerate(ends) if low <= rate <= high)
    assert covered >= 0.95


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.floats(0, 1))
def test_the_incomplete_beta_function(a: float, b: float, x: float) -> None:
    assert beta_cdf(a, b, x) == pytest.approx(betainc(a, b, x), rel=1e-7, abs=1e-12)


@given(st.integers(EXACT_UP_TO + 1, 10**6), st.integers(EXACT_UP_TO + 1, 10**12))
def test_wilson_is_close_where_it_replaces_the_exact_interval(found: int, rest: int) -> None:
    low, high = interval(found, found + rest)
    assert (low, high) == wilson(found, found + rest, 0.95)
    exact = beta.ppf(0.025, found, rest + 1), beta.ppf(0.975, found + 1, rest)
    width = exact[1] - exact[0]
    assert abs(low - exact[0]) < 0.01 * width
    assert abs(high - exact[1]) < 0.01 * width


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="found 3 of 2"):
        interval(3, 2)
    with pytest.raises(ValueError, match="confidence"):
        zero_bound(3, 1.0)
