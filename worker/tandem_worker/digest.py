"""The digest: 64 bits (two 32-bit lanes) of one rank's tensor, by position, over its exact bits.

Formula. The tensor is seen as rows (all leading axes, C order) x columns (last axis; a scalar is one
row of one column, a vector one row). All arithmetic is modulo 2**32; for lane ``l`` in 0, 1::

    b[r, c]  = the element's bits, zero-extended to 32
    m[r, c]  = b ^ (b >> (16 + l))            32-bit dtypes (a bijection)
             = b                              narrower dtypes
    s[r]     = sum over c of  m[r, c] * w_l[c]
    total    = sum over r of  fmix32(s[r] + fmix32(r * 0x9E3779B9 + k_l))
    lane     = fmix32(total + n * 0x85EBCA77 + k_l)       n = number of elements

``w_l`` is a fixed table of odd weights; the low 17 bits of ``w_l[c]`` differ for all ``c < 65536``.
``fmix32`` is MurmurHash3's 32-bit finaliser (public domain, A. Appleby), a bijection. Per element the
cost is one multiplication and one addition (and a shift and an xor for 32-bit dtypes); the
expensive mixing happens once a row.

Always caught, not just probably:

* **Any change of one element.** ``m`` is a bijection, so its word changes; an odd weight times a
  non-zero difference is not 0 mod 2**32, so ``s[r]`` changes; ``fmix32`` is a bijection, so one term of
  ``total`` changes, hence ``total``, hence the lane. Either lane alone suffices.
* **Any swap of two different elements of one row** (whose columns do not differ by a multiple of
  65536). ``s[r]`` changes by (m_i - m_j)(w_i - w_j). The second factor is divisible by at most 2**16. The
  first is divisible by at most 2**15 in at least one lane: for narrow dtypes because words are below
  2**16; for 32-bit ones because the low halves of ``b ^ b >> 16`` and of ``b ^ b >> 17`` together
  determine ``b``. So the product is not 0 mod 2**32 there. Plain words would miss x and -x, whose
  difference 2**31 times an even number vanishes.
* **The same bit flipped in two elements of one row** (columns below 65536), by exhaustion: no pair of
  weights fails in both lanes (``tests/unit/test_digest.py``).

Otherwise, collision bound. A change of several elements of one row, seen through weights that are random
but odd, leaves a lane unchanged with probability at most 2**-(31 - k), where 2**k is the largest power of two that
divides all the word differences. Narrow dtypes have k <= 15: at most 2**-16 a lane and 2**-32 together, reached
only by changes that touch nothing but sign bits; unstructured changes have k near 0 and about 2**-62. For
32-bit dtypes k <= 15 holds in at least one lane, so 2**-16 in the worst (constructed) case.
Changes over several rows cancel only if their finalised terms do: about 2**-32 a lane, 2**-64 together.
The weights are public: the digest guards against faults, not against an adversary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

U32 = TypeVar("U32", jax.Array, npt.NDArray[np.uint32])
LANES = 2
TOGETHER = 32
"""Tensors whose rows' sums are mixed in one go."""
_ROW, _COUNT = 0x9E3779B9, 0x85EBCA77
_KEYS = (0x243F6A88, 0x13198A2E)
"""``k_0, k_1``: first digits of pi."""
_MIX = ((8, 0x2D35, 7, 0x1B87, 9), (7, 0xDFBD, 9, 0xC4D7, 8))
"""Constants of the 16-bit permutation of each lane's weights; chosen so that no pair of weights is
complementary (sum 0 mod 2**17) in both lanes."""


def lanes(x: jax.Array, *, variadic: bool | None = None) -> jax.Array:
    """Digest of one rank's local tensor; traceable inside jit and shard_map.

    Args:
        x: any shape with at least one element; any dtype of 8, 16 or 32 bits.
        variadic: one reduction for both lanes, or two sums. Default: two sums on a TPU, which
            fuses them into the producer; else one reduction (a GPU reads the tensor once; XLA:CPU
            is several times faster, 2048 x 1024 fp32 in 0.5 ms against 3.5). The bits are the same.

    Returns:
        u32 ``[2]``.

    Raises:
        ValueError: the tensor is empty.
        TypeError: the dtype is neither 8, 16 nor 32 bits wide.
    """
    if variadic is None:
        variadic = jax.default_backend() != "tpu"
    rows, columns = _rows(x.shape)
    sums = _row_sums(x, variadic=variadic)
    row = jnp.arange(rows, dtype=jnp.uint32) * np.uint32(_ROW)
    out = []
    for key, s in zip(_KEYS, sums, strict=True):
        total = jnp.sum(fmix32(s + fmix32(row + np.uint32(key))), dtype=jnp.uint32)
        out.append(fmix32(total + _count(rows, columns, key)))
    return jnp.stack(out)


