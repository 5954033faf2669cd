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
EXACT_MEDIAN = 1 << 20
"""Severities of one tensor that are kept for an exact median."""
_BINS = 64
"""Bins of severity per power of two beyond that."""


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
    pieces = Pieces(suspect.shape, suspect.dtype)
    pieces.add(suspect.reshape(-1), reference.reshape(-1))
    return pieces.difference()


class Pieces:
    """The comparison of one tensor whose parts come one after another, in order; memory does not grow with the tensor.

    All figures are exact, but the median of more than ``EXACT_MEDIAN`` severities: that is then the middle of a bin
    that is 2**(1/64) wide, so off by less than 0.6 %.

    Args:
        shape: of the whole tensor.
        dtype: of its elements.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype
        self.seen = 0
        """Elements so far."""
        self.mismatched = self.zero_reference = self.nonfinite = self.nullified = 0
        self.bits = np.zeros(8 * dtype.itemsize, np.int64)
        self.first = -1
        self._low: np.ndarray | None = None
        self._high: np.ndarray | None = None
        self._kept: list[npt.NDArray[np.float64]] | None = []
        self._bins: dict[int, int] = {}
        self._severities, self._mean, self._top = 0, 0.0, 0.0

    def add(self, suspect: np.ndarray, reference: np.ndarray) -> None:
        """The next elements, flat, both ``[n]``."""
        xor = _bits(suspect) ^ _bits(reference)
        where = np.flatnonzero(xor)
        start, self.seen = self.seen, self.seen + suspect.size
        if where.size == 0:
            return
        if where.size < xor.size:  # where all mismatch, nothing need be picked
            xor, suspect, reference = xor[where], suspect[where], reference[where]
        with np.errstate(all="ignore"):  # casts of signalling NaNs, inf - inf and x / 0 are sorted out below
            s = suspect.astype(np.float64)
            r = reference.astype(np.float64)
            relative = np.abs(s - r) / np.abs(r)
            self._severity(relative[np.isfinite(relative) & (relative != 0) & (r != 0)])
        self.mismatched += int(where.size)
        self.zero_reference += int(np.count_nonzero(r == 0))
        self.nonfinite += int(np.count_nonzero(~np.isfinite(s)))
        self.nullified += int(np.count_nonzero((s == 0) & (r != 0)))
        self.bits += _histogram(xor)
        where += start
        if self.first < 0:
            self.first = int(where[0])
        low, high = np.array(_box(where, self.shape)).T
        self._low = low if self._low is None else np.minimum(self._low, low)
        self._high = high if self._high is None else np.maximum(self._high, high)

    def difference(self) -> Difference | None:
        """Of all that was added; None if all bits were equal.

        Raises:
            ValueError: the tensor is not complete.
        """
        elements = int(np.prod(self.shape, dtype=np.int64))
        if self.seen != elements:
            raise ValueError(f"{self.seen} of {elements} elements were compared")
        if self._low is None or self._high is None:
            return None
        box = [[int(low), int(high)] for low, high in zip(self._low, self._high, strict=True)]
        return Difference(
            elements=elements,
            mismatched=self.mismatched,
            severity_mean=self._mean if self._severities else None,
            severity_median=self._median(),
            severity_max=self._top if self._severities else None,
            zero_reference=self.zero_reference,
            nonfinite=self.nonfinite,
            nullified=self.nullified,
            bits=[int(n) for n in self.bits],
            first_index=self.first,
            extent=_extent(self.mismatched, box[-2], box[-1], elements // self._columns, self._columns),
            box=box[:-2],
        )

    @property
    def _columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    def _severity(self, severity: npt.NDArray[np.float64]) -> None:
        if not severity.size:
            return
        top = float(severity.max())
        # scaled, so that sums of severities near the largest fp64 do not overflow
        mean = float(np.mean(severity / top) * top)
        self._severities += severity.size
        self._mean += (mean - self._mean) * (severity.size / self._severities)
        self._top = max(self._top, top)
        if self._kept is not None:
            self._kept.append(severity)
            if self._severities <= EXACT_MEDIAN:
                return
            severity = np.concatenate(self._kept)
            self._kept = None
        bins = np.floor(np.log2(severity) * _BINS).astype(np.int64)
        lowest = int(bins.min())
        counts = np.bincount(bins - lowest)  # of at most the bins of fp64's range, 134,208
        for place in np.flatnonzero(counts).tolist():
            self._bins[lowest + place] = self._bins.get(lowest + place, 0) + int(counts[place])

    def _median(self) -> float | None:
        if not self._severities:
            return None
        if self._kept is not None:
            severity = np.concatenate(self._kept)
            return float(np.median(severity / self._top) * self._top)
        left = self._severities // 2
        for place in sorted(self._bins):
            left -= self._bins[place]
            if left < 0:
                return float(2.0 ** ((place + 0.5) / _BINS))
        return None


def extent(where: npt.NDArray[np.intp], shape: tuple[int, ...]) -> Extent:
    """Shape of the damage, the tensor seen as rows (all leading axes) x columns (last axis).

    The first rule that holds, for the flat indices ``where`` (at least one):

    1. ``element``: one element.
    2. ``whole``: the bounding box is the whole tensor, and at least half of it (``DENSE``) mismatches.
    3. ``row``: all in one row, of several; ``column``: all in one column, of several.
    4. ``tile``: at least half of the bounding box mismatches.
    5. ``scattered``.
    """
    columns = shape[-1] if shape else 1
    row, column = (_ends(axis) for axis in np.divmod(where, columns))
    return _extent(int(where.size), list(row), list(column), int(np.prod(shape[:-1], dtype=np.int64)), columns)


def _extent(found: int, row: list[int], column: list[int], rows: int, columns: int) -> Extent:
    """As ``extent``, from the number of mismatches and the first and last row and column with any."""
    if found == 1:
        return Extent.ELEMENT
    height, width = row[1] - row[0] + 1, column[1] - column[0] + 1
    dense = found >= DENSE * height * width
    if dense and (height, width) == (rows, columns):
        return Extent.WHOLE
    if height == 1 and rows > 1:
        return Extent.ROW
    if width == 1 and columns > 1:
        return Extent.COLUMN
    return Extent.TILE if dense else Extent.SCATTERED


def _ends(axis: npt.NDArray[Any]) -> tuple[int, int]:
    return int(axis.min()), int(axis.max())


def _bits(x: np.ndarray) -> npt.NDArray[Any]:
    """The bit patterns, flat, as unsigned integers."""
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")


def _histogram(xor: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How often each bit is set, least significant first."""
    width = xor.dtype.itemsize
    octets = np.ascontiguousarray(xor.astype(xor.dtype.newbyteorder("<"), copy=False)).view(np.uint8)
    return np.concatenate([np.bincount(octets[i::width], minlength=256) @ _SET for i in range(width)])


_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int64)
"""Which bits are set in each octet, ``[256, 8]``."""


def _box(where: npt.NDArray[np.intp], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """First and last index along each axis, then of the row and the column, of ascending flat indices."""
    columns = shape[-1] if shape else 1
    first, last = int(where[0]), int(where[-1])
    row = (first // columns, last // columns)
    if last - first + 1 == where.size:  # without a gap: whoever crosses the end of a row has touched every column
        column = (first % columns, last % columns) if row[0] == row[1] else (0, columns - 1)
    else:
        column = _ends(where % columns)
    if len(shape) < 3:
        return [*([row, column] if len(shape) == 2 else [column] if shape else []), row, column]
    leading = np.unravel_index(where // columns, shape[:-1])
    return [*map(_ends, leading), column, row, column]
