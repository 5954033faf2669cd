"""The mergeable sketch of severities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.statistics.sketch import RELATIVE_ERROR, merge, quantile, sketch

VALUES = st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=80)


@given(VALUES, VALUES, st.floats(0.01, 1))
def test_a_quantile_of_merged_sketches_is_that_of_all_values(one: list[float], other: list[float], q: float) -> None:
    both = merge([sketch(one), sketch(other)])
    assert both == sketch([*one, *other])
    exact = float(np.quantile([*one, *other], q, method="inverted_cdf"))
    assert quantile(both, q) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)


def test_what_is_no_severity_is_left_out() -> None:
    assert sketch([0.0, -1.0, math.nan, math.inf]) == {}
    assert quantile({}, 0.5) is None
    assert sketch([1.7e308]) != {}
    assert math.isfinite(quantile(sketch([1.7e308]), 0.5) or math.inf)
