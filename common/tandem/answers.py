"""Accuracy and disagreement of fine-tuned arms on held-out questions, from the stored evaluations. Pure, numpy only.

The paper's table (RQ3, fine-tuning): per task the accuracy of each arm, and its *disagreement* with the reference: the
share of questions for which it chose another answer. Both arms answer the same questions, so that their difference in
accuracy is a paired one: only *discordant* questions count, which one of the two answers rightly.

Questions are taken as a sample of independent ones. The intervals say how far other questions of the same kind could
move a number; they say nothing of other seeds or runs, which is what the baseline is for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.records import EvaluationRecord
from tandem.statistics.bounds import CONFIDENCE, beta_cdf, interval
from tandem.vocabulary import Arm

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Share:
    """A count among questions, as a share with its interval."""

    found: int
    of: int
    share: float | None
    """None for no questions."""
    interval: Interval
    """Clopper-Pearson, Wilson for very large counts (`tandem.statistics.bounds.interval`); (0, 1) for no questions."""


@dataclass(frozen=True, slots=True)
class Against:
    """An arm beside the reference, on the questions that both answered."""

    disagreement: Share
    """Questions with another choice than the reference's."""
    only_arm: int
    """Questions that the arm alone answered rightly."""
    only_reference: int
    """Questions that the reference alone answered rightly."""
    difference: float | None
    """Accuracy of the arm minus that of the reference; None for no questions."""
    difference_interval: Interval
    """`paired_interval`."""
    p_value: float
    """`mcnemar`, two-sided: how likely such a difference is if neither arm is the better one."""
    equal_scores: int
    """Questions whose scores are equal to the last bit."""
    missing: int
    """Questions that only one of the two answered: they are compared nowhere."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm on one task, or on all."""

    task: str
    """Empty: all tasks together, each question counting once."""
    arm: Arm
    accuracy: Share
    unanswered: int
    """Questions without a score that is a number: no choice, hence wrong."""
    against: Against | None
    """None for the reference, and where the reference answered nothing."""


def steps_evaluated(evaluations: Iterable[EvaluationRecord]) -> list[int]:
    """Steps after which the reference answered questions, rising."""
    return sorted({e.step for e in evaluations if e.arm == Arm.REFERENCE})


def results(
    evaluations: Sequence[EvaluationRecord], step: int | None = None, confidence: float = CONFIDENCE
) -> list[ArmResult]:
    """The fine-tuning table after one step.

    Args:
        evaluations: of one run; of a question that several attempts answered after that step the last counts.
        step: None: the last after which the reference answered.
        confidence: of all intervals, two-sided.

    Returns:
        For each task by name, then for all together (task ``""``), the arms that answered, reference first. Empty if
        the reference answered nothing and no step was given.
    """
    if step is None:
        if not (steps := steps_evaluated(evaluations)):
            return []
        step = steps[-1]
    arms: dict[Arm, dict[tuple[str, str], EvaluationRecord]] = {arm: {} for arm in Arm}
    for record in sorted((e for e in evaluations if e.step == step), key=lambda e: e.attempt):
        arms[Arm(record.arm)][record.task, record.question] = record
    tasks = sorted({task for answered in arms.values() for task, _ in answered})
    return [
        _result(task, arm, mine, reference, confidence)
        for task in (*tasks, "")
        for reference in [_of(arms[Arm.REFERENCE], task)]
        for arm in Arm
        if (mine := _of(arms[arm], task))
    ]


def mcnemar(one: int, other: int) -> float:
    """Exact two-sided p-value of McNemar's test: of ``one + other`` discordant questions each side wins half.

    ``min(1, 2 P(X <= min(one, other)))`` for X ~ Binomial(one + other, 1/2) (Q. McNemar, Psychometrika 12, 1947, in the
    exact form: A. Agresti, Categorical Data Analysis, section 11.1). 1 for no discordant question.
    """
    trials, least = one + other, min(one, other)
    if least * 2 >= trials:
        return 1.0
    # P(X <= k) = I_{1/2}(n - k, k + 1)
    return min(1.0, 2 * beta_cdf(trials - least, least + 1, 0.5))


