"""A linear sketch of the master weights: a few KB from which the distance of two models is told. Pure.

Count sketch (Charikar, Chen, Farach-Colton 2002). Rank ``r`` holds ``K`` buckets, a prime. Its fp32 masters become a
table with ``K`` columns (`layout`), and element ``c`` of row ``i`` is added to bucket ``c`` with the sign
``bit 31 of a[i] * b[c]``, ``a`` and ``b`` being hashes. Replicated leaves count on rank 0 alone. So the squared norm of
the difference of two sketches is an unbiased estimate of ||p_a - p_b||^2 whose variance is
2 (sum of B_k^2 - sum of x_i^4), with B_k the squared norm of what fell into bucket ``k``: nothing for a single element,
and a standard deviation of ``sqrt(2 / K) / 2`` of the norm where the difference is spread over the buckets. ``K`` is
prime, so rows, columns and tiles of a matrix are spread.

Everything is added as integers, so that the result does not depend on the order, and the difference of sketches is
exactly the sketch of the difference: an element is ``round(p * 2**FRACTION)``, held as ``high * 2**16 + low``, two
int32 lanes. A float of at least 2**(23 - FRACTION) is exact in that. A bucket of two lanes holds values up to 2**15.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

BUCKETS = 16384
"""Least number of buckets over all ranks: sqrt(2 / BUCKETS) / 2 is 0.55 %."""
FRACTION = 32
"""Bits behind the point."""
QUANTUM = 2.0**-FRACTION
BLOCK = 8
"""Rows that a program adds at a time: XLA:CPU vectorises such a reduction, and not one over a long leading axis."""
LIMIT = 1024.0
"""A weight of this size, or one that is not finite, makes a sketch worthless."""
HALF = 2**30
"""A bucket's high lane beyond this may have gone round."""
TRUSTED = 0.01
"""Largest standard deviation of the relative error at which an estimate is used: two of it are 2 %."""
CLUSTERED = 1.8
"""How much larger than by chance the error is taken to be at most (a tile of 64 x 64: 1.4 to 1.7)."""
HEAVY = 0.01
"""Share of the squared distance from which a bucket is looked at by itself: less than half of it is a bucket's part in
the distance's error."""
ROW_SEED, COLUMN_SEED = 0x243F6A88, 0x13198A2E
"""Seeds of ``a`` and ``b``: first digits of pi. The same in every run, so that any two sketches can be compared."""

Sketch = npt.NDArray[np.int32]
"""``[R, 2, K]``: rank, lane (high, low), bucket."""