def many_lanes(tensors: Sequence[jax.Array]) -> jax.Array:
    """`lanes` of many tensors, bit for bit, with few operations beside one pass over each.

    The sums over the rows of tensors with as many rows are mixed together, `TOGETHER` tensors at a time. A whole step
    of a model with 30 layers has a thousand outputs; their own mixing, in five kernels each, was half of what XLA:CPU
    had to compile.

    Returns:
        u32 ``[n, 2]``.

    Raises:
        ValueError, TypeError: as `lanes`.
    """
    alike: dict[int, list[int]] = {}
    for i, x in enumerate(tensors):
        alike.setdefault(_rows(x.shape)[0], []).append(i)
    order: list[int] = []
    parts: list[jax.Array] = []
    for rows, members in alike.items():
        for at in range(0, len(members), TOGETHER):
            some = members[at : at + TOGETHER]
            order += some
            parts.append(_mixed([tensors[i] for i in some], rows))
    places = np.argsort(np.asarray(order))
    joined = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return joined if (places[:-1] < places[1:]).all() else joined[places]


def _mixed(tensors: Sequence[jax.Array], rows: int) -> jax.Array:
    """Digests u32 ``[n, 2]`` of tensors that all have ``rows`` rows."""
    sums = [_row_sums_once(x) for x in tensors]
    row = jnp.arange(rows, dtype=jnp.uint32) * np.uint32(_ROW)
    out = []
    for lane, key in enumerate(_KEYS):
        stacked = jnp.stack([s[lane] for s in sums])
        total = jnp.sum(fmix32(stacked + fmix32(row + np.uint32(key))), axis=1, dtype=jnp.uint32)
        counts = np.asarray([_count(rows, _rows(x.shape)[1], key) for x in tensors], np.uint32)
        out.append(fmix32(total + counts))
    return jnp.stack(out, axis=1)


def _row_sums(x: jax.Array, *, variadic: bool) -> list[jax.Array]:
    """Per lane the weighted sum of each row: u32 ``[rows]``."""
    rows, columns = _rows(x.shape)
    b = words(x).reshape(rows, columns)
    products = [m * jnp.asarray(weights(columns)[lane]) for lane, m in enumerate(_premix(b, x.dtype.itemsize))]
    if not variadic:
        return [jnp.sum(p, axis=1, dtype=jnp.uint32) for p in products]
    zero = np.uint32(0)
    return list(lax.reduce(products, [zero, zero], lambda a, p: [a[0] + p[0], a[1] + p[1]], (1,)))


@jax.jit
def _row_sums_once(x: jax.Array) -> list[jax.Array]:
    """`_row_sums`, traced once for each shape and dtype."""
    return _row_sums(x, variadic=True)


def _count(rows: int, columns: int, key: int) -> np.uint32:
    """What the number of elements adds to a lane."""
    return np.uint32((rows * columns * _COUNT + key) & 0xFFFFFFFF)


def lanes_numpy(x: np.ndarray) -> npt.NDArray[np.uint32]:
    """The same digest on the host, bit for bit: u32 ``[2]`` of ``x``. Raises as ``lanes`` does."""
    rows, columns = _rows(x.shape)
    if x.dtype.itemsize not in (1, 2, 4):
        raise TypeError(f"no digest of {x.dtype}: its elements must be 8, 16 or 32 bits wide")
    b = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(rows, columns).astype(np.uint32)
    row = np.arange(rows, dtype=np.uint32) * np.uint32(_ROW)
    out = np.empty(LANES, np.uint32)
    for lane, (key, m) in enumerate(zip(_KEYS, _premix(b, x.dtype.itemsize), strict=True)):
        s = (m * weights(columns)[lane]).sum(axis=1, dtype=np.uint32)
        total = fmix32(s + fmix32(row + np.uint32(key))).sum(dtype=np.uint32, keepdims=True)
        out[lane] = fmix32(total + _count(rows, columns, key))[0]
    return out


def words(x: jax.Array) -> jax.Array:
    """The elements' bits, zero-extended: u32 of ``x``'s shape.

    Raises:
        TypeError: the dtype is neither 8, 16 nor 32 bits wide.
    """
    width = x.dtype.itemsize
    if width not in (1, 2, 4):
        raise TypeError(f"no digest of {x.dtype}: its elements must be 8, 16 or 32 bits wide")
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape as (rows, columns)."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    if rows * columns == 0:
        raise ValueError(f"no digest of an empty tensor (shape {shape})")
    return rows, columns


def _premix(b: U32, itemsize: int) -> tuple[U32, U32]:
    """``m`` of both lanes."""
    return (b, b) if itemsize < 4 else (b ^ (b >> np.uint32(16)), b ^ (b >> np.uint32(17)))


@lru_cache(maxsize=64)
def weights(columns: int) -> npt.NDArray[np.uint32]:
    """The weights ``w_l[c]``: u32 ``[2, columns]``, all odd. A prefix of the longer tables."""
    c = np.arange(columns, dtype=np.uint32)
    table = np.empty((LANES, columns), np.uint32)
    for lane, (key, (s0, a, s1, b, s2)) in enumerate(zip(_KEYS, _MIX, strict=True)):
        low = c & 0xFFFF
        low = ((low ^ (low >> s0)) * np.uint32(a)) & 0xFFFF
        low = ((low ^ (low >> s1)) * np.uint32(b)) & 0xFFFF
        low ^= low >> s2
        table[lane] = (fmix32(c + np.uint32(key)) & np.uint32(0xFFFE0000)) | (low << 1) | 1
    table.setflags(write=False)
    return table


def fmix32(h: U32) -> U32:
    """MurmurHash3's 32-bit finaliser, a bijection of u32; for jax and numpy arrays alike."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