def paired_interval(gained: int, lost: int, questions: int, confidence: float = CONFIDENCE) -> Interval:
    """Interval of a difference of two accuracies on the same questions: ``(gained - lost) / questions``.

    The percentile interval of the paired bootstrap over questions (B. Efron, Annals of Statistics 7, 1979), computed
    exactly: the distribution that infinitely many resamples would have, hence without random numbers. A resampled
    question is gained, lost or neither; the distribution of the sum of ``questions`` such draws is the inverse Fourier
    transform of the power of one draw's. Half a question is added to each of the four cells of the table (both right,
    gained, lost, both wrong) before, as A. Agresti and Y. Min propose (Statistics in Medicine 24, 2005), since a plain
    bootstrap takes what was not seen for impossible.

    Args:
        gained: questions that only the arm answered rightly.
        lost: questions that only the reference answered rightly.
        questions: all that both answered; 0 gives (-1, 1).
        confidence: two-sided; each side keeps half of the rest.

    Raises:
        ValueError: the counts make no sense.
    """
    if min(gained, lost) < 0 or gained + lost > questions:
        raise ValueError(f"gained {gained}, lost {lost} of {questions} questions")
    if questions == 0:
        return -1.0, 1.0
    total = questions + 2
    up, down = (gained + 0.5) / total, (lost + 0.5) / total
    cumulative = np.cumsum(_sum_of_draws(up, down, questions))
    tail = (1 - confidence) / 2
    low = int(np.searchsorted(cumulative, tail * cumulative[-1])) - questions
    high = int(np.searchsorted(cumulative, (1 - tail) * cumulative[-1])) - questions
    return low / questions, min(high, questions) / questions


def _sum_of_draws(up: float, down: float, draws: int) -> npt.NDArray[np.float64]:
    """Probabilities of the sums ``-draws ... draws`` of draws of +1 (``up``), -1 (``down``) and 0."""
    size = 2 * draws + 1
    turn = np.exp(-2j * np.pi * np.arange(size) / size)
    one = up * turn + down / turn + (1 - up - down)
    return np.maximum(np.roll(np.fft.ifft(one**draws).real, draws), 0.0)


def _of(answered: dict[tuple[str, str], EvaluationRecord], task: str) -> dict[tuple[str, str], EvaluationRecord]:
    return {key: record for key, record in answered.items() if task in ("", key[0])}


def _result(
    task: str,
    arm: Arm,
    mine: dict[tuple[str, str], EvaluationRecord],
    reference: dict[tuple[str, str], EvaluationRecord],
    confidence: float,
) -> ArmResult:
    return ArmResult(
        task=task,
        arm=arm,
        accuracy=_share(sum(r.chosen == r.answer for r in mine.values()), len(mine), confidence),
        unanswered=sum(r.chosen < 0 for r in mine.values()),
        against=_against(mine, reference, confidence) if arm is not Arm.REFERENCE and reference else None,
    )


def _against(
    mine: dict[tuple[str, str], EvaluationRecord],
    reference: dict[tuple[str, str], EvaluationRecord],
    confidence: float,
) -> Against:
    pairs = [(mine[key], reference[key]) for key in mine.keys() & reference.keys()]
    gained = sum(a.chosen == a.answer and r.chosen != r.answer for a, r in pairs)
    lost = sum(a.chosen != a.answer and r.chosen == r.answer for a, r in pairs)
    return Against(
        disagreement=_share(sum(a.chosen != r.chosen for a, r in pairs), len(pairs), confidence),
        only_arm=gained,
        only_reference=lost,
        difference=(gained - lost) / len(pairs) if pairs else None,
        difference_interval=paired_interval(gained, lost, len(pairs), confidence),
        p_value=mcnemar(gained, lost),
        equal_scores=sum(_bits(a.scores) == _bits(r.scores) for a, r in pairs),
        missing=len(mine.keys() ^ reference.keys()),
    )


def _share(found: int, of: int, confidence: float) -> Share:
    return Share(found, of, found / of if of else None, interval(found, of, confidence))


def _bits(scores: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(scores)}d", *scores)
