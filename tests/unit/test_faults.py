"""When and where a fault acts, and that every draw is a pure function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fault_samples import DW, DX, NORM, OUT, SITES, acts, flip, profile
from tandem.errors import SpecError
from tandem.faults import injection as faults
from tandem.faults.injection import FaultProfile, StateFlip, named_bits, no_rows, rows, state_flips
from tandem.sites import Site

# -- where and when --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, SITES),
        ({"phase": "fwd"}, [OUT]),
        ({"phase": ["bwd", "update"]}, [DX, DW, NORM]),
        ({"module": "attn"}, [DX, DW]),
        ({"tensor": "dw"}, [DW]),
        ({"tensor": "dw.wq"}, [DW]),
        ({"tensor": "dw.w"}, []),
        ({"tensor": ["out", "dx"]}, [OUT, DX]),
        ({"layers": [1, -1]}, [OUT, NORM]),
        ({"module": "ffn", "layers": 0}, []),
    ],
)
def test_selectors(selector: dict[str, Any], expected: list[Site]) -> None:
    p = profile(flip(**selector))
    assert [s for s in SITES if acts(p, 1, s)] == expected


def test_ranks_steps_onset_until() -> None:
    assert acts(profile(flip(ranks=1)), 1, OUT) == [1]
    assert acts(profile(flip()), 1, OUT, tp=3) == [0, 1, 2]
    p = profile(flip(onset=3, until=6, steps=[2, 4, 6, 8]))
    assert [step for step in range(1, 10) if acts(p, step, OUT)] == [4, 6]


def test_nothing_active_is_the_shared_zeros() -> None:
    p = profile(flip(steps=5, tensor="out"), flip(level="state", input="x"))
    assert rows(p, 4, [OUT], 2) is no_rows(2, 1)
    assert rows(p, 5, [DX, DW], 2) is no_rows(2, 2)
    assert no_rows(2, 2).shape == (2, 3, faults.WIDTH)
    assert not no_rows(2, 2).any()
    with pytest.raises(ValueError, match="read-only"):
        no_rows(2, 2)[0] = 1


def test_operand_faults_go_to_the_tap_and_select_by_the_partial() -> None:
    p = profile(flip(level="operand", tensor="dx"))
    table = rows(p, 1, [DW, DX], 2)
    assert table[:, :, 0].tolist() == [[0, 0, 1], [0, 0, 1]]
    assert rows(profile(flip(level="operand", tensor="dw")), 1, [DW, DX], 2) is no_rows(2, 2)
    assert rows(profile(flip(level="operand")), 1, [NORM], 2) is no_rows(2, 1)


def test_more_faults_than_slots_are_refused_not_dropped() -> None:
    with pytest.raises(SpecError, match="more than 4 faults act on fwd/ffn layer 1 out, step 1"):
        rows(profile(*[flip()] * 5), 1, [OUT], 2)


# -- keys ------------------------------------------------------------------------------------------


def test_draws_depend_on_everything_but_the_call_order() -> None:
    p = profile(flip(), flip(), seed=5)

    def keys(p: FaultProfile, step: int, site: Site, replay: int) -> list[bytes]:
        table = rows(p, step, [site], 2, replay)
        at = [1 + i * faults.SLOT_WORDS + faults.KEY0 for i in (0, 1)]
        return [table[rank, 0, a : a + 2].tobytes() for rank in (0, 1) for a in at]

    calls = [(step, site, replay) for step in (1, 2) for site in SITES for replay in (0, 1, 2)]
    forward = {c: keys(p, *c) for c in calls}
    backward = {c: keys(profile(flip(), flip(), seed=5), *c) for c in reversed(calls)}
    assert forward == backward
    every = [key for c in calls for key in forward[c]]
    assert len(set(every)) == len(every)
    assert set(every).isdisjoint(k for c in calls for k in keys(profile(flip(), flip(), seed=6), *c))


def test_replays_are_fresh_stuck_or_clean() -> None:
    fresh, stuck, once = (profile(flip(repeat=r)) for r in ("fresh", "stuck", "once"))
    assert not np.array_equal(rows(fresh, 1, [OUT], 2, 0), rows(fresh, 1, [OUT], 2, 1))
    assert np.array_equal(rows(stuck, 1, [OUT], 2, 0), rows(stuck, 1, [OUT], 2, 1))
    assert rows(once, 1, [OUT], 2, 1) is no_rows(2, 1)
    for p in (fresh, stuck, once):  # a roll-back runs the step again as replay 0
        assert np.array_equal(rows(p, 1, [OUT], 2, 0), rows(p, 1, [OUT], 2, 0))


# -- bursts ----------------------------------------------------------------------------------------


def burst(p_on: float, p_off: float, seed: int = 1, **more: Any) -> FaultProfile:
    return profile({"kind": "zero", "rate": 1, "burst": {"p_on": p_on, "p_off": p_off, **more}}, seed=seed)


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-3, 0.5), st.floats(1e-3, 0.5), st.integers(0, 2**62), st.randoms())
def test_burst_state_does_not_depend_on_the_order_of_questions(
    p_on: float, p_off: float, seed: int, random: Any
) -> None:
    questions = [(step, site) for step in range(1, 40) for site in (0, 1)]
    first = burst(p_on, p_off, seed)
    expected = {q: first.burst_on(0, *q) for q in questions}
    random.shuffle(questions)
    second = burst(p_on, p_off, seed)
    assert {q: second.burst_on(0, *q) for q in questions} == expected


def test_burst_statistics_are_those_of_the_two_state_chain() -> None:
    p_on, p_off, steps, sites = 0.05, 0.2, 500, 60
    p = burst(p_on, p_off)
    on = np.array([[p.burst_on(0, t, s) for t in range(1, steps + 1)] for s in range(sites)])
    share = p_on / (p_on + p_off)
    # the correlation 1 - p_on - p_off = 0.75 makes 30,000 states worth about 4,300 independent ones
    assert abs(on.mean() - share) < 4 * np.sqrt(share * (1 - share) / 4300)
    assert abs(on[:, 0].mean() - share) < 4 * np.sqrt(share * (1 - share) / sites)  # stationary from the start
    turned_off = (on[:, :-1] & ~on[:, 1:]).sum() / on[:, :-1].sum()
    turned_on = (~on[:, :-1] & on[:, 1:]).sum() / (~on[:, :-1]).sum()
    assert turned_off == pytest.approx(p_off, rel=0.1)
    assert turned_on == pytest.approx(p_on, rel=0.1)
    mean_length = on.sum() / ((on[:, 1:] & ~on[:, :-1]).sum() + on[:, 0].sum())
    assert mean_length == pytest.approx(1 / p_off, rel=0.1)


def test_bursts_are_per_site_or_shared() -> None:
    def patterns(p: FaultProfile) -> set[tuple[bool, ...]]:
        return {tuple(p.burst_on(0, t, site) for t in range(1, 200)) for site in range(8)}

    assert len(patterns(burst(0.2, 0.2))) == 8
    assert len(patterns(burst(0.2, 0.2, scope="step"))) == 1


def test_rows_follow_the_burst() -> None:
    p = burst(0.3, 0.3)
    for step in range(1, 50):
        assert bool(acts(p, step, OUT)) == p.burst_on(0, step, OUT.number)


# -- kept buffers ----------------------------------------------------------------------------------


def test_state_flips_are_exact_and_reproducible() -> None:
    p = profile(flip(level="state", input="w", elements=5, ranks=1, bits="exponent", count=2, tensor="out"))
    names, shapes, dtypes = ["x", "w"], [(8, 16), (16, 4)], ["bfloat16", "float32"]
    flips = state_flips(p, 1, [OUT], names, shapes, 2, dtypes)
    assert flips == state_flips(p, 1, [OUT], names, shapes, 2, dtypes)
    assert {(f.input, f.rank) for f in flips} == {("w", 1)}
    assert len({f.element for f in flips}) == 5
    assert len(set(flips)) == len(flips) == 10
    assert all(0 <= f.element < 64 and f.bit in named_bits("exponent", "float32") for f in flips)
    assert flips != state_flips(p, 2, [OUT], names, shapes, 2, dtypes)
    assert state_flips(p, 1, [DX], names, shapes, 2, dtypes) == []
    assert state_flips(p, 1, [OUT], ["x", "v"], shapes, 2, dtypes) == []
    assert rows(p, 1, [OUT], 2) is no_rows(2, 1)


def test_state_flips_default_to_the_first_input_and_to_bits_that_every_dtype_has() -> None:
    p = profile(flip(level="state", bits=[3, 30]))
    flips = state_flips(p, 1, [OUT], ["x", "w"], [(), (4,)], 2)
    assert flips == [StateFlip("x", rank, 0, 3) for rank in (0, 1)]
    assert state_flips(p, 1, [OUT], [], [], 2) == []
