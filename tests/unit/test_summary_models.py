"""What a run's summary says of gradient noise, drift and answers: rules that the pages' tests do not reach."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raw_runs import STEPS, gradient_run, training_run
from sample_runs import sample_run
from tandem.cli.show import lines
from tandem.records import AttemptRow, ControlRecord, RunRecords
from tandem.runs.as_json import to_json
from tandem.runs.drift import DriftPoint, StepValues, loss_difference
from tandem.runs.lineage import counts, lineage
from tandem.runs.summary import summarise
from tandem.vocabulary import ControlName, Role

GRADIENT, TRAINING, RESUMED = gradient_run().records, training_run().records, training_run(resumed=True).records


def changed(records: RunRecords, **fields: object) -> RunRecords:
    return msgspec.structs.replace(records, **fields)


# -- gradient noise ------------------------------------------------------------------------------------


def test_a_step_whose_noise_is_missing_is_not_quiet() -> None:
    """Leaves that differed without a record are no ratio of zero, and the page says so."""
    lost = changed(GRADIENT, gradients=[g for g in GRADIENT.gradients if g.step != 18])
    before, after = (summarise(r).noise for r in (GRADIENT, lost))
    assert (before.unmeasured, after.unmeasured) == (0, 1)
    assert [p.ratio for p in after.points if p.step == 18] == [None]
    assert after.totals.steps == before.totals.steps - 1
    assert any("WCNTS may be larger" in line for line in summarise(lost).not_checked)
    rows = [m for m in GRADIENT.mismatches if m.step == 18]
    unseen = changed(lost, mismatches=[*(m for m in lost.mismatches if m.step != 18),
                                       *(msgspec.structs.replace(m, mismatched=None) for m in rows)])  # fmt: skip
    assert any("never received" in line for line in summarise(unseen).not_checked)


def test_a_run_without_a_compared_gradient_has_no_wcnts() -> None:
    s = summarise(changed(GRADIENT, steps=[], gradients=[], mismatches=[])).noise
    assert (s.wcnts, s.points, s.leaves) == (None, [], [])
    quiet = changed(GRADIENT, gradients=[], mismatches=[], steps=[
        msgspec.structs.replace(s, classes={n: msgspec.structs.replace(c, mismatched_sites=0, mismatched_elements=0)
                                            for n, c in s.classes.items()}) for s in GRADIENT.steps
    ])  # fmt: skip
    assert summarise(quiet).noise.wcnts == 0.0


def test_parts_belong_to_their_workload() -> None:
    assert summarise(sample_run()).noise is summarise(sample_run()).drift is None
    assert summarise(GRADIENT).drift is None
    assert summarise(TRAINING).noise is None


# -- drift ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "suspect", "expected"),
    [
        (2.0, 2.5, 0.5),
        (2.0, math.nan, math.inf),
        (math.inf, 2.0, math.inf),
        (math.nan, math.nan, 0.0),
        (None, 1.0, None),
    ],
)
def test_difference_of_losses(reference: float | None, suspect: float | None, expected: float | None) -> None:
    assert loss_difference(StepValues(1, reference, suspect, None, None)) == expected


@given(
    drift=st.one_of(st.none(), st.floats(min_value=0)),
    norm=st.one_of(st.none(), st.floats(min_value=0, allow_infinity=False)),
    scale=st.integers(-30, 30),
)
def test_relative_drift(drift: float | None, norm: float | None, scale: int) -> None:
    """Never NaN, zero only for zero, and the same in every unit."""
    ratio = DriftPoint(1, "suspect", "", True, drift, norm, 0.0, None, None).ratio
    assert (ratio is None) == (drift is None or norm is None)
    if ratio is not None:
        assert not math.isnan(ratio)
        least = Fraction(math.ulp(0.0))
        underflows = norm > 0 and 0 < drift < math.inf and Fraction(drift) / Fraction(norm) < least
        assert (ratio == 0) == (drift == 0) or underflows
    if ratio and math.isfinite(ratio) and 1e-100 < drift < 1e100 and 1e-100 < norm < 1e100:
        f = 2.0**scale
        assert DriftPoint(1, "suspect", "", True, drift * f, norm * f, 0.0, None, None).ratio == ratio


def test_what_a_resumed_attempt_replaced_is_no_part_of_the_course() -> None:
    whole, resumed = summarise(TRAINING).drift, summarise(RESUMED).drift
    assert resumed.steps == whole.steps
    assert resumed.points == whole.points
    assert (whole.resumed, resumed.resumed) == ({}, {2: 20})
    assert (whole.first_divergence, resumed.first_divergence) == (12, 12)
    alone = changed(RESUMED, attempts=RESUMED.attempts[1:], steps=[s for s in RESUMED.steps if s.attempt == 2])
    continued = summarise(alone).drift
    assert (continued.started_from, continued.first_divergence) == (20, 12)  # as its checkpoint says
    assert resumed.started_from == 0


def attempt(n: int) -> AttemptRow:
    return msgspec.structs.replace(TRAINING.attempts[0], attempt=n)


def resume(n: int, step: int) -> ControlRecord:
    return ControlRecord(
        run_id=TRAINING.run.run_id, attempt=n, name=ControlName.RESUMED, role=Role.REFERENCE, step=step, subject="",
        ok=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attempts", "resumed", "expected"),
    [
        ((1,), {}, {1: None}),
        ((1, 2), {}, {2: None}),
        ((1, 2), {2: 20}, {1: 20, 2: None}),
        ((1, 2, 3), {2: 20, 3: 30}, {1: 20, 2: 30, 3: None}),
        ((1, 2, 3), {2: 20, 3: 10}, {1: 10, 2: 10, 3: None}),
        ((1, 2, 3), {3: 10}, {2: 10, 3: None}),
        ((1,), {1: 40}, {1: None}),
        ((), {}, {}),
    ],
)
def test_lineage(attempts: tuple[int, ...], resumed: dict[int, int], expected: dict[int, int | None]) -> None:
    records = changed(
        TRAINING, attempts=[attempt(n) for n in attempts], steps=[], controls=[resume(n, s) for n, s in resumed.items()]
    )
    course = lineage(records)
    assert course == expected
    assert not counts(course, 99, 1)
    assert all(counts(course, n, 1) for n in expected)


def test_a_run_that_goes_on_from_an_earlier_one_says_what_it_lacks() -> None:
    late = changed(TRAINING, steps=[s for s in TRAINING.steps if s.step > 10])
    assert any("Steps 1 to 10" in line for line in summarise(late).not_checked)
    alone = training_run(baseline=False).records
    assert any("no baseline" in line for line in summarise(alone).not_checked)


@pytest.mark.parametrize("reached", [0, 12, STEPS])
def test_a_baseline_that_was_not_trained_to_its_end_is_named(reached: int) -> None:
    """Asked to stop, a run leaves it where it is, and ends regularly: its own training is whole."""
    records = changed(TRAINING, drifts=[d for d in TRAINING.drifts if d.arm != "baseline" or d.step <= reached])
    records.drifts = [d for d in records.drifts if d.arm != "baseline" or d.method != "exact" or d.step == STEPS]
    records.run = msgspec.structs.replace(records.run, spec=records.run.spec | {"baseline": "seed"})
    told = [line for line in summarise(records).not_checked if "baseline" in line]
    expected = f"which was asked for, was not trained to the end ({reached} of {STEPS} steps)"
    assert (len(told), expected in "".join(told)) == ((0, False) if reached == STEPS else (1, True))
    blind = changed(TRAINING, drifts=[msgspec.structs.replace(d, drift=None) for d in TRAINING.drifts])
    assert any("could not be trusted" in line for line in summarise(blind).not_checked)


# -- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [GRADIENT, TRAINING, RESUMED], ids=["gradient", "training", "resumed"])
def test_json_is_json_and_the_order_of_records_does_not_matter(records: RunRecords) -> None:
    one = to_json(summarise(records))
    assert json.loads(json.dumps(one, allow_nan=False)) == one
    shuffled = msgspec.structs.replace(records)
    rng = random.Random(0)
    for name in ("steps", "mismatches", "controls", "gradients", "drifts"):
        setattr(shuffled, name, rng.sample(getattr(records, name), len(getattr(records, name))))
    other = to_json(summarise(shuffled))
    assert other["gradient_noise"] == one["gradient_noise"]
    assert other["drift"] == one["drift"]


def test_show_tells_the_parts() -> None:
    gradient, training = ("\n".join(lines(summarise(r))) for r in (GRADIENT, TRAINING))
    assert "WCNTS inf" in gradient
    assert f"of {STEPS} steps" in gradient
    assert "first divergence: step 12" in training
    assert "loss spikes of the suspect: 1, beginning at step 33" in training
    assert "gradient leaves" in gradient
    assert "per-rank partials" not in gradient + training
    assert "gradient leaves" not in training
