"""Exact statistics of one mismatch: a rank's tensor on the suspect against the reference's. Pure, numpy only.

Definitions follow the paper (arXiv 2502.12340). An element *mismatches* when its bits differ, so +0
and -0, or two NaN payloads, are different. Its *severity* is |s - r| / |r| in fp64; mean, median
and maximum are over the mismatching elements for which that is finite and not zero.
Our rule for a reference value of 0 (the paper's is not known): no relative difference exists, such elements
enter no severity and are counted in ``zero_reference``. Elements that are NaN or infinite on either side enter
none either; those of the suspect are counted in ``nonfinite``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.vocabulary import Extent

DENSE = 0.5
"""Share of its bounding box that damage must fill to be a tile, or of the tensor to be the whole."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One rank's tensor that differs. Fields mean what they mean in ``records.MismatchRecord``."""

    elements: int
    mismatched: int
    severity_mean: float | None
    severity_median: float | None
    severity_max: float | None
    zero_reference: int
    nonfinite: int
    nullified: int
    bits: list[int]
    first_index: int
    extent: Extent
    box: list[list[int]]

    def fields(self) -> dict[str, Any]:
        """Exactly the keyword arguments of the same name of ``records.MismatchRecord``."""
        return asdict(self)


def compare(suspect: np.ndarray, reference: np.ndarray) -> Difference | None:
    """Compare bit by bit.

    Args:
        suspect: one rank's tensor, any shape and dtype of 8 to 64 bits (bfloat16 by ml_dtypes).
        reference: the same shape and dtype.

    Returns:
        None if all bits are equal.

    Raises:
        ValueError: the shapes or dtypes differ.
    """
    if suspect.shape != reference.shape or suspect.dtype != reference.dtype:
        raise ValueError(
            f"cannot compare {suspect.dtype}{list(suspect.shape)} with {reference.dtype}{list(reference.shape)}"
        )
    xor = _bits(suspect) ^ _bits(reference)
    where = np.flatnonzero(xor)
    if where.size == 0:
        return None
    with np.errstate(all="ignore"):  # casts of signalling NaNs, inf - inf and x / 0 are sorted out below
        s = suspect.reshape(-1)[where].astype(np.float64)
        r = reference.reshape(-1)[where].astype(np.float64)
        relative = np.abs(s - r) / np.abs(r)
        severity = relative[np.isfinite(relative) & (relative != 0) & (r != 0)]
        top = float(severity.max(initial=0.0))
        # scaled, so that sums of severities near the largest fp64 do not overflow
        mean, median = (float(f(severity / top) * top) if severity.size else None for f in (np.mean, np.median))
    return Difference(
        elements=suspect.size,
        mismatched=int(where.size),
        severity_mean=mean,
        severity_median=median,
        severity_max=top if severity.size else None,
        zero_reference=int(np.count_nonzero(r == 0)),
        nonfinite=int(np.count_nonzero(~np.isfinite(s))),
        nullified=int(np.count_nonzero((s == 0) & (r != 0))),
        bits=_histogram(xor[where]),
        first_index=int(where[0]),
        extent=extent(where, suspect.shape),
        box=[[int(axis.min()), int(axis.max())] for axis in _places(where, suspect.shape)],
    )


def extent(where: npt.NDArray[np.intp], shape: tuple[int, ...]) -> Extent:
    """Shape of the damage, the tensor seen as rows (all leading axes) x columns (last axis).

    The first rule that holds, for the flat indices ``where`` (at least one):

    1. ``element``: one element.
    2. ``whole``: the bounding box is the whole tensor, and at least half of it (``DENSE``) mismatches.
    3. ``row``: all in one row, of several; ``column``: all in one column, of several.
    4. ``tile``: at least half of the bounding box mismatches.
    5. ``scattered``.
    """
    if where.size == 1:
        return Extent.ELEMENT
    columns = shape[-1]
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    row, column = np.divmod(where, columns)
    height, width = int(np.ptp(row)) + 1, int(np.ptp(column)) + 1
    dense = where.size >= DENSE * height * width
    if dense and (height, width) == (rows, columns):
        return Extent.WHOLE
    if height == 1 and rows > 1:
        return Extent.ROW
    if width == 1 and columns > 1:
        return Extent.COLUMN
    return Extent.TILE if dense else Extent.SCATTERED


def _bits(x: np.ndarray) -> npt.NDArray[Any]:
    """The bit patterns, flat, as unsigned integers."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")


def _histogram(xor: npt.NDArray[Any]) -> list[int]:
    """How often each bit is set, least significant first."""
    width = xor.dtype.itemsize
    octets = np.ascontiguousarray(xor.astype(xor.dtype.newbyteorder("<"))).view(np.uint8).reshape(-1, width)
    return [int(n) for n in np.unpackbits(octets, axis=1, bitorder="little").sum(axis=0, dtype=np.int64)]


def _places(where: npt.NDArray[np.intp], shape: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    """Index along each axis; none for a scalar, which numpy's function refuses."""
    return np.unravel_index(where, shape) if shape else ()
