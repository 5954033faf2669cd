"""The fine-tuning table: counts against plain loops, intervals and tests against scipy and resampling."""

from __future__ import annotations

import math
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, multinomial

from tandem.answers import ArmResult, mcnemar, paired_interval, results, steps_evaluated
from tandem.records import EvaluationRecord
from tandem.statistics.bounds import interval
from tandem.vocabulary import Arm

RUN = UUID(int=7)


def record(
    arm: str, question: str, chosen: int, *, answer: int = 0, task: str = "t", step: int = 30, attempt: int = 1,
    scores: list[float] | None = None,
) -> EvaluationRecord:  # fmt: skip
    return EvaluationRecord(
        run_id=RUN, attempt=attempt, step=step, task=task, question=question, arm=arm,
        scores=scores if scores is not None else [float(i == chosen) for i in range(4)], chosen=chosen, answer=answer,
    )  # fmt: skip


def find(table: list[ArmResult], arm: Arm, task: str = "") -> ArmResult:
    [result] = [row for row in table if (row.task, row.arm) == (task, arm)]
    return result


chosen = st.integers(-1, 3)
answered = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), chosen, chosen, st.none() | chosen),
    min_size=1, max_size=60,
)  # fmt: skip


@given(answered)
def test_counts_are_those_of_plain_loops(rows: list[tuple[str, int, int, int, int | None]]) -> None:
    records = []
    for number, (task, answer, reference, suspect, baseline) in enumerate(rows):
        arms = {"reference": reference, "suspect": suspect, "baseline": baseline}
        records += [record(arm, str(number), c, answer=answer, task=task) for arm, c in arms.items() if c is not None]
    table = results(records)
    for task in ["", *sorted({row[0] for row in rows})]:
        mine = [row for row in rows if task in ("", row[0])]
        reference = find(table, Arm.REFERENCE, task)
        assert (reference.accuracy.found, reference.accuracy.of) == (sum(r[1] == r[2] for r in mine), len(mine))
        assert reference.unanswered == sum(r[2] == -1 for r in mine)
        assert reference.against is None
        for arm, column in ((Arm.SUSPECT, 3), (Arm.BASELINE, 4)):
            here = [(r[1], r[2], r[column]) for r in mine if r[column] is not None]
            if not here:
                assert not [row for row in table if (row.task, row.arm) == (task, arm)]
                continue
            result = find(table, arm, task)
            right = sum(answer == c for answer, _, c in here)
            assert result.accuracy.share == right / len(here)
            assert result.accuracy.interval == interval(right, len(here))
            against = result.against
            assert against is not None
            other = sum(r != c for _, r, c in here)
            assert (against.disagreement.found, against.disagreement.of) == (other, len(here))
            assert against.disagreement.interval == interval(other, len(here))
            assert against.missing == len(mine) - len(here)
            gained = sum(answer == c != r for answer, r, c in here)
            lost = sum(answer == r != c for answer, r, c in here)
            assert (against.only_arm, against.only_reference) == (gained, lost)
            assert against.difference == pytest.approx(right / len(here) - sum(a == r for a, r, _ in here) / len(here))
            assert against.p_value == mcnemar(gained, lost)
            assert against.difference_interval == paired_interval(gained, lost, len(here))
    assert [row.task for row in table] == sorted((row.task for row in table), key=lambda task: (task == "", task))


def test_equal_scores_are_equal_bits() -> None:
    def against(mine: list[float], theirs: list[float]) -> int:
        table = results([record("reference", "q", 0, scores=theirs), record("suspect", "q", 0, scores=mine)])
        result = find(table, Arm.SUSPECT).against
        assert result is not None
        assert result.disagreement.found == 0
        return result.equal_scores

    assert against([-1.0, -2.0], [-1.0, -2.0]) == 1
    assert against([math.nan, -2.0], [math.nan, -2.0]) == 1
    assert against([-1.0, np.nextafter(-2.0, 0)], [-1.0, -2.0]) == 0
    assert against([-0.0], [0.0]) == 0
    assert against([-1.0], [-1.0, -2.0]) == 0


def test_the_last_step_and_the_last_attempt_count() -> None:
    records = [
        record("reference", "q", 0, step=10), record("suspect", "q", 1, step=10),
        record("reference", "q", 1, attempt=2), record("suspect", "q", 1, attempt=2),
        record("reference", "q", 0), record("suspect", "q", 0),
        record("suspect", "q", 0, step=40),
    ]  # fmt: skip
    assert steps_evaluated(records) == [10, 30]
    assert find(results(records), Arm.REFERENCE).accuracy.found == 0, "attempt 2 answered last"
    early = results(records, 10)
    assert find(early, Arm.REFERENCE).accuracy.found == 1
    assert find(early, Arm.SUSPECT).accuracy.found == 0
    assert find(results(records, 40), Arm.SUSPECT).against is None, "nothing to compare with is no agreement"
    assert results([]) == results(records[-1:]) == []


