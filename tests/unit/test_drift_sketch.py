"""The linear sketch: the program computes what its numpy twin does, and its estimates are as good as they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_worker.chain import TensorSpec
from tandem_worker.drift.sketch import (
    BUCKETS,
    LIMIT,
    TRUSTED,
    Estimate,
    Sketch,
    buckets,
    check,
    estimate,
    sketch_numpy,
)
from tandem_worker.model.build import make_mesh
from tandem_worker.model.compile import compile_program
from tandem_worker.model.init import rank_sharding
from tandem_worker.model.sketch import sketch_body

RANKS = 2
SHAPES = [((512,), True), ((512, 1536), False), ((1024, 768), False), ((333, 100), False)]
Arrays = list[np.ndarray]


def arrays(make: Callable[[tuple[int, ...]], np.ndarray]) -> Arrays:
    out = []
    for shape, same in SHAPES:
        value = make((RANKS, *shape)).astype(np.float32)
        if same:
            value[1:] = value[:1]
        out.append(value)
    return out


def with_kinds(values: Arrays) -> list[tuple[np.ndarray, bool]]:
    return [(value, same) for value, (_, same) in zip(values, SHAPES, strict=True)]


RNG = np.random.default_rng(7)
BASE = arrays(lambda shape: 0.02 * RNG.standard_normal(shape))
BASE_SKETCH, BASE_TOP = sketch_numpy(with_kinds(BASE), RANKS)
ELEMENTS = sum(value.size for value in BASE)


def norm(values: Arrays) -> float:
    squares = [(v.astype(np.float64) ** 2).sum() / (RANKS if same else 1) for v, same in with_kinds(values)]
    return float(np.sqrt(sum(squares)))


def measured(difference: Arrays) -> tuple[float, float, Estimate]:
    """Exact drift of the base with this added, drift / norm, and what the sketches say."""
    other = [(b + d).astype(np.float32) for b, d in zip(BASE, difference, strict=True)]
    exact = norm([o.astype(np.float64) - b for o, b in zip(other, BASE, strict=True)])  # type: ignore[misc]
    sketch, top = sketch_numpy(with_kinds(other), RANKS)
    found = estimate(sketch, BASE_SKETCH, [*map(int, top), *map(int, BASE_TOP)], ELEMENTS)
    return exact, exact / norm(BASE), found


def only(leaf: int, place: object, value: object) -> Arrays:
    out = arrays(np.zeros)
    out[leaf][place] = value  # type: ignore[index]
    return out


def test_the_buckets_are_prime_and_enough() -> None:
    for ranks in (1, 2, 3, 4, 8, 16):
        number = buckets(ranks)
        assert number * ranks >= BUCKETS
        assert all(number % n for n in range(2, number))
    assert np.sqrt(2 / BUCKETS) / 2 < 0.006


def test_the_program_computes_the_twins_bits() -> None:
    values = arrays(lambda shape: np.random.default_rng(3).standard_normal(shape) * 10.0 ** RNG.integers(-9, 2, shape))
    mesh = make_mesh(RANKS)
    specs = [TensorSpec(shape, "float32") for shape, _ in SHAPES]
    program = compile_program("sketch", sketch_body([same for _, same in SHAPES], RANKS), specs, mesh, 0)
    (sketch, top), _, _ = program([jax.device_put(v, rank_sharding(mesh)) for v in values])
    twin, twin_top = sketch_numpy(with_kinds(values), RANKS)
    assert np.array_equal(np.asarray(sketch), twin)
    assert np.array_equal(np.asarray(top), twin_top)


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1e-2, 1.0, 1.5])
def test_a_spread_difference_is_estimated_within_2_percent(scale: float) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        exact, ratio, found = measured(arrays(lambda shape, rng=rng: 0.02 * scale * rng.standard_normal(shape)))
        assert ratio == pytest.approx(scale, rel=0.1)
        assert found.trusted
        assert abs(found.drift / exact - 1) <= 0.02
        assert abs(found.norm / norm(BASE) - 1) <= 0.02


DIFFERENCES: dict[str, Callable[[np.random.Generator], Arrays]] = {
    "one element": lambda rng: only(1, (0, 5, 7), 0.5),
    "one small element": lambda rng: only(1, (1, 5, 7), 1e-6),
    "one row": lambda rng: only(1, (0, 5), 0.02 * rng.standard_normal(1536)),
    "one column": lambda rng: only(1, (0, slice(None), 9), 0.02 * rng.standard_normal(512)),
    "one constant column": lambda rng: only(2, (0, slice(None), 9), 0.01),
    "rank one": lambda rng: only(
        2, slice(None), 1e-3 * rng.standard_normal((2, 1024, 1)) * rng.standard_normal((2, 1, 768))
    ),
    "all alike": lambda rng: only(2, slice(None), 1e-4),
    "a tile": lambda rng: only(2, (slice(None), slice(64, 128), slice(64, 128)), rng.standard_normal((2, 64, 64))),
    "heavy tails": lambda rng: arrays(lambda shape: 1e-6 * rng.standard_cauchy(shape)),
    "few elements": lambda rng: arrays(lambda shape: (rng.random(shape) < 1e-4) * rng.standard_normal(shape)),
    "signs": lambda rng: arrays(lambda shape: 1e-3 * np.sign(rng.standard_normal(shape))),
    "a norm": lambda rng: only(0, slice(None), 1e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_is_trusted_is_within_2_percent_and_what_is_not_says_so(name: str) -> None:
    exact, ratio, found = measured(DIFFERENCES[name](np.random.default_rng(11)))
    assert abs(found.drift / exact - 1) <= max(0.02 if found.trusted else 4 * found.error, 1e-3)
    assert found.trusted or found.error > TRUSTED
    if name.startswith("one "):
        assert abs(found.drift / exact - 1) < 0.01, "what falls alone into its bucket is exact"
    assert ratio > 0


def drifted(
    places: list[tuple[int, int]], noise: float, seed: int, size: float = 0.5
) -> tuple[Sketch, list[int], float]:
    """Sketch and tops of the base with large elements of leaf 1, by (rank, flat place), and all else a little off."""
    rng = np.random.default_rng(seed)
    other = arrays(lambda shape: noise * rng.standard_normal(shape))
    for number, (rank, place) in enumerate(places):
        other[1][rank].reshape(-1)[place] += size * (1 + 0.1 * number)
    other = [(b + d).astype(np.float32) for b, d in zip(BASE, other, strict=True)]
    exact = norm([o.astype(np.float64) - b for o, b in zip(other, BASE, strict=True)])  # type: ignore[misc]
    sketch, top = sketch_numpy(with_kinds(other), RANKS)
    return sketch, [*map(int, top), *map(int, BASE_TOP)], exact


@pytest.mark.parametrize("places", [[(0, 77)], [(1, 5), (1, 600)], [(0, 9), (1, 9), (1, 40_000)]])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5])
def test_a_few_elements_that_dominate_are_told_exactly_once_they_were_measured(
    places: list[tuple[int, int]], noise: float
) -> None:
    """Before, they could as well share buckets, of which no sketch can tell: the claimed error says so."""
    sketch, tops, exact = drifted(places, noise, seed=1)
    assert estimate(sketch, BASE_SKETCH, tops, ELEMENTS).error > 10 * TRUSTED
    checked = check(sketch, BASE_SKETCH, tops, exact)
    assert checked is not None
    for later, (more, size) in enumerate([(noise, 0.5), (2 * noise, 0.4), (3 * noise, 0.7)]):
        sketch, tops, exact = drifted(places, more, seed=2 + later, size=size)
        found = estimate(sketch, BASE_SKETCH, tops, ELEMENTS, checked=checked)
        assert found.error < 5e-3
        assert abs(found.drift / exact - 1) <= 4 * found.error
    sketch, tops, exact = drifted([*places, (0, 300_000)], noise, seed=9)
    assert not estimate(sketch, BASE_SKETCH, tops, ELEMENTS, checked=checked).trusted, "another one was not measured"


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_large_elements_that_share_a_bucket_are_never_trusted(rows: int) -> None:
    """The same place of several rows of the sketch's table: their signs add up or cancel."""
    sketch, tops, exact = drifted([(1, 123), (1, 123 + rows * buckets(RANKS))], 1e-6, seed=3)
    found = estimate(sketch, BASE_SKETCH, tops, ELEMENTS)
    assert abs(found.drift / exact - 1) > 0.2
    assert not found.trusted
    checked = check(sketch, BASE_SKETCH, tops, exact)
    assert not estimate(sketch, BASE_SKETCH, tops, ELEMENTS, checked=checked).trusted


