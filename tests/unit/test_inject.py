"""The injector inside compiled programs: it changes what its rows say, logs the truth, and nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.faults import injection as faults
from tandem.faults.injection import LOGGED, SLOTS, FaultProfile, named_bits, no_rows, rows
from tandem.sites import Site
from tandem.spec import validate
from tandem.vocabulary import Module, Phase
from tandem_worker import inject

FLOATS = [np.float32, ml_dtypes.bfloat16, np.float16]
DTYPES = [*FLOATS, np.int32, np.int8]
one = jax.jit(inject.apply)
several = jax.jit(inject.apply_all)


def by_name(dtype: Any) -> str:
    return np.dtype(dtype).name


def random_bits(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Any bit patterns, NaNs with payloads included."""
    kind = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    return np.asarray(raw).view(kind)[..., 0]


def bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def site(x: np.ndarray, number: int = 3) -> Site:
    return Site(number, Phase.FWD, Module.FFN, 0, "out", x.shape, x.dtype.name)


def row(x: np.ndarray, *fields: dict[str, Any], step: int = 1, replay: int = 0, seed: int = 1, number: int = 3) -> Any:
    p = validate(FaultProfile, {"name": "test", "seed": seed, "fault": list(fields)}, "profile")
    return rows(p, step, [site(x, number)], 1, replay)[0, 0]


