"""The injector: corrupts a value inside a compiled program, as a row of parameters says.

Only in synthetic builds. The row (``tandem.faults.rows``) is a runtime argument, so one executable serves
every fault, step and side; an all-zero row returns the same bits (NaN payloads too). Which elements are
hit is a counter-based hash of (flat index, key): a few integer operations per element, the same on
every platform, and independent of how the tensor is laid out.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tandem import faults
from tandem.faults import LOGGED, WIDTH
from tandem_worker.digest import fmix32, words

__all__ = ["LOGGED", "WIDTH", "apply"]

RATE, ALL = (faults.MODES.index(mode) for mode in ("rate", "all"))
FLIP, STUCK, SCALE = (faults.KINDS.index(kind) for kind in ("flip", "stuck", "scale"))
_STREAM = 0x9E3779B9
"""Odd; separates the streams of draws that belong to one key."""


def apply(x: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inject faults into one rank's value; traceable inside jit and shard_map.

    Args:
        x: any shape (scalar, empty) below 2**31 elements, any number type of 8, 16 or 32 bits.
        row: u32 ``[WIDTH]``, one row of ``tandem.faults.rows``.

    Returns:
        The value with the faults, and the ground truth as i32 ``[1 + LOGGED]``: the number of elements whose
        bits really changed, then the flat indices of the first of them, ascending, -1 where there is none.

    Raises:
        TypeError: the dtype is neither 8, 16 nor 32 bits wide.
    """
    before = words(x).reshape(-1)
    if x.size == 0:
        return x, jnp.full((1 + LOGGED,), -1, jnp.int32).at[0].set(0)
    columns = x.shape[-1] if x.shape else 1
    # shard_map distinguishes values that vary over the mesh from those that do not, and a loop must
    # not change that: these two zeros make all that follows vary as both arguments do
    before = before | (row[0] & 0)
    row = row | (before[0] & 0)

    def one(i: jax.Array, bits: jax.Array) -> jax.Array:
        slot = lax.dynamic_slice(row, (1 + i * faults.SLOT_WORDS,), (faults.SLOT_WORDS,))
        return jnp.where(_hit(slot, x.size), _corrupt(slot, bits, columns, x.dtype), bits)

    after = lax.fori_loop(0, row[0].astype(jnp.int32), one, before)
    changed = after != before
    count = jnp.sum(changed, dtype=jnp.int32)
    return _value(after, x.dtype).reshape(x.shape), jnp.concatenate([count[None], _first(changed, count)])


