"""Held-out questions as rows to score, and scores from the rows' log-likelihoods. No I/O.

Each choice is a row of its own: the prompt and the choice, whose tokens are the row's targets. All rows of a question
hold the same prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

import numpy as np
import numpy.typing as npt

from tandem.records import EvaluationRecord
from tandem.vocabulary import Arm
from tandem_worker.questions.encode import IGNORED, Encoded, Tokens
from tandem_worker.questions.training import PAD


@dataclass(frozen=True, slots=True)
class Scored:
    """One question with the score of each choice; fields as in `EvaluationRecord`."""

    task: str
    question: str
    scores: list[float]
    chosen: int
    answer: int

    def record(self, *, run_id: UUID, attempt: int, step: int, arm: Arm) -> EvaluationRecord:
        return EvaluationRecord(
            run_id=run_id, attempt=attempt, step=step, task=self.task, question=self.question, arm=arm.value,
            scores=self.scores, chosen=self.chosen, answer=self.answer,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Evaluation:
    """All held-out questions, in batches of one shape."""

    questions: tuple[Encoded, ...]
    rows: int
    sequence: int

    @cached_property
    def _places(self) -> list[tuple[Encoded, int]]:
        """Question and choice of each row, in order."""
        return [(encoded, choice) for encoded in self.questions for choice in range(len(encoded.choices))]

    @property
    def batches(self) -> int:
        """How many batches hold all rows."""
        return -(-len(self._places) // self.rows)

    def batch(self, number: int) -> tuple[Tokens, Tokens]:
        """Tokens and targets of one batch, int32 ``[rows, sequence]`` each.

        Targets are the choice's tokens where those come next, else -1; the last batch ends with rows of padding, whose
        targets are all -1.
        """
        tokens = np.full((self.rows, self.sequence), PAD, np.int32)
        targets = np.full((self.rows, self.sequence), IGNORED, np.int32)
        for row, (encoded, choice) in enumerate(self._places[number * self.rows : (number + 1) * self.rows]):
            mine, next_ = encoded.row(choice)
            tokens[row, : len(mine)] = mine
            targets[row, : len(mine)] = next_
        return tokens, targets

    def scored(self, loglikelihoods: Iterable[npt.NDArray[np.float32]]) -> list[Scored]:
        """The questions with their scores.

        Args:
            loglikelihoods: of each batch in order, ``[rows, sequence]``: of the target given all tokens before it;
                positions without target hold anything.

        Raises:
            ValueError: a batch is missing or has another shape: nothing is scored by halves.
        """
        means: list[float] = []
        count = 0
        for count, values in enumerate(loglikelihoods, 1):
            if count > self.batches or values.shape != (self.rows, self.sequence):
                raise ValueError(f"batch {count} of {self.batches} has shape {values.shape}")
            means += row_scores(values, self.batch(count - 1)[1])
        if count != self.batches:
            raise ValueError(f"{count} of {self.batches} batches")
        found: list[Scored] = []
        at = 0
        for encoded in self.questions:
            scores = means[at : at + len(encoded.choices)]
            at += len(encoded.choices)
            question = encoded.question
            found.append(Scored(question.task, question.id, scores, choose(scores), question.answer))
        return found


def row_scores(loglikelihoods: npt.NDArray[np.float32], targets: Tokens) -> list[float]:
    """Mean log-likelihood of the targets of each row, in fp64; NaN for a row without target.

    Args:
        loglikelihoods: ``[rows, sequence]``.
        targets: ``[rows, sequence]``; negative: ignored.

    The sum is exactly rounded, hence the same on every machine.
    """
    return [_mean(values[where]) for values, where in zip(loglikelihoods.astype(np.float64), targets >= 0, strict=True)]


def choose(scores: Sequence[float]) -> int:
    """Index of the largest score, the first of equals; -1 where none is a number."""
    numbers = [index for index, score in enumerate(scores) if not math.isnan(score)]
    return max(numbers, key=lambda index: (scores[index], -index), default=-1)


def _mean(values: npt.NDArray[np.float64]) -> float:
    if values.size == 0:
        return math.nan
    if not np.isfinite(values).all():
        with np.errstate(invalid="ignore"):  # the infinities cancel: not a number
            return float(values.sum()) / values.size
    return math.fsum(values.tolist()) / values.size