@cache
def buckets(ranks: int) -> int:
    """``K`` of one rank: the least prime of which the ranks together have ``BUCKETS``."""
    number = -(-BUCKETS // ranks)
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


def mix(h: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's 32-bit finaliser, as in `tandem_worker.digest`."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def row_hash(first: int, count: int) -> npt.NDArray[np.uint32]:
    """``a`` of ``count`` rows, odd."""
    return mix(np.arange(first, first + count, dtype=np.uint32) + np.uint32(ROW_SEED)) | np.uint32(1)


@cache
def column_hash(number: int) -> npt.NDArray[np.uint32]:
    """``b`` of every bucket."""
    return mix(np.arange(number, dtype=np.uint32) + np.uint32(COLUMN_SEED))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every element of a rank stands in the table of ``K`` columns, row after row."""

    whole: tuple[int, ...]
    """Per leaf, how many of its first elements fill rows of their own: whole blocks of `BLOCK` rows."""
    rest: tuple[int, ...]
    """Leaves whose other elements come after all of these, one behind another."""
    replicated: tuple[int, ...]
    """Leaves that come last, whole, beginning with a row; counted on rank 0 alone."""


def layout(sizes: Sequence[int], replicated: Sequence[bool], number: int) -> Layout:
    """The table's order, from the leaves' sizes on one rank and which of them every rank holds alike."""
    block = number * BLOCK
    whole = tuple(0 if same else size // block * block for size, same in zip(sizes, replicated, strict=True))
    rest = (i for i, same in enumerate(replicated) if not same and sizes[i] > whole[i])
    return Layout(whole, tuple(rest), tuple(i for i, same in enumerate(replicated) if same))


def sketch_numpy(leaves: Sequence[tuple[np.ndarray, bool]], ranks: int) -> tuple[Sketch, npt.NDArray[np.int32]]:
    """What the program computes, bit for bit.

    Args:
        leaves: (rank-major fp32 ``[R, *shape]``, whether every rank holds the same), in the program's order.
        ranks: how many.

    Returns:
        The sketch, and per rank ``[R]`` the bits of the largest absolute value.
    """
    number = buckets(ranks)
    flat = [np.ascontiguousarray(array, np.float32).reshape(ranks, -1) for array, _ in leaves]
    order = layout([f.shape[1] for f in flat], [same for _, same in leaves], number)
    out, top = np.zeros((ranks, 2, number), np.int32), np.zeros(ranks, np.int32)
    for rank in range(ranks):
        mine = [f[rank] for f in flat]
        top[rank] = max(int((f.view(np.int32) & 0x7FFFFFFF).max()) for f in mine)
        tables = [f[:whole] for f, whole in zip(mine, order.whole, strict=True) if whole]
        tables.append(np.concatenate([np.zeros(0, np.float32), *(mine[i][order.whole[i] :] for i in order.rest)]))
        if rank == 0:
            tables.append(np.concatenate([np.zeros(0, np.float32), *(mine[i] for i in order.replicated)]))
        row = 0
        for values in tables:
            rows = -(-values.size // number)
            padded = np.zeros(rows * number, np.float32)
            padded[: values.size] = values
            signs = (row_hash(row, rows)[:, None] * column_hash(number)).view(np.int32) >> 31
            for lane, part in enumerate(_parts(padded.reshape(rows, number))):
                out[rank, lane] += ((part ^ signs) - signs).sum(axis=0, dtype=np.int32)
            row += rows
    return out, top


def _parts(values: npt.NDArray[np.float32]) -> Iterable[npt.NDArray[np.int32]]:
    """High and low lane of each value's fixed-point form."""
    with np.errstate(all="ignore"):  # values beyond LIMIT make the sketch worthless, and `top` says so
        scaled = values * np.float32(2.0**FRACTION)
        high = np.trunc(scaled * np.float32(2.0**-16))
        return high.astype(np.int32), np.rint(scaled - high * np.float32(2.0**16)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What two sketches say of two models' distance."""

    drift: float
    """||p_a - p_r||, estimated."""
    norm: float
    """||p_r||, estimated."""
    error: float
    """One standard deviation of ``drift``'s relative error; infinite where the sketches are worthless."""

    @property
    def trusted(self) -> bool:
        return self.error <= TRUSTED


@dataclass(frozen=True, slots=True)
class Checked:
    """What an exact measurement showed of a sketch's heavy buckets: each holds one large element, or as good as one."""

    places: npt.NDArray[np.bool_]
    """Which, ``[R, K]``."""
    off: float
    """Relative error of the estimate then, which what shares a bucket would have made large."""


def check(arm: Sketch, reference: Sketch, tops: Iterable[int], exact: float) -> Checked | None:
    """Hold two sketches against the distance that was measured exactly at the same step.

    Returns:
        None where they cannot be used, or are off by more than an estimate may be: something shares a heavy bucket.
    """
    squares = _values(arm, reference) ** 2
    if not _usable(arm, reference, tops) or not (0 < exact < math.inf):
        return None
    off = abs(math.sqrt(float(squares.sum())) / exact - 1)
    return Checked(squares >= HEAVY * squares.sum(), off) if off <= TRUSTED else None


def estimate(
    arm: Sketch, reference: Sketch, tops: Iterable[int], elements: int, *, differ: bool = True,
    checked: Checked | None = None,
) -> Estimate:  # fmt: skip
    """Distance of an arm's parameters from the reference's.

    The error counts the sketch's variance and the rounding of the elements, as if all differed. The former is that of
    random buckets on the ranks that differ, or what the buckets themselves show (of Gaussian ones E s^4 = 3 B^2) if
    that is more, up to `CLUSTERED` times. A bucket that holds much of the distance is apart from that: it may be one
    element, and then exact, or some that share it and cancel, so it counts as quite uncertain until an exact
    measurement has shown which; from then on only what else falls into it counts.

    Args:
        arm: its sketch.
        reference: the reference's, of the same step.
        tops: every rank's `top` of both.
        elements: parameters in all.
        differ: whether the parameters are known to differ: equal sketches then say that the sketch saw nothing.
        checked: what the last exact measurement of the arm showed.
    """
    squares = _values(arm, reference) ** 2
    drift, norm = math.sqrt(float(squares.sum())), math.sqrt(float((_values(reference) ** 2).sum()))
    if not _usable(arm, reference, tops):
        return Estimate(drift, norm, math.inf)
    if drift == 0:
        return Estimate(drift, norm, math.inf if differ else 0.0)
    whole = float(squares.sum())
    heavy = squares >= HEAVY * whole
    known = heavy & checked.places if checked is not None else np.zeros_like(heavy)
    light = np.where(heavy, 0.0, squares)
    ranks = light.sum(axis=1)
    # Elements that meet in a bucket by chance; a tile can meet itself somewhat more often than that.
    chance = math.sqrt(2 / light.shape[1] * float((ranks**2).sum())) / (2 * whole)
    seen = math.sqrt(2 / 3 * float((light**2).sum())) / (2 * whole)
    spread = max(chance, min(seen, CLUSTERED * chance))
    alone = math.sqrt(2 / 3 * float((squares[heavy & ~known] ** 2).sum())) / (2 * whole)
    beside = math.sqrt(float((np.where(known, squares, 0.0).sum(axis=1) * ranks / light.shape[1]).sum())) / whole
    off = checked.off if checked is not None and known.any() else 0.0
    rounding = QUANTUM * math.sqrt(elements / 6) / drift
    return Estimate(drift, norm, math.hypot(spread, alone, beside, off, rounding))


def _usable(arm: Sketch, reference: Sketch, tops: Iterable[int]) -> bool:
    """Whether two sketches hold what they are of: no weight too large, no bucket that may have gone round."""
    worst = int(np.float32(LIMIT).view(np.int32))
    return all(0 <= top < worst for top in tops) and all(
        int(np.abs(s[:, 0].astype(np.int64)).max()) < HALF for s in (arm, reference)
    )


def _values(sketch: Sketch, minus: Sketch | None = None) -> npt.NDArray[np.float64]:
    """Buckets ``[R, K]`` in the parameters' own unit; of a difference with each lane taken modulo 2**32."""
    lanes = sketch if minus is None else (sketch.view(np.uint32) - minus.view(np.uint32)).view(np.int32)
    return (lanes[:, 0].astype(np.float64) * 65536.0 + lanes[:, 1].astype(np.float64)) * np.float64(QUANTUM)
