"""Bits of an element as fault profiles name them: positions, named distributions, weights. Pure."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

BitName = Literal["uniform", "exponent", "mantissa", "sign"]
BIT_NAMES: tuple[BitName, ...] = ("uniform", "exponent", "mantissa", "sign")

_EXPONENT = {"float32": 8, "float16": 5, "bfloat16": 8}


def dtype_bits(dtype: str) -> int:
    """Width of an element in bits; ``bfloat16`` needs no extension type for this."""
    return 16 if dtype == "bfloat16" else 8 * np.dtype(dtype).itemsize


def named_bits(name: BitName, dtype: str) -> tuple[int, ...]:
    """The bit positions of a named uniform distribution; integers have no exponent (empty)."""
    width = dtype_bits(dtype)
    mantissa = width - 1 - _EXPONENT.get(dtype, 0)
    match name:
        case "uniform":
            return tuple(range(width))
        case "sign":
            return (width - 1,)
        case "exponent":
            return tuple(range(mantissa, width - 1))
        case "mantissa":
            return tuple(range(mantissa))


def as_tuple(value: Any) -> Any:
    """What was given alone, as a list of one."""
    if value is None or isinstance(value, (list, tuple)):
        return value
    return (value,)


def _position(value: Any) -> int:
    try:
        bit = int(value) if not isinstance(value, (bool, float)) else -1
    except (TypeError, ValueError):
        bit = -1
    if not 0 <= bit < 32:
        raise ValueError(f"bit position {value!r} is not a whole number from 0 (least significant) to 31")
    return bit


def bit_choice(value: Any) -> BitName | tuple[int, ...] | dict[int, float]:
    """A name of a distribution, positions that flip together, or weights per position.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(value, str):
        if value not in BIT_NAMES:
            raise ValueError(f"{value!r} is no bit distribution: use {', '.join(BIT_NAMES)}, positions, or weights")
        return value
    if isinstance(value, dict):
        weights = {_position(k): v for k, v in value.items()}
        good = all(
            isinstance(w, (int, float)) and not isinstance(w, bool) and 0 < w < math.inf for w in weights.values()
        )
        if not weights or not good:
            raise ValueError("weights per bit must be numbers above 0, for example { 30 = 1, 22 = 3 }")
        return weights
    if not (positions := bit_positions(value)):
        raise ValueError("give at least one bit position")
    return positions


def bit_positions(value: Any) -> tuple[int, ...]:
    """One or more positions, none twice.

    Raises:
        ValueError: one of them is no position, or is there twice.
    """
    positions = tuple(_position(v) for v in as_tuple(value) or ())
    if len(set(positions)) != len(positions):
        raise ValueError("give no bit position twice")
    return positions
