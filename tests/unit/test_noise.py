"""Noise-to-signal, WCNTS and leaf frequencies."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_runs import gradient
from tandem.records import GradientRecord
from tandem.statistics.noise import noise, ratio

FINITE = st.floats(0, 1e150)
ANY = st.floats(0, 1e308) | st.sampled_from([math.inf, math.nan])


@given(st.lists(st.tuples(FINITE, st.floats(1e-150, 1e150)), min_size=1, max_size=30), st.floats(1e-3, 1e3))
def test_wcnts_is_the_largest_ratio_and_has_no_scale(pairs: list[tuple[float, float]], factor: float) -> None:
    one = noise([gradient(i, n, s) for i, (n, s) in enumerate(pairs, 1)], len(pairs))
    other = noise([gradient(i, n * factor, s * factor) for i, (n, s) in enumerate(pairs, 1)], len(pairs))
    expected = float(np.max(np.array([n for n, _ in pairs]) / np.array([s for _, s in pairs])))
    assert one.wcnts == pytest.approx(expected)
    assert other.wcnts == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.tuples(ANY, ANY), max_size=30), st.integers(0, 5), st.randoms())
def test_every_step_is_counted_once_whatever_its_numbers(
    pairs: list[tuple[float, float]], clean: int, rng: random.Random
) -> None:
    records = [gradient(i, n, s) for i, (n, s) in enumerate(pairs, 1)]
    found = noise(records, len(records) + clean)
    rng.shuffle(records)
    assert noise(records, len(records) + clean) == found
    assert found.steps == len(pairs) + clean
    assert found.undefined == sum(not math.isfinite(s) for _, s in pairs)
    assert found.noisy <= len(pairs)
    if found.unbounded:
        assert found.wcnts == math.inf
    assert found.worst is None or math.isfinite(found.worst)


@pytest.mark.parametrize(
    ("n", "s", "expected"),
    [
        (0.0, 0.0, 0.0), (1e-300, 0.0, math.inf), (math.nan, 1.0, math.inf), (math.inf, 1.0, math.inf),
        (1.0, math.nan, None), (math.nan, math.nan, None), (1.0, math.inf, None), (1e308, 1e-308, math.inf),
        (0.5, 2.0, 0.25),
    ],
)  # fmt: skip
def test_the_rules_for_what_has_no_ratio(n: float, s: float, expected: float | None) -> None:
    assert ratio(n, s) == expected


def test_all_nan_none_and_single() -> None:
    assert noise([gradient(1, math.nan, math.nan)] * 1, 1).wcnts is None
    assert noise([], 0).wcnts is None
    assert noise([], 7).wcnts == 0.0  # equal gradients leave no row
    one = noise([gradient(3, 0.5, 2.0)], 1)
    assert (one.wcnts, one.worst_step, one.noisy) == (0.25, 3, 1)
    assert noise([gradient(3, 0.0, 2.0)], 4).worst_step is None


def test_leaves_count_every_compared_step() -> None:
    rows: list[GradientRecord] = [
        gradient(1, 1.0, 2.0), gradient(1, 1.0, 2.0, "attn.0.wq", 10), gradient(4, 1.0, 2.0),
        gradient(4, 1.0, 2.0, "attn.0.wq", 30), gradient(4, 1.0, 2.0, "head.w", 1),
    ]  # fmt: skip
    found = noise(rows, 8)
    assert (found.noisy, found.steps, found.wcnts) == (2, 8, 0.5)
    assert found.leaves["attn.0.wq"].frequency == 40 / (100 * 8)
    assert found.leaves["attn.0.wq"].affected == 2
    assert (found.leaves["head.w"] + found.leaves["head.w"]).elements == 1600
