"""Frequencies and their intervals, against an independent path and against simulated bursts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, norm, t

from tandem.statistics.bounds import MANY_DEGREES, student_t, zero_bound
from tandem.statistics.frequency import Sums, design_effect, per_element, per_step, sums

Step = tuple[int, int, bool]


@st.composite
def series(draw: st.DrawFn, least: int = 0) -> list[Step]:
    steps = draw(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1)), min_size=least, max_size=40))
    found = [(n, int(n * share)) for n, share in steps]
    return [(n, m, m > 0) for n, m in found]


@given(series(), st.randoms())
def test_sums_do_not_depend_on_order_nor_on_how_runs_are_split(steps: list[Step], rng: random.Random) -> None:
    whole = sums(steps)
    cut = rng.randint(0, len(steps))
    assert sums(steps[:cut]) + sums(steps[cut:]) == whole
    rng.shuffle(steps)
    assert sums(steps) == whole
    assert whole.clusters == sum(n > 0 for n, _, _ in steps)


@given(series(least=2))
def test_the_interval_is_korn_and_graubards_on_a_numpy_path(steps: list[Step]) -> None:
    s = sums(steps)
    rate = per_element(s)
    if s.clusters < 2 or not 0 < s.mismatched < s.elements:
        return
    assert rate is not None
    e = np.array([n for n, _, _ in steps if n], dtype=np.longdouble)
    m = np.array([k for n, k, _ in steps if n], dtype=np.longdouble)
    p, n = m.sum() / e.sum(), len(e)
    variance = float(n / (n - 1) * ((m - p * e) ** 2).sum() / e.sum() ** 2)
    trials = float(e.sum())
    if variance > 1e-25:
        correction = (norm.ppf(0.975) / t.ppf(0.975, n - 1)) ** 2
        trials = min(trials, float(p * (1 - p)) / variance * correction)
    assert rate.effective == pytest.approx(trials, rel=1e-5)
    hit = trials * float(p)
    assert rate.value == pytest.approx(float(p))
    if min(hit, trials - hit) < 2000:
        low, high = beta.ppf(0.025, hit, trials - hit + 1), beta.ppf(0.975, hit + 1, trials - hit)
        assert rate.low == pytest.approx(min(low, float(p)), rel=1e-3, abs=1e-12)
        assert rate.high == pytest.approx(max(high, float(p)), rel=1e-3)


@given(series(), st.integers(1, 1000))
def test_scale_invariance(steps: list[Step], factor: int) -> None:
    """Tensors k times as large, as much corrupted: the same frequency, at least as wide as elements alone would say."""
    one, other = per_element(sums(steps)), per_element(sums([(n * factor, m * factor, a) for n, m, a in steps]))
    if one is None or other is None:
        assert one is other
        return
    assert other.value == pytest.approx(one.value)
    assert per_step(sums(steps)) == per_step(sums([(n * factor, m * factor, a) for n, m, a in steps]))
    if one.effective < sum(n for n, _, _ in steps) * 0.999:  # not capped by the number of elements
        assert (other.low, other.high) == pytest.approx((one.low, one.high), rel=1e-6)


@given(series())
def test_an_interval_encloses_its_rate(steps: list[Step]) -> None:
    for rate in (per_element(sums(steps)), per_step(sums(steps))):
        if rate is not None:
            assert 0 <= rate.low <= rate.value <= rate.high <= 1


def test_one_burst_is_one_event_however_many_elements_it_hits() -> None:
    clean = [(10**6, 0, False)] * 199
    small, large = (per_element(sums([*clean, (10**6, n, True)])) for n in (10, 100_000))
    assert small is not None
    assert large is not None
    assert small.high / small.value == pytest.approx(large.high / large.value, rel=0.1)
    assert large.high / large.value > 5  # as from one event in 200 steps, not as from 100,000 elements
    effect = design_effect(sums([*clean, (10**6, 100_000, True)]))
    assert effect is not None
    assert effect > 90_000


def test_nothing_found_and_everything_found_count_a_step_as_one_trial() -> None:
    nothing, everything = sums([(1000, 0, False)] * 50), sums([(1000, 1000, True)] * 50)
    for s in (nothing, everything):
        assert design_effect(s) is None
    low, high = per_element(nothing), per_element(everything)
    assert low is not None
    assert high is not None
    assert (low.value, low.low, low.high) == (0, 0, zero_bound(50))
    assert (high.value, high.low, high.high) == (1, 1 - zero_bound(50), 1)


def test_edges() -> None:
    assert per_element(Sums()) is None
    assert per_step(Sums()) is None
    assert sums([(0, 0, True)]) == Sums()
    single = per_element(sums([(1, 1, True)]))
    assert single is not None
    assert (single.value, single.low, single.high) == (1, 0, 1)  # one step says nothing of the spread
    missing = per_step(sums([(10, 0, True), (10, 0, False)]))  # a tensor that was never received
    assert missing is not None
    assert missing.value == 0.5


@pytest.mark.parametrize(("rate", "burst"), [(0.05, 1.0), (0.3, 0.2), (0.02, 0.01)])
def test_it_covers_the_true_frequency_of_a_bursting_node(rate: float, burst: float) -> None:
    """Steps corrupt with a probability, and then a random share of their elements: 95 % intervals hold in 93 %."""
    rng = np.random.default_rng(7)
    inside = naive = 0
    for _ in range(400):
        hit = rng.random(300) < rate
        share = np.where(hit, rng.random(300) * burst, 0.0)
        steps = [(100_000, int(100_000 * x), bool(h)) for x, h in zip(share, hit, strict=True)]
        found = per_element(sums(steps))
        assert found is not None
        inside += found.low <= rate * burst / 2 <= found.high
        total = sum(m for _, m, _ in steps)
        spread = 1.96 * (found.value * (1 - found.value) / (300 * 100_000)) ** 0.5
        naive += abs(total / (300 * 100_000) - rate * burst / 2) <= spread
    assert inside / 400 > 0.93
    assert naive / 400 < 0.2  # elements taken as independent are wrong nearly always


@given(st.integers(1, MANY_DEGREES), st.floats(1e-4, 0.4))
def test_students_quantile(degrees: int, tail: float) -> None:
    assert student_t(tail, degrees) == pytest.approx(t.ppf(1 - tail, degrees), rel=1e-6)


def test_students_quantile_ends_in_the_normal_one() -> None:
    assert student_t(0.025, MANY_DEGREES + 1) == pytest.approx(t.ppf(0.975, MANY_DEGREES + 1), rel=1e-4)
    for tail, degrees in ((0.5, 3), (0, 3), (0.1, 0)):
        with pytest.raises(ValueError, match="quantile"):
            student_t(tail, degrees)