def _hit(slot: jax.Array, size: int) -> jax.Array:
    """Which elements the fault hits: bool ``[size]``.

    An exact number N of elements lies at ``start + i * stride`` modulo the size, with a hashed start and a hashed stride of
    at most size / N: distinct without a loop, so that all modes are one elementwise kernel.
    """
    index = jnp.arange(size, dtype=jnp.uint32)
    amount = slot[faults.AMOUNT]
    wanted = jnp.clip(amount, 1, size)
    start = _draw(jnp.uint32(0), slot, 1) % np.uint32(size)
    stride = 1 + _draw(jnp.uint32(1), slot, 1) % (np.uint32(size) // wanted)
    distance = index - start + jnp.where(index < start, np.uint32(size), np.uint32(0))
    exactly = (distance % stride == 0) & (distance // stride < wanted)
    by_rate = _draw(index, slot, 0) < amount
    mode = slot[faults.MODE]
    return jnp.where(mode == RATE, by_rate, (mode == ALL) | exactly)


def _corrupt(slot: jax.Array, bits: jax.Array, columns: int, dtype: jnp.dtype) -> jax.Array:
    """What every element would become if it were hit: u32, of ``bits``'s shape, in the dtype's width."""
    index = jnp.arange(bits.size, dtype=jnp.uint32)
    kind, mask = slot[faults.KIND], slot[faults.MASK]
    flipped = bits ^ jnp.where(slot[faults.DRAWN] > 0, _drawn_masks(slot, index, dtype), mask)
    in_lane = (index % np.uint32(columns)) % jnp.maximum(slot[faults.LANE_WIDTH], 1) == slot[faults.LANE]
    stuck = jnp.where(in_lane, (bits | mask) & slot[faults.KEEP], bits)
    scaled = _scaled(bits, lax.bitcast_convert_type(slot[faults.FACTOR], jnp.float32), dtype)
    changed = jnp.where(kind == FLIP, flipped, jnp.where(kind == STUCK, stuck, jnp.where(kind == SCALE, scaled, 0)))
    return changed & np.uint32((1 << 8 * dtype.itemsize) - 1)


def _scaled(bits: jax.Array, factor: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The words of value * factor, computed in fp32; integers saturate."""
    value = _value(bits, dtype).astype(jnp.float32) * factor
    if not jnp.issubdtype(dtype, jnp.floating):
        low, high = (np.float32(v) for v in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        value = jnp.clip(value, low, high if int(high) <= np.iinfo(dtype).max else np.nextafter(high, low))
    return words(value.astype(dtype))


def _drawn_masks(slot: jax.Array, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Per element a mask of DRAWN distinct bits of the distribution: u32, of ``index``'s shape."""
    lows, counts = _named(dtype.name)
    named = slot[faults.NAMED]
    low, count = jnp.uint32(0), jnp.uint32(0)
    for number in range(1, 1 + len(faults.BIT_NAMES)):
        low = jnp.where(named == number, np.uint32(lows[number]), low)
        count = jnp.where(named == number, np.uint32(counts[number]), count)
    one = np.uint32(1)
    everything = jnp.where(count == 32, np.uint32(0xFFFFFFFF), (one << jnp.minimum(count, 31)) - 1)
    support = jnp.where(named > 0, everything << low, slot[faults.MASK])
    table = slot[faults.TABLE : faults.TABLE + 64]
    masks = index & 0
    for j in range(faults.MAX_BITS):
        h, second = _draw(index, slot, 2 + 2 * j), _draw(index, slot, 3 + 2 * j)
        column = h & 31
        weighted = jnp.where(second < table[column], column, table[column + 32])
        bit = jnp.where(named > 0, low + h % jnp.maximum(count, 1), weighted)
        left = support & ~masks
        above = left & ~((one << bit) - 1)  # the drawn bit itself, if it is left, else the next
        pick = jnp.where(above != 0, above, left)
        masks = jnp.where(j < slot[faults.DRAWN], masks | (pick & (~pick + 1)), masks)
    return masks


@lru_cache(maxsize=16)
def _named(dtype: str) -> tuple[list[int], list[int]]:
    """Lowest bit and number of bits of each named distribution; index 0 is unused."""
    positions = [(), *(faults.named_bits(name, dtype) for name in faults.BIT_NAMES)]
    return [min(p, default=0) for p in positions], [len(p) for p in positions]


def _draw(index: jax.Array, slot: jax.Array, stream: int | jax.Array) -> jax.Array:
    """A hashed uniform u32 per index, for the slot's key and one stream."""
    key = slot[faults.KEY1] + jnp.uint32(stream) * np.uint32(_STREAM)
    drawn: jax.Array = fmix32(fmix32(index + slot[faults.KEY0]) ^ key)
    return drawn


def _value(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The words as elements again."""
    value: jax.Array = lax.bitcast_convert_type(bits.astype(f"uint{8 * dtype.itemsize}"), dtype)
    return value


def _first(changed: jax.Array, count: jax.Array) -> jax.Array:
    """Flat indices of the first changed elements: i32 ``[LOGGED]``, -1 where there is none."""
    size = changed.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)

    def find(i: jax.Array, found: jax.Array) -> jax.Array:
        after = jnp.where(i > 0, found[jnp.maximum(i - 1, 0)], -1)
        return found.at[i].set(jnp.min(jnp.where(changed & (index > after), index, size)))

    none = jnp.full((LOGGED,), -1, jnp.int32) + count * 0
    found: jax.Array = lax.fori_loop(0, jnp.minimum(count, LOGGED), find, none)
    return found
