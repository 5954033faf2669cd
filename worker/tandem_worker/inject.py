"""The injector: corrupts values inside a compiled program, as rows of parameters say.

Only in synthetic builds. The rows (``tandem.faults.injection.rows``) are runtime arguments, so one executable serves
every fault, step and side; all-zero rows return the same bits (NaN payloads too). Which elements are
hit is a counter-based hash of (flat index, key): a few integer operations per element, the same on
every platform, and independent of how the tensor is laid out.

All values of a program go through the same few kernels as one flat buffer of words, under a condition: kernels
of their own for each output would cost most of a synthetic build's compile time, and nothing is
touched while no fault is on.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from tandem.faults import injection as faults
from tandem.faults.injection import LOGGED, WIDTH
from tandem_worker.digest import fmix32, words

__all__ = ["LOGGED", "WIDTH", "apply", "apply_all"]

RATE, ALL = (faults.MODES.index(mode) for mode in ("rate", "all"))
FLIP, STUCK, SCALE, NAN = (faults.KINDS.index(kind) for kind in ("flip", "stuck", "scale", "nan"))
_STREAM = 0x9E3779B9
"""Odd; separates the streams of draws that belong to one key."""


def apply(x: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inject faults into one value: ``apply_all`` for one.

    Args:
        x: one rank's value.
        row: u32 ``[WIDTH]``.

    Returns:
        The value with the faults, and the ground truth, i32 ``[1 + LOGGED]``.
    """
    values, log = apply_all([x], row[None])
    return values[0], log[0]


