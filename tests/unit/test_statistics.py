"""Statistics of a mismatch: exact counts and the paper's severity, whatever the bits are."""

from __future__ import annotations

import itertools
from typing import Any
from uuid import UUID

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.records import MismatchRecord
from tandem.statistics.mismatch import Difference, Pieces, compare, extent
from tandem.vocabulary import Cause, Extent, Module, Phase

FLOATS = [np.float32, ml_dtypes.bfloat16, np.float16]
DTYPES = [*FLOATS, np.int32, np.float64]


def differ(suspect: Any, reference: Any, dtype: object = np.float32) -> Difference:
    found = compare(np.asarray(suspect, dtype), np.asarray(reference, dtype))
    assert found is not None
    return found


def test_equal_bits_are_no_difference_even_with_nans() -> None:
    x = np.array([np.nan, np.inf, -0.0, 1.0], np.float32)
    assert compare(x.copy(), x) is None
    assert compare(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)) is None
    assert compare(np.float32(1).reshape(()), np.float32(1).reshape(())) is None


def test_signed_zeros_and_nan_payloads_mismatch() -> None:
    assert differ([-0.0], [0.0]).mismatched == 1
    a, b = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FA00001))
    found = compare(a, b)
    assert found is not None
    assert (found.mismatched, found.nonfinite, found.severity_mean) == (1, 1, None)


def test_severity_of_a_worked_example() -> None:
    found = differ([1.5, 2.0, -4.0, 0.0, 7.0, np.inf, 9.0], [1.0, 2.0, 4.0, 8.0, 0.0, 1.0, np.nan])
    # |s - r| / |r|: 0.5, 2 and 1; then r = 0, s = inf, r = NaN have none
    assert found.mismatched == 6
    assert found.severity_mean == pytest.approx(3.5 / 3)
    assert found.severity_median == 1.0
    assert found.severity_max == 2.0
    assert (found.zero_reference, found.nonfinite, found.nullified) == (1, 1, 1)
    assert found.first_index == 0


def test_huge_severities_neither_warn_nor_overflow() -> None:
    assert differ([1e12], [1.0]).severity_max == pytest.approx(1e12, rel=1e-6)
    tiny, huge = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    assert differ([huge], [tiny]).severity_max == pytest.approx(float(huge) / float(tiny))
    found = differ([1e308, 1e308, 1e308], [1.0, 1.0, 1.0], np.float64)
    assert found.severity_mean == pytest.approx(1e308)
    assert found.severity_median == pytest.approx(1e308)
    assert differ([1e308], [1e-308], np.float64).severity_mean is None  # the ratio itself is not finite


def test_the_fields_are_those_of_the_record() -> None:
    found = differ([1.0, 2.0], [1.0, 3.0])
    record = MismatchRecord(
        run_id=UUID(int=0),
        attempt=1,
        step=1,
        site=0,
        rank=0,
        phase=Phase.FWD,
        module=Module.FFN,
        layer=0,
        tensor="out",
        cause=Cause.COMPUTE,
        **found.fields(),
    )
    assert record.mismatched == 1
    assert record.box == [[1, 1]]


def test_unlike_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot compare float32\[2\] with float32\[3\]"):
        compare(np.zeros(2, np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="cannot compare"):
        compare(np.zeros(2, np.float32), np.zeros(2, np.int32))


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(), (1,), (7,), (3, 4), (2, 3, 5)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
    share=st.floats(0, 1),
)
def test_against_a_loop_over_elements(shape: tuple[int, ...], dtype: object, seed: int, share: float) -> None:
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    raw = rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    other = np.where(rng.random((*shape, 1)) < share, rng.integers(0, 256, raw.shape, dtype=np.uint8), raw)
    r, s = (np.asarray(v).view(kind)[..., 0] for v in (raw, other.astype(np.uint8)))
    found = compare(s, r)
    width = 8 * kind.itemsize
    histogram, indices, severities = [0] * width, [], []
    words = [np.ascontiguousarray(v).view(f"u{kind.itemsize}").reshape(-1) for v in (s, r)]
    for i, (a, b) in enumerate(zip(*(w.tolist() for w in words), strict=True)):
        if a == b:
            continue
        indices.append(i)
        for bit in range(width):
            histogram[bit] += (a ^ b) >> bit & 1
        with np.errstate(all="ignore"):
            u, h = (v.reshape(-1)[i : i + 1].astype(np.float64) for v in (s, r))
            relative = np.abs(u - h) / np.abs(h)
        if h[0] != 0 and np.isfinite(relative[0]):
            severities.append(float(relative[0]))
    if not indices:
        assert found is None
        return
    assert found is not None
    assert (found.elements, found.mismatched, found.first_index) == (s.size, len(indices), indices[0])
    assert found.bits == histogram
    if severities:
        assert found.severity_max == max(severities)
        assert found.severity_mean == pytest.approx(np.mean(np.array(severities) / max(severities)) * max(severities))
        assert found.severity_median == pytest.approx(float(np.median(severities)))
    else:
        assert found.severity_mean is found.severity_median is found.severity_max is None
    places = np.array([np.unravel_index(i, shape) for i in indices]).reshape(len(indices), len(shape))
    assert found.box == [[int(low), int(high)] for low, high in zip(places.min(0), places.max(0), strict=True)]


