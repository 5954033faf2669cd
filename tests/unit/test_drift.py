"""Drift rates and loss spikes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_runs import drift
from tandem.records import StepRecord
from tandem.statistics.drift import POINTS, drift_lines, log_slope, loss_spikes, spikes_of


@given(st.floats(-0.05, 0.05), st.floats(1e-6, 1e6), st.integers(2, 500), st.floats(1e-3, 1e3))
def test_the_rate_of_an_exponential_is_its_exponent(rate: float, start: float, steps: int, factor: float) -> None:
    points = [(s, start * math.exp(rate * s)) for s in range(1, steps + 1)]
    assert log_slope(points) == pytest.approx(rate, abs=1e-9)
    assert log_slope([(s, y * factor) for s, y in points]) == pytest.approx(rate, abs=1e-9)


def test_one_wild_point_in_four_does_not_move_it() -> None:
    rng = random.Random(3)
    points = [(s, math.exp(0.01 * s)) for s in range(1, 101)]
    wild = [(s, y * 1e6) if rng.random() < 0.25 else (s, y) for s, y in points]
    assert log_slope(wild) == pytest.approx(0.01, rel=0.3)
    least_squares = np.polyfit([s for s, _ in wild], np.log([y for _, y in wild]), 1)[0]
    assert abs((log_slope(wild) or 0) - 0.01) < abs(least_squares - 0.01) + 1e-9


def test_too_few_points_have_no_rate_and_many_are_thinned() -> None:
    assert log_slope([]) is None
    assert log_slope([(5, 1.0)]) is None
    assert log_slope([(5, 1.0), (5, 2.0)]) is None
    assert log_slope([(s, float(s)) for s in range(1, 100 * POINTS)]) is not None


def test_a_line_an_arm_exact_before_sketch_and_groups_left_out() -> None:
    rows = [
        drift(1, 0.0), drift(2, 0.1, method="sketch"), drift(3, 0.9, method="sketch"), drift(3, 0.2), drift(4, None),
        drift(5, math.nan), drift(3, 99.0, part="attn.3"), drift(2, 5.0, arm="baseline"),
    ]  # fmt: skip
    baseline, suspect = drift_lines(rows)
    assert (baseline.arm, baseline.first, baseline.last_drift, baseline.rate) == ("baseline", 2, 5.0, None)
    assert (suspect.first, suspect.last, suspect.last_drift, suspect.last_relative) == (2, 3, 0.2, 0.02)
    assert (suspect.points, suspect.nonfinite) == (2, 1)
    assert suspect.rate == pytest.approx(math.log(2))
    assert drift_lines([]) == []
    assert drift_lines([drift(1, 0.0)])[0].first is None
    assert drift_lines([drift(2, math.inf)])[0].first == 2


def falling(steps: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [3 + 6 * math.exp(-s / 200) + rng.gauss(0, 0.02) for s in range(steps)]


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e6])
def test_spikes_are_found_at_any_scale_and_falling_losses_have_none(factor: float) -> None:
    losses = [x * factor for x in falling(600)]
    assert loss_spikes(list(enumerate(losses))) == []
    for at in (50, 51, 52, 400):
        losses[at] *= 2
    assert loss_spikes(list(enumerate(losses))) == [50, 400]


def test_a_loss_that_never_recovers_is_one_spike() -> None:
    losses = falling(300)
    broken = losses[:200] + [11.0] * 100
    assert loss_spikes(list(enumerate(broken))) == [200]
    dead = losses[:200] + [math.nan] * 100
    assert loss_spikes(list(enumerate(dead))) == [200]


def test_edges() -> None:
    assert loss_spikes([]) == []
    assert loss_spikes([(1, math.nan)]) == [1]
    assert loss_spikes([(1, None), (2, 5.0), (3, 500.0)]) == []  # nothing to judge by yet
    assert loss_spikes([(s, 2.0) for s in range(100)]) == []
    assert loss_spikes([(s, 2.0) for s in range(100)] + [(100, 2.01)]) == []  # below the floor of 1 %


def test_each_arm_has_its_own() -> None:
    run = drift(1, 0.0).run_id
    losses = falling(100)
    steps = [
        StepRecord(
            run_id=run, attempt=1, step=s, classes={}, rows=0, loss_reference=x, loss_suspect=x * (3 if s == 60 else 1)
        )
        for s, x in enumerate(losses)
    ]
    assert spikes_of(reversed(steps)) == {"suspect": [60]}