def test_nothing_is_learnt_from_what_cannot_be_held_against_a_sketch() -> None:
    sketch, tops, exact = drifted([(0, 77)], 1e-6, seed=1)
    for measured in (0.0, math.nan, math.inf, exact * (1 + 2 * TRUSTED)):
        assert check(sketch, BASE_SKETCH, tops, measured) is None
    assert check(sketch, BASE_SKETCH, [*tops, 0x7F800000], exact) is None


def test_nothing_is_claimed_of_what_a_sketch_cannot_hold() -> None:
    for value in (np.nan, np.inf, -np.inf, LIMIT, -2 * LIMIT, 1e12):
        other = [v.copy() for v in BASE]
        other[1][1, 3, 3] = value
        sketch, top = sketch_numpy(with_kinds(other), RANKS)
        assert not estimate(sketch, BASE_SKETCH, [*map(int, top), *map(int, BASE_TOP)], ELEMENTS).trusted


def test_a_bucket_that_may_have_gone_round_is_not_trusted() -> None:
    sketch = BASE_SKETCH.copy()
    sketch[0, 0, 5] = 2**30
    assert not estimate(sketch, BASE_SKETCH, map(int, BASE_TOP), ELEMENTS).trusted


def test_equal_sketches_of_parameters_that_differ_are_not_trusted() -> None:
    assert not estimate(BASE_SKETCH, BASE_SKETCH, map(int, BASE_TOP), ELEMENTS).trusted
    same = estimate(BASE_SKETCH, BASE_SKETCH, map(int, BASE_TOP), ELEMENTS, differ=False)
    assert (same.drift, same.error) == (0.0, 0.0)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 100.0), st.floats(-1.0, 1.0))
def test_it_is_linear_in_fixed_point(seed: int, scale: float, shift: float) -> None:
    """Sketches of p + d and of p differ by the sketch of d, exactly, where the sums are exact in fp32."""
    rng = np.random.default_rng(seed)
    grid = lambda shape, top: rng.integers(-top, top, shape).astype(np.float32) * np.float32(2.0**-20)
    p, d = grid((RANKS, 64, 300), 2**20), grid((RANKS, 64, 300), 2**10)
    sketches = [sketch_numpy([(x, False)], RANKS)[0].astype(np.int64) for x in (p + d, p, d)]
    value = [(s[:, 0] << 16) + s[:, 1] for s in sketches]
    assert np.array_equal(value[0] - value[1], value[2])