def apply_all(values: Sequence[jax.Array], rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Inject faults into one rank's values; traceable inside jit and shard_map.

    Args:
        values: any shapes (scalar, empty), together below 2**31 elements; number types of 8, 16 or 32 bits.
        rows: u32 ``[len(values), WIDTH]``, as of ``tandem.faults.injection.rows``.

    Returns:
        The values with the faults, and the ground truth as i32 ``[len(values), 1 + LOGGED]``: per value the number of
        elements whose bits really changed, then the flat indices of the first of them, ascending, -1
        where there is none.

    Raises:
        TypeError: a dtype is neither 8, 16 nor 32 bits wide, or no number.
        ValueError: too many elements.
    """
    for x in values:
        if x.dtype.itemsize not in (1, 2, 4) or x.dtype == jnp.bool_:
            raise TypeError(f"cannot inject into {x.dtype}: elements must be numbers of 8, 16 or 32 bits")
    if sum(x.size for x in values) >= 2**31:
        raise ValueError("cannot inject into 2**31 elements or more at once")
    # shard_map tells values that vary over the mesh from those that do not, and a branch or a loop must not
    # change that: these zeros make everything vary as all arguments do
    zero = rows[0, 0] & 0
    for x in values:
        if x.size:
            zero = zero | (words(x.reshape(-1)[0]) & 0)
    rows = rows | zero
    quiet = jnp.concatenate([jnp.zeros((len(values), 1)), jnp.full((len(values), LOGGED), -1)], 1).astype(jnp.int32)
    quiet = quiet + zero.astype(jnp.int32)
    same = [_value(words(x) | zero, x.dtype) for x in values]
    if all(x.size == 0 for x in values):
        return same, quiet
    result: tuple[list[jax.Array], jax.Array] = lax.cond(
        jnp.any(rows[:, 0] > 0), lambda: _inject(same, rows, quiet), lambda: (same, quiet)
    )
    return result


def _inject(values: list[jax.Array], rows: jax.Array, quiet: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    dtypes = sorted({x.dtype for x in values}, key=lambda dtype: dtype.name)
    before = jnp.concatenate([words(x).reshape(-1) for x in values])
    table = jnp.concatenate([jnp.asarray(_facts(values, dtypes)), rows], 1)
    iota = jnp.arange(before.size, dtype=jnp.uint32)

    def one_value(o: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row = lax.dynamic_index_in_dim(table, o, 0, keepdims=False)
        facts = row[:_FACTS]
        index = iota - facts[OFFSET]  # wraps round to beyond the size for earlier values

        def one_fault(i: jax.Array, bits: jax.Array) -> jax.Array:
            slot = lax.dynamic_slice(row, (_FACTS + 1 + i * faults.SLOT_WORDS,), (faults.SLOT_WORDS,))
            hit = (index < facts[SIZE]) & _hit(slot, *_units(slot, index, facts))
            return jnp.where(hit, _corrupt(slot, bits, index, facts, dtypes), bits)

        def corrupt() -> tuple[jax.Array, jax.Array]:
            bits = lax.fori_loop(0, row[_FACTS].astype(jnp.int32), one_fault, state[0])
            # values are corrupted one after another, so what differs inside this one is this row's doing
            return bits, state[1].at[o].set(_log((bits != before) & (index < facts[SIZE]), index, quiet[o]))

        done: tuple[jax.Array, jax.Array] = lax.cond(row[_FACTS] > 0, corrupt, lambda: state)
        return done

    after, log = lax.fori_loop(0, len(values), one_value, (before, quiet))
    ends = np.cumsum([x.size for x in values])
    pieces = [after[end - x.size : end].reshape(x.shape) for x, end in zip(values, ends, strict=True)]
    return [_value(piece, x.dtype) for piece, x in zip(pieces, values, strict=True)], log


# what is known of a value when the program is built; put in front of its row
OFFSET, SIZE, COLUMNS, WHOLE, DTYPE, QUIET_NAN, LOWS = range(7)
"""Start in the flat buffer, elements, last axis, mask of the dtype's bits, index among the distinct dtypes, bits of a
quiet NaN (0: the dtype has none), lowest bit of each named distribution (after an unused one)."""
COUNTS = LOWS + 1 + len(faults.BIT_NAMES)
"""Number of bits of each named distribution."""
_FACTS = COUNTS + 1 + len(faults.BIT_NAMES)


def _facts(values: Sequence[jax.Array], dtypes: Sequence[jnp.dtype]) -> npt.NDArray[np.uint32]:
    """u32 ``[len(values), _FACTS]``."""
    table, offset = np.zeros((len(values), _FACTS), np.uint32), 0
    for facts, x in zip(table, values, strict=True):
        facts[OFFSET], facts[SIZE], facts[COLUMNS] = offset, x.size, x.shape[-1] if x.shape else 1
        facts[WHOLE], facts[DTYPE] = (1 << 8 * x.dtype.itemsize) - 1, dtypes.index(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating):
            mantissa = len(faults.named_bits("mantissa", x.dtype.name))
            facts[QUIET_NAN] = (facts[WHOLE] >> 1) & ~np.uint32((1 << (mantissa - 1)) - 1)
        for number, name in enumerate(faults.BIT_NAMES, start=1):
            positions = faults.named_bits(name, x.dtype.name)
            facts[LOWS + number], facts[COUNTS + number] = min(positions, default=0), len(positions)
        offset += x.size
    return table


def _log(changed: jax.Array, index: jax.Array, quiet: jax.Array) -> jax.Array:
    """One value's ground truth: i32 ``[1 + LOGGED]``."""
    beyond = np.int32(2**31 - 1)
    count = jnp.sum(changed, dtype=jnp.int32)
    where = jnp.where(changed, index.astype(jnp.int32), beyond)

    def find(i: jax.Array, log: jax.Array) -> jax.Array:
        last = jnp.where(i > 0, log[i], -1)
        return log.at[1 + i].set(jnp.min(jnp.where(where > last, where, beyond)))

    log: jax.Array = lax.fori_loop(0, jnp.minimum(count, LOGGED), find, quiet.at[0].set(count))
    return log


def _units(slot: jax.Array, index: jax.Array, facts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is drawn, and how many there are: each element for itself, or the tile of rows and columns that it lies in.

    Rows are all leading axes together. Tiles at the lower and right edge may be cut off.
    """
    tile, columns = slot[faults.TILE], facts[COLUMNS]
    down, right = tile & 0xFF, tile >> 8 & 0xFF
    across = (columns + (np.uint32(1) << right) - 1) >> right

    def tiles() -> tuple[jax.Array, jax.Array]:
        row = index // columns  # a division as in `_corrupt`: only where it is needed
        count = (((facts[SIZE] // columns) + (np.uint32(1) << down) - 1) >> down) * across
        return (row >> down) * across + ((index - row * columns) >> right), count

    drawn: tuple[jax.Array, jax.Array] = lax.cond(tile > 0, tiles, lambda: (index, facts[SIZE]))
    return drawn


def _hit(slot: jax.Array, index: jax.Array, size: jax.Array) -> jax.Array:
    """Which elements (or tiles) of ``size`` the fault hits: bool, of ``index``'s shape.

    An exact number N of elements lies at ``start + i * 2**k`` modulo the size, start and k hashed, N * 2**k at most the
    size: distinct without a loop and without a division, so that all modes are one elementwise kernel.
    """
    amount, mode = slot[faults.AMOUNT], slot[faults.MODE]
    wanted = jnp.clip(amount, 1, size)
    start = _below(_draw(jnp.uint32(0), slot, 1), size)
    shifts = jnp.arange(32, dtype=jnp.uint32)
    choices = jnp.sum((size >> shifts) >= wanted, dtype=jnp.uint32)
    shift = _below(_draw(jnp.uint32(1), slot, 1), choices)
    distance = index - start + jnp.where(index < start, size, 0)
    exactly = (distance & ((np.uint32(1) << shift) - 1) == 0) & (distance >> shift < wanted)
    by_rate = _draw(index, slot, 0) < amount
    return jnp.where(mode == RATE, by_rate, (mode == ALL) | exactly)


def _corrupt(
    slot: jax.Array, bits: jax.Array, index: jax.Array, facts: jax.Array, dtypes: Sequence[jnp.dtype]
) -> jax.Array:
    """What every element would become if it were hit: u32, of ``bits``'s shape, in the dtype's width."""
    kind, mask = slot[faults.KIND], slot[faults.MASK]
    flipped = bits ^ jnp.where(slot[faults.DRAWN] > 0, _drawn_masks(slot, index, facts), mask)
    # a division by a number that is only known at run time, here once in a kernel of its own
    column = lax.cond(kind == STUCK, lambda: index % facts[COLUMNS], lambda: index)
    in_lane = column & (slot[faults.LANE_WIDTH] - 1) == slot[faults.LANE]
    stuck = jnp.where(in_lane, (bits | mask) & slot[faults.KEEP], bits)
    factor = lax.bitcast_convert_type(slot[faults.FACTOR], jnp.float32)
    scaled = bits
    for number, dtype in enumerate(dtypes):
        scaled = jnp.where(facts[DTYPE] == number, _scaled(bits, factor, dtype), scaled)
    changed = jnp.where(kind == FLIP, flipped, jnp.where(kind == STUCK, stuck, jnp.where(kind == SCALE, scaled, 0)))
    changed = jnp.where(kind == NAN, jnp.where(facts[QUIET_NAN] > 0, facts[QUIET_NAN], bits), changed)
    return changed & facts[WHOLE]


def _scaled(bits: jax.Array, factor: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The words of value * factor, computed in fp32; integers saturate."""
    value = _value(bits, dtype).astype(jnp.float32) * factor
    if not jnp.issubdtype(dtype, jnp.floating):
        low, high = (np.float32(v) for v in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        value = jnp.clip(value, low, high if int(high) <= np.iinfo(dtype).max else np.nextafter(high, low))
    return words(value.astype(dtype))


def _drawn_masks(slot: jax.Array, index: jax.Array, facts: jax.Array) -> jax.Array:
    """Per element a mask of DRAWN distinct bits of the distribution: u32, of ``index``'s shape."""
    named, one = slot[faults.NAMED], np.uint32(1)
    low, count = facts[LOWS + named.astype(jnp.int32)], facts[COUNTS + named.astype(jnp.int32)]
    everything = jnp.where(count == 32, np.uint32(0xFFFFFFFF), (one << jnp.minimum(count, 31)) - 1)
    support = jnp.where(named > 0, everything << low, slot[faults.MASK])

    def draw(j: jax.Array, masks: jax.Array) -> jax.Array:
        h = _draw(index, slot, 2 + j.astype(jnp.uint32))
        weighted = index & 0
        for t in range(31):
            weighted = weighted + (h >= slot[faults.TABLE + t]).astype(jnp.uint32)
        bit = jnp.where(named > 0, low + _below(h, count), weighted)
        left = support & ~masks
        above = left & ~((one << bit) - 1)  # the drawn bit itself, if it is left, else the next
        pick = jnp.where(above != 0, above, left)
        return masks | (pick & (~pick + 1))

    masks: jax.Array = lax.fori_loop(0, slot[faults.DRAWN].astype(jnp.int32), draw, index & (slot[0] & 0))
    return masks


def _draw(index: jax.Array, slot: jax.Array, stream: int | jax.Array) -> jax.Array:
    """A hashed uniform u32 per index, for the slot's key and one stream."""
    key = slot[faults.KEY1] + jnp.uint32(stream) * np.uint32(_STREAM)
    drawn: jax.Array = fmix32(fmix32(index + slot[faults.KEY0]) ^ key)
    return drawn


def _below(h: jax.Array, n: jax.Array) -> jax.Array:
    """A u32 draw brought into [0, n): the high word of h * n, by halves."""
    h1, h0, n1, n0 = h >> 16, h & 0xFFFF, n >> 16, n & 0xFFFF
    middle = h1 * n0 + (h0 * n0 >> 16)
    return h1 * n1 + (middle >> 16) + (h0 * n1 + (middle & 0xFFFF) >> 16)


def _value(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The words as elements again."""
    value: jax.Array = lax.bitcast_convert_type(bits.astype(f"uint{8 * dtype.itemsize}"), dtype)
    return value