@given(
    shape=st.sampled_from([(1,), (9,), (5, 7), (2, 3, 5), (4, 1)]),
    spans=st.lists(st.tuples(st.integers(0, 34), st.integers(1, 12)), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 34), max_size=4),
)
def test_parts_say_what_the_whole_says(shape: tuple[int, ...], spans: list[tuple[int, int]], cuts: set[int]) -> None:
    """Whole spans mismatch, across the ends of rows: parts without a gap, and without a mismatch."""
    reference = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    suspect = reference.copy()
    for start, length in spans:
        suspect.reshape(-1)[start : start + length] = -reference.reshape(-1)[start : start + length]
    pieces = Pieces(shape, reference.dtype)
    edges = [0, *sorted(cut for cut in cuts if cut < reference.size), reference.size]
    for start, end in itertools.pairwise(edges):
        pieces.add(suspect.reshape(-1)[start:end], reference.reshape(-1)[start:end])
    found, whole = pieces.difference(), compare(suspect, reference)
    assert found == whole
    if found is not None:
        places = np.argwhere(suspect != reference)
        assert found.box == [[int(low), int(high)] for low, high in zip(places.min(0), places.max(0), strict=True)]
        assert found.extent is extent(np.flatnonzero(suspect != reference), shape)


def damaged(shape: tuple[int, ...], *where: Any) -> Extent:
    reference = np.ones(shape, np.float32)
    suspect = reference.copy()
    for place in where:
        suspect[place] = 2.0
    found = compare(suspect, reference)
    assert found is not None
    return found.extent


@pytest.mark.parametrize(
    ("shape", "where", "expected"),
    [
        ((), [()], Extent.ELEMENT),
        ((1,), [0], Extent.ELEMENT),
        ((8, 8), [(3, 4)], Extent.ELEMENT),
        ((8, 8), [(3, 1), (3, 7)], Extent.ROW),
        ((2, 4, 8), [(1, 3, slice(None))], Extent.ROW),
        ((8, 8), [(1, 5), (6, 5)], Extent.COLUMN),
        ((2, 4, 8), [(slice(None), slice(None), 2)], Extent.COLUMN),
        ((8, 8), [(slice(2, 5), slice(1, 4))], Extent.TILE),
        ((8, 8), [slice(None)], Extent.WHOLE),
        ((8, 8), [(slice(None), slice(None, None, 2)), (0, 7)], Extent.WHOLE),
        ((8, 8), [(0, 0), (7, 7)], Extent.SCATTERED),
        ((8, 8), [(0, 0), (3, 7), (6, 2)], Extent.SCATTERED),
        ((16,), [slice(4, 9)], Extent.TILE),
        ((16,), [0, 15], Extent.SCATTERED),
        ((16,), [slice(None)], Extent.WHOLE),
        ((16, 1), [slice(3, 9)], Extent.TILE),
    ],
)
def test_extent(shape: tuple[int, ...], where: list[Any], expected: Extent) -> None:
    assert damaged(shape, *where) is expected


def test_a_large_tensor_is_compared_exactly() -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((512, 512)).astype(ml_dtypes.bfloat16)
    suspect = reference.copy()
    hit = rng.choice(reference.size, 1000, replace=False)
    suspect.view(np.uint16).reshape(-1)[hit] ^= 1 << 3
    found = compare(suspect, reference)
    assert found is not None
    assert found.mismatched == 1000
    assert found.bits == [1000 if bit == 3 else 0 for bit in range(16)]
    assert found.first_index == hit.min()
    assert found.extent is Extent.SCATTERED
