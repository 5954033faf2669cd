"""Onset, gaps, bursts, burstiness."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.statistics.timing import Timing, timing

HITS = st.sets(st.integers(1, 2000), max_size=60)


@given(HITS, st.randoms())
def test_order_and_repeats_do_not_matter(hits: set[int], rng: random.Random) -> None:
    shuffled = [*hits, *hits]
    rng.shuffle(shuffled)
    assert timing(2000, shuffled) == timing(2000, sorted(hits))


@given(HITS)
def test_against_numpy(hits: set[int]) -> None:
    found = timing(2000, hits)
    gaps = np.diff(sorted(hits))
    assert (found.steps, found.affected, found.gaps) == (2000, len(hits), len(gaps))
    assert found.onset == (min(hits) if hits else None)
    if len(gaps):
        assert found.mean_gap == pytest.approx(gaps.mean())
        assert found.longest_gap == gaps.max()
    assert found.bursts == (0 if not hits else 1 + int((gaps > 1).sum()))
    if len(gaps) > 1:
        sigma, mu = gaps.std(), gaps.mean()
        assert found.burstiness == pytest.approx((sigma - mu) / (sigma + mu), abs=1e-9)
    else:
        assert found.burstiness is None


@given(HITS, st.integers(2, 50))
def test_burstiness_has_no_scale(hits: set[int], factor: int) -> None:
    one, other = timing(2000, hits).burstiness, timing(2000 * factor, {h * factor for h in hits}).burstiness
    assert (one is None and other is None) or one == pytest.approx(other)


def test_regular_random_and_bursting_are_told_apart() -> None:
    rng = random.Random(1)
    regular = timing(10_000, range(10, 10_000, 10)).burstiness
    chance = timing(100_000, {s for s in range(100_000) if rng.random() < 0.01}).burstiness
    spikes = timing(100_000, {s + k for s in range(450, 100_000, 9000) for k in range(80)}).burstiness
    assert regular == -1
    assert chance == pytest.approx(0, abs=0.05)
    assert spikes is not None
    assert spikes > 0.5


def test_no_gap_reaches_from_one_attempt_to_the_next() -> None:
    both = timing(100, [90, 91, 92]) + timing(50, [3]) + timing(10, [])
    assert both == Timing(
        steps=160, affected=4, onset=3, bursts=2, longest_burst=3, gaps=2, gap_sum=2, gap_squares=2, longest_gap=1
    )
    assert timing(5, []) == Timing(steps=5)
    assert timing(1, [1]).longest_burst == 1
