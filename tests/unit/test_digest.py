"""The digest: equal on the device and the host, and blind to no change that its docstring promises to catch."""

from __future__ import annotations

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_worker.digest import LANES, TOGETHER, fmix32, lanes, lanes_numpy, many_lanes, weights

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.uint32, np.int8]
WIDE = 65536
"""Columns for which the docstring promises exact detection of swaps."""


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Any bit patterns, NaNs with payloads included."""
    kind = np.dtype(dtype)
    return np.asarray(rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)).view(kind)[..., 0]


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


on_device = {variadic: jax.jit(partial(lanes, variadic=variadic)) for variadic in (False, True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(), (129,), (2, 3, 4, 5), (7, 1)], ids=str)
def test_device_and_host_agree_and_one_or_two_reductions_do(shape: tuple[int, ...], dtype: object) -> None:
    x = random_bits(np.random.default_rng(0), shape, dtype)
    host = lanes_numpy(x)
    assert host.shape == (LANES,)
    assert host.dtype == np.uint32
    for program in on_device.values():
        assert np.array_equal(np.asarray(program(x)), host)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3 * TOGETHER))
def test_many_tensors_at_once_have_the_digests_that_each_has_alone(seed: int, count: int) -> None:
    """Shapes and dtypes mixed, so that those with as many rows do not stand together."""
    rng = np.random.default_rng(seed)
    shapes = [(), (5,), (3, 4), (2, 3, 4), (3, 1), (6, 2)]
    tensors = [
        random_bits(rng, shapes[rng.integers(len(shapes))], DTYPES[rng.integers(len(DTYPES))]) for _ in range(count)
    ]
    found = many_lanes([jnp.asarray(x) for x in tensors])
    assert np.array_equal(np.asarray(found), np.stack([lanes_numpy(x) for x in tensors]))


def test_the_digest_sees_shape_and_order_not_memory_layout() -> None:
    x = random_bits(np.random.default_rng(1), (6, 4), np.float32)
    assert not np.array_equal(lanes_numpy(x), lanes_numpy(x.T))
    assert not np.array_equal(lanes_numpy(np.zeros((2, 3), np.int8)), lanes_numpy(np.zeros((2, 4), np.int8)))
    assert np.array_equal(lanes_numpy(np.asfortranarray(x)), lanes_numpy(x))


def test_inside_shard_map_each_rank_has_its_own_digest() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("tp",))
    x = random_bits(np.random.default_rng(2), (jax.device_count(), 4, 8), np.float32)
    spec = jax.sharding.PartitionSpec("tp")
    program = jax.jit(jax.shard_map(lambda v: lanes(v[0])[None], mesh=mesh, in_specs=(spec,), out_specs=spec))
    got = np.asarray(program(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))))
    assert np.array_equal(got, np.stack([lanes_numpy(v) for v in x]))


def test_empty_and_wide_elements_are_refused() -> None:
    for digest in (lanes, lanes_numpy):
        with pytest.raises(ValueError, match="empty"):
            digest(np.zeros((3, 0), np.float32))
    with pytest.raises(TypeError, match="8, 16 or 32 bits"):
        lanes_numpy(np.zeros(3, np.float64))
    with pytest.raises(TypeError, match="8, 16 or 32 bits"):
        lanes(np.zeros(3, np.float64))


def test_weights_are_odd_and_distinct_in_their_low_17_bits() -> None:
    for w in weights(WIDE):
        assert np.all(w & 1 == 1)
        assert np.unique(w & 0x1FFFF).size == WIDE
    assert np.array_equal(weights(100), weights(WIDE)[:, :100])


def test_the_finaliser_is_a_bijection_on_a_sample() -> None:
    # exact inverse of MurmurHash3's fmix32: every step is undone
    def undo(h: np.ndarray) -> np.ndarray:
        h = h ^ (h >> np.uint32(16))
        h = h * np.uint32(pow(0xC2B2AE35, -1, 2**32))
        h = h ^ (h >> np.uint32(13)) ^ (h >> np.uint32(26))
        h = h * np.uint32(pow(0x85EBCA6B, -1, 2**32))
        return h ^ (h >> np.uint32(16))

    x = np.random.default_rng(3).integers(0, 2**32, 100_000, dtype=np.uint32)
    assert np.array_equal(undo(fmix32(x)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_single_bit_flip_changes_both_lanes(dtype: object) -> None:
    x = random_bits(np.random.default_rng(4), (3, 5), dtype)
    before = lanes_numpy(x)
    for element, bit in product(range(x.size), range(8 * x.dtype.itemsize)):
        y = x.copy()
        bits(y).reshape(-1)[element] ^= bits(y).dtype.type(1 << bit)
        assert np.all(lanes_numpy(y) != before), (element, bit)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_swap_of_two_elements_and_of_two_rows_is_seen(dtype: object) -> None:
    x = random_bits(np.random.default_rng(5), (4, 6), dtype)
    x[1, 2], x[1, 4] = x.dtype.type(1), -x.dtype.type(1) if x.dtype.kind != "u" else x.dtype.type(2**31 + 1)
    before = lanes_numpy(x)
    for i in range(x.size):
        for j in range(i):
            y = x.copy()
            flat = bits(y).reshape(-1)
            flat[[i, j]] = flat[[j, i]]
            if np.array_equal(bits(y), bits(x)):
                continue
            assert not np.array_equal(lanes_numpy(y), before), (i, j)
    for i in range(4):
        for j in range(i):
            y = x.copy()
            bits(y)[[i, j]] = bits(y)[[j, i]]
            assert not np.array_equal(lanes_numpy(y), before), (i, j)


shapes = st.sampled_from([(), (1,), (9,), (4, 4), (2, 3, 5), (5, 1), (2, 70)])


@settings(max_examples=150, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32), data=st.data())
def test_any_change_of_one_element_changes_both_lanes(
    shape: tuple[int, ...], dtype: object, seed: int, data: st.DataObject
) -> None:
    x = random_bits(np.random.default_rng(seed), shape, dtype)
    y = x.copy()
    flat = bits(y).reshape(-1)
    where = data.draw(st.integers(0, x.size - 1))
    flat[where] ^= flat.dtype.type(data.draw(st.integers(1, 2 ** (8 * x.dtype.itemsize) - 1)))
    assert np.all(lanes_numpy(y) != lanes_numpy(x))


@settings(max_examples=150, deadline=None)
@given(dtype=st.sampled_from(DTYPES[:3]), seed=st.integers(0, 2**32), data=st.data())
def test_typical_damage_is_seen(dtype: object, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    x = random_bits(rng, (6, 16), dtype)
    y = x.copy()
    flat, width = bits(y).reshape(-1), 8 * x.dtype.itemsize
    n = data.draw(st.integers(1, x.size))
    where = rng.choice(x.size, n, replace=False)
    damage = data.draw(st.sampled_from(["zero", "sign", "payload", "reverse", "roll"]))
    if damage == "zero":
        flat[where] = 0
    elif damage == "sign":
        flat[where] ^= flat.dtype.type(1 << (width - 1))
    elif damage == "payload":
        flat[where] ^= flat.dtype.type(1)
    elif damage == "reverse":
        flat[where] = flat[where[::-1]]
    else:
        flat[:] = np.roll(flat, n)
    same = np.array_equal(bits(x), bits(y))
    assert np.array_equal(lanes_numpy(x), lanes_numpy(y)) == same


def test_nan_payloads_and_signed_zeros_differ() -> None:
    for a, b in [(0x7FC00000, 0x7FC00001), (0x7F800001, 0x7FC00001), (0x00000000, 0x80000000)]:
        x, y = (np.full((2, 2), 1.5, np.float32) for _ in range(2))
        x.view(np.uint32)[1, 1], y.view(np.uint32)[1, 1] = a, b
        assert np.all(lanes_numpy(x) != lanes_numpy(y))
        assert np.all(np.asarray(on_device[True](x)) != np.asarray(on_device[True](y)))


def test_x_and_minus_x_swapped_inside_a_row_is_seen_for_all_column_pairs() -> None:
    # with plain words the difference 2**31 times the even difference of two weights vanishes in both lanes
    word = np.uint32(np.float32(1.25).view(np.uint32))
    delta = {
        lane: (m(word) - m(word ^ np.uint32(1 << 31))) & 0xFFFFFFFF
        for lane, m in enumerate((lambda b: int(b ^ (b >> 16)), lambda b: int(b ^ (b >> 17))))
    }
    for lane, w in enumerate(weights(WIDE)):
        # (w_i - w_j) * delta == 0 would need w_i == w_j modulo 2**(32 - v) with 2**v the power of two in delta
        power = (delta[lane] & -delta[lane]).bit_length() - 1
        assert np.unique(w & np.uint32((1 << (32 - power)) - 1)).size == WIDE


def test_the_same_bit_flipped_in_two_elements_of_a_row_is_seen_for_all_column_pairs() -> None:
    """Exhaustive over bits, column pairs below 65536 and directions of the flips.

    Flipping bit k of a word changes lane l's mixed word by +-2**k, or by +-2**k +-2**(k - 16 - l) where the
    shifted copy of the bit survives; narrow dtypes are the former case. Two changes cancel in a row sum where
    e_i w_i + e_j w_j == 0 mod 2**32. Solutions for a bit below 15 are among those for 15.
    """
    tables = weights(WIDE).astype(np.uint64)
    for k in range(15, 32):
        deltas = []
        for shift in (16, 17):
            low = 1 << (k - shift) if k >= shift else 0
            deltas.append(sorted({high + part for high in (1 << k, -(1 << k)) for part in (low, -low)}))
        # the lane whose differences have the fewest factors of two has the fewest solutions
        lane = min(range(LANES), key=lambda n: min(d & -d for d in deltas[n]))
        w, v = tables[lane], tables[1 - lane]
        power = (deltas[lane][0] & -deltas[lane][0]).bit_length() - 1
        modulus = 1 << (32 - power)
        reduced = w % np.uint64(modulus)
        order = np.argsort(reduced)
        for d_i, d_j in product([d for d in deltas[lane] if d > 0], deltas[lane]):  # negating both changes nothing
            # w_j == -(d_i / d_j) w_i modulo 2**(32 - power); that determines j, as power <= 15
            factor = -(d_i >> power) * pow(d_j >> power, -1, modulus) % modulus
            wanted = (w * np.uint64(factor)) % np.uint64(modulus)
            at = np.minimum(np.searchsorted(reduced[order], wanted), WIDE - 1)
            i = np.flatnonzero(reduced[order][at] == wanted)
            j = order[at[i]]
            i, j = i[i != j], j[i != j]
            for o_i, o_j in product(deltas[1 - lane], repeat=2):
                total = (v[i] * np.uint64(o_i % 2**32) + v[j] * np.uint64(o_j % 2**32)) % np.uint64(2**32)
                assert np.all(total != 0), (k, i[total == 0], j[total == 0])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_no_collision_among_many_random_changes_of_two_elements(dtype: object) -> None:
    trials, columns = 200_000, 16
    rng = np.random.default_rng(6)
    kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
    x = bits(random_bits(rng, (trials, 1, columns), dtype))
    y = x.copy()
    rows, (i, j) = np.arange(trials), (rng.integers(0, columns, trials), rng.integers(0, columns, trials))
    masks = rng.integers(1, 2 ** (8 * kind.itemsize), (2, trials), dtype=np.uint64).astype(kind)
    y[rows, 0, i] ^= masks[0]
    y[rows, 0, (i + 1 + j % (columns - 1)) % columns] ^= masks[1]
    program = jax.jit(jax.vmap(partial(lanes, variadic=True)))
    view = np.dtype(dtype)
    equal = np.asarray(program(x.view(view))) == np.asarray(program(y.view(view)))
    assert not np.any(equal.all(axis=1))
    assert equal.sum() <= 2  # a single lane: 2**-31 a pair