def test_arms_without_a_common_question_are_compared_nowhere() -> None:
    table = results([record("reference", "q1", 0), record("suspect", "q2", 0)])
    against = find(table, Arm.SUSPECT).against
    assert against is not None
    assert (against.missing, against.disagreement.of, against.disagreement.share) == (2, 0, None)
    assert (against.difference, against.difference_interval, against.p_value) == (None, (-1.0, 1.0), 1.0)
    assert against.disagreement.interval == (0.0, 1.0)


def test_a_wrecked_suspect_disagrees_wholly() -> None:
    """As node 6 in the paper: accuracy 0, disagreement 100 %."""
    records = [record(arm, str(n), c) for n in range(200) for arm, c in (("reference", 0), ("suspect", -1))]
    result = find(results(records), Arm.SUSPECT)
    assert result.against is not None
    assert (result.accuracy.share, result.against.disagreement.share, result.unanswered) == (0.0, 1.0, 200)
    assert result.against.difference == -1.0
    assert result.against.difference_interval[0] == -1.0
    assert result.against.p_value < 1e-50


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_the_exact_binomial_test(one: int, other: int) -> None:
    expected = binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar(one, other) == pytest.approx(expected, rel=1e-7, abs=1e-300)
    assert mcnemar(one, other) == mcnemar(other, one)


counts = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 300))


@given(counts)
def test_the_paired_interval_holds_its_difference_and_turns_with_its_sides(cells: tuple[int, int, int]) -> None:
    gained, lost, rest = cells
    questions = gained + lost + rest
    low, high = paired_interval(gained, lost, questions)
    assert -1 <= low <= high <= 1
    if questions:
        assert low <= (gained - lost) / questions <= high
        assert low < high, "no count of questions proves equality"
        back = paired_interval(lost, gained, questions)
        # the least value that reaches a tail; the other way round it is the next one at most
        assert back == pytest.approx((-high, -low), abs=1.01 / questions)


@settings(max_examples=25)
@given(counts.filter(lambda cells: sum(cells) > 0), st.sampled_from([0.8, 0.95]))
def test_the_paired_interval_is_the_limit_of_a_bootstrap(cells: tuple[int, int, int], confidence: float) -> None:
    """Against 40,000 resamples by numpy: the shares beyond the ends are what the confidence leaves."""
    gained, lost, rest = cells
    n = sum(cells)
    low, high = paired_interval(gained, lost, n, confidence)
    p = np.array([gained + 0.5, lost + 0.5, rest + 1]) / (n + 2)
    draws = np.random.default_rng(5).multinomial(n, p, size=40_000)
    sums = draws[:, 0] - draws[:, 1]
    tail, slack = (1 - confidence) / 2, 0.008
    assert (sums < round(low * n)).mean() <= tail + slack
    assert (sums <= round(low * n)).mean() >= tail - slack
    assert (sums > round(high * n)).mean() <= tail + slack
    assert (sums >= round(high * n)).mean() >= tail - slack


@pytest.mark.parametrize(("gained", "lost", "n"), [(900, 1100, 12_000), (300, 50, 3000)])
def test_the_paired_interval_of_many_is_agresti_and_mins(gained: int, lost: int, n: int) -> None:
    total, difference = n + 2, (gained - lost) / (n + 2)
    half = 1.959964 * math.sqrt((gained + lost + 1) / total - difference**2) / math.sqrt(total)
    assert paired_interval(gained, lost, n) == pytest.approx((difference - half, difference + half), abs=1.5 / n)


@pytest.mark.parametrize(("up", "down"), [(0.02, 0.02), (0.1, 0.2), (0.3, 0.05)])
def test_the_paired_interval_covers_as_often_as_it_says(up: float, down: float) -> None:
    """Exactly, over all outcomes of 50 questions."""
    n, covered = 50, 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            weight = multinomial.pmf([gained, lost, n - gained - lost], n, [up, down, 1 - up - down])
            if weight > 1e-6:
                low, high = paired_interval(gained, lost, n)
                covered += weight * (low <= up - down <= high)
    assert covered >= 0.93


def test_senseless_counts_are_refused() -> None:
    for gained, lost, questions in ((-1, 0, 5), (3, 3, 5)):
        with pytest.raises(ValueError, match="of 5 questions"):
            paired_interval(gained, lost, questions)