def run(x: np.ndarray, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inject; return the flat XOR of the bits, after checking the log against it."""
    value, log = one(x, parameters)
    value, log = np.asarray(value), np.asarray(log)
    assert value.dtype == x.dtype
    assert value.shape == x.shape
    xor = bits(value).reshape(-1) ^ bits(x).reshape(-1)
    where = np.flatnonzero(xor)
    assert log.dtype == np.int32
    assert log[0] == where.size
    expected = np.full(LOGGED, -1)
    expected[: min(where.size, LOGGED)] = where[:LOGGED]
    assert np.array_equal(log[1:], expected)
    return value, xor


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
@pytest.mark.parametrize("shape", [(), (3, 0), (37,), (4, 5, 6)], ids=str)
def test_a_zero_row_changes_no_bit(shape: tuple[int, ...], dtype: Any) -> None:
    x = random_bits(shape, dtype)
    _, xor = run(x, no_rows(1, 1)[0, 0])
    assert not xor.any()


def test_rate_zero_changes_no_bit() -> None:
    x = random_bits((4, 5, 6), np.float32)
    assert not run(x, row(x, {"kind": "zero", "rate": 0}))[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
def test_positions_flip_together_in_every_hit_element(dtype: Any) -> None:
    x = random_bits((4, 5, 6), dtype)
    _, xor = run(x, row(x, {"kind": "flip", "rate": 1, "bits": [0, 6]}))
    assert np.all(xor == 0b1000001)


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
@pytest.mark.parametrize("name", ["uniform", "exponent", "mantissa", "sign"])
def test_named_distributions_flip_exactly_count_bits_of_their_own(dtype: Any, name: str) -> None:
    x = random_bits((4, 5, 6), dtype)
    allowed = named_bits(name, by_name(dtype))  # type: ignore[arg-type]
    for count in (1, 4):
        _, xor = run(x, row(x, {"kind": "flip", "rate": 1, "bits": name, "count": count}))
        ones = np.array([int(v).bit_count() for v in xor])
        assert np.all(ones == min(count, len(allowed)))
        assert not (np.bitwise_or.reduce(xor) & ~np.array(sum(1 << b for b in allowed), xor.dtype))


def test_bits_are_drawn_by_their_weights() -> None:
    x = np.zeros((200, 100), np.float32)
    _, xor = run(x, row(x, {"kind": "flip", "rate": 1, "bits": {31: 1, 20: 2, 3: 5}}))
    share = {bit: float(np.mean(xor == 1 << bit)) for bit in (31, 20, 3)}
    assert sum(share.values()) == 1
    for bit, weight in ((31, 1 / 8), (20, 2 / 8), (3, 5 / 8)):
        assert abs(share[bit] - weight) < 4 * np.sqrt(weight / x.size)
    _, xor = run(x, row(x, {"kind": "flip", "rate": 1, "bits": "uniform"}))
    counts = np.array([np.count_nonzero(xor == 1 << bit) for bit in range(32)])
    assert np.all(abs(counts - x.size / 32) < 5 * np.sqrt(x.size / 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
def test_zeroed_elements_are_positive_zero(dtype: Any) -> None:
    x = random_bits((4, 5, 6), dtype)
    value, _ = run(x, row(x, {"kind": "zero", "rate": 0.3}))
    hit = bits(value) != bits(x)
    assert 0 < hit.sum() < x.size
    assert not bits(value)[hit].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=by_name)
def test_scaled_values(dtype: Any) -> None:
    x = np.linspace(-3, 3, 120).astype(dtype).reshape(4, 5, 6)
    value, _ = run(x, row(x, {"kind": "scale", "rate": 1, "factor": -2.5}))
    assert np.array_equal(value, (x.astype(np.float32) * np.float32(-2.5)).astype(dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.int8], ids=by_name)
def test_scaled_integers_saturate(dtype: Any) -> None:
    info = np.iinfo(dtype)
    x = np.array([0, 3, -3, info.max, info.min] * 24, dtype).reshape(4, 5, 6)
    value, _ = run(x, row(x, {"kind": "scale", "rate": 1, "factor": 2.0}))
    flat = value.reshape(-1)
    assert flat[:3].tolist() == [0, 6, -6]
    assert flat[3] >= info.max - 127
    assert flat[4] == info.min


def test_scaling_by_one_or_zeroing_a_zero_is_not_logged() -> None:
    x = np.linspace(0, 1, 120, dtype=np.float32).reshape(4, 5, 6)
    assert not run(x, row(x, {"kind": "scale", "rate": 1, "factor": 1.0}))[1].any()
    assert np.count_nonzero(run(x, row(x, {"kind": "zero", "rate": 1}))[1]) == x.size - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
def test_stuck_lanes_force_bits_in_their_columns_only(dtype: Any) -> None:
    x = random_bits((4, 5, 6), dtype)
    value, xor = run(x, row(x, {"kind": "stuck", "lane": 1, "lane_width": 4, "set_bits": [1, 6], "clear_bits": 0}))
    lane = np.arange(6) % 4 == 1
    assert not xor.reshape(x.shape)[..., ~lane].any()
    assert np.all(bits(value)[..., lane] == (bits(x)[..., lane] | 0b1000010) & ~bits(x).dtype.type(1))
    value, _ = run(x, row(x, {"kind": "stuck", "clear_bits": 3}))
    assert not (bits(value) & 8).any()


def test_the_rate_is_the_share_of_elements_hit() -> None:
    x = np.zeros((200, 100), np.float32)
    for rate in (1e-3, 0.03, 0.5):
        total = sum(np.count_nonzero(run(x, row(x, {"kind": "flip", "rate": rate}, step=s))[1]) for s in range(1, 11))
        n = 10 * x.size
        assert abs(total - n * rate) < 4 * np.sqrt(n * rate * (1 - rate))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 64), st.integers(0, 2**62), st.sampled_from([(), (37,), (4, 5, 6)]))
def test_an_exact_number_of_elements(wanted: int, seed: int, shape: tuple[int, ...]) -> None:
    x = random_bits(shape, np.float32)
    _, xor = run(x, row(x, {"kind": "flip", "elements": wanted}, seed=seed))
    assert np.count_nonzero(xor) == min(wanted, x.size)


def tile_of(index: np.ndarray, shape: tuple[int, ...], tile: tuple[int, int]) -> np.ndarray:
    """(tile row, tile column) of flat indices, as one number."""
    columns = shape[-1]
    return np.asarray(index // columns // tile[0] * 1000 + index % columns // tile[1])


@pytest.mark.parametrize("shape", [(4, 5, 6), (16, 32), (7,), (3, 64)], ids=str)
@pytest.mark.parametrize("tile", [(1, 1), (1, 4), (4, 1), (2, 8), (64, 64)], ids=str)
def test_a_tile_is_hit_whole_and_alone(shape: tuple[int, ...], tile: tuple[int, int]) -> None:
    x = random_bits(shape, ml_dtypes.bfloat16)
    every = tile_of(np.arange(x.size), shape, tile)
    for step in range(1, 6):
        fault = {"kind": "flip", "bits": "uniform", "tile": tile}
        _, xor = run(x, row(x, fault | {"elements": 2}, step=step))
        hit = set(every[xor != 0])
        assert len(hit) == min(2, len(set(every)))
        assert np.array_equal(xor != 0, np.isin(every, list(hit)))
        _, xor = run(x, row(x, fault | {"rate": 0.4}, step=step))
        assert np.array_equal(xor != 0, np.isin(every, list(set(every[xor != 0]))))


def test_the_rate_of_tiles_is_their_share() -> None:
    x = np.zeros((256, 128), np.float32)
    rate, tile = 0.05, (4, 16)
    total = sum(
        np.count_nonzero(run(x, row(x, {"kind": "flip", "tile": tile, "rate": rate}, step=s))[1]) // 64
        for s in range(1, 11)
    )
    tiles = 10 * x.size // 64
    assert abs(total - tiles * rate) < 4 * np.sqrt(tiles * rate * (1 - rate))


@pytest.mark.parametrize("dtype", DTYPES, ids=by_name)
def test_nan_is_a_quiet_nan_where_there_is_one(dtype: Any) -> None:
    x = np.ones((4, 5, 6), dtype)
    value, xor = run(x, row(x, {"kind": "nan", "rate": 0.3}))
    if dtype in FLOATS:
        hit = xor != 0
        assert 0 < hit.sum() < x.size
        assert np.all(np.isnan(value.reshape(-1)[hit].astype(np.float64)))
        quiet = bits(np.array(np.nan, np.float32).astype(dtype))
        assert set(bits(value).reshape(-1)[hit].tolist()) == {int(quiet)}
    else:
        assert not xor.any()


def test_single_elements_are_spread_over_the_tensor() -> None:
    x = np.zeros((4, 5, 6), np.float32)
    hits = np.zeros(x.size, int)
    for step in range(1, 1201):
        hits[np.flatnonzero(run(x, row(x, {"kind": "flip", "elements": 1}, step=step))[1])] += 1
    assert hits.sum() == 1200
    assert hits.min() > 0
    assert ((hits - 10) ** 2 / 10).sum() < 180  # chi-squared, 119 degrees of freedom: beyond the 99.9th percentile


def test_roll_back_repeats_and_replay_does_not_unless_stuck() -> None:
    x = random_bits((4, 5, 6), np.float32)
    base: dict[str, Any] = {"kind": "flip", "rate": 0.1}
    results = {r: run(x, row(x, base, replay=r))[1] for r in range(4)}
    assert np.array_equal(results[0], run(x, row(x, base, replay=0))[1])
    assert len({v.tobytes() for v in results.values()}) == 4
    stuck = {run(x, row(x, base | {"repeat": "stuck"}, replay=r))[1].tobytes() for r in range(4)}
    assert len(stuck) == 1
    others = {run(x, row(x, base, step=s, number=n))[1].tobytes() for s in (1, 2, 3) for n in (1, 2, 3)}
    assert len(others) == 9


def test_several_faults_act_one_after_another() -> None:
    x = random_bits((4, 5, 6), np.float32)
    flips = [{"kind": "flip", "rate": 1, "bits": [b]} for b in range(SLOTS)]
    _, xor = run(x, row(x, *flips))
    assert np.all(xor == (1 << SLOTS) - 1)
    _, xor = run(x, row(x, flips[0], flips[0]))
    assert not xor.any()  # undone: not logged


def test_all_values_of_a_program_at_once_equal_one_by_one() -> None:
    values = [
        random_bits(s, d, i)
        for i, (s, d) in enumerate(
            [
                ((4, 5, 6), np.float32),
                ((), np.float32),
                ((3, 0), np.float16),
                ((7, 3), ml_dtypes.bfloat16),
                ((9,), np.int8),
            ]
        )
    ]
    sites = [site(x, number) for number, x in enumerate(values)]
    p = validate(
        FaultProfile,
        {
            "name": "test",
            "fault": [
                {"kind": "flip", "rate": 0.2, "bits": "exponent"},
                {"kind": "stuck", "lane": 1, "lane_width": 2, "set_bits": 2},
                {"kind": "scale", "elements": 2, "factor": 3.0},
            ],
        },
        "profile",
    )
    table = rows(p, 1, sites, 1)[0, :-1]
    for keep in (np.ones(5), np.array([0, 1, 0, 1, 0]), np.array([1, 0, 0, 0, 0])):
        chosen = (table * keep[:, None]).astype(np.uint32)
        got, logs = several(values, chosen)
        for x, parameters, value, log in zip(values, chosen, got, np.asarray(logs), strict=True):
            expected, expected_log = one(x, parameters)
            assert np.array_equal(bits(value), bits(expected))
            assert np.array_equal(log, np.asarray(expected_log))
            assert (log[0] > 0) <= (parameters[0] > 0)


def test_inside_shard_map_each_rank_has_its_own_faults() -> None:
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("tp",))
    x = random_bits((ranks, 4, 8), np.float32)
    p = validate(FaultProfile, {"name": "test", "fault": [{"kind": "flip", "elements": 3, "ranks": [1, 3]}]}, "profile")
    table = rows(p, 1, [site(x[0])], ranks)
    spec = jax.sharding.PartitionSpec("tp")

    def body(v: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, log = inject.apply(v[0], r[0, 0])
        return value[None], log[None]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)))
    put = partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, spec))
    value, log = program(put(x), put(table))
    changed = (bits(value) != bits(x)).reshape(ranks, -1)
    assert (
        changed.sum(axis=1).tolist()
        == np.asarray(log)[:, 0].tolist()
        == [3 if r in (1, 3) else 0 for r in range(ranks)]
    )


def test_what_cannot_be_injected_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot inject into bool"):
        inject.apply(jnp.zeros(3, bool), jnp.zeros(faults.WIDTH, jnp.uint32))
