"""Batches of questions to train on, a pure function of (seed, step): the same after a restart. No I/O.

A row holds one question, padded at its right end; or, packed, as many questions as fit, one after another. Packed
questions are no separate texts: positions run on, and causal attention lets each see those before it in its row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tandem_worker.questions.encode import IGNORED, Encoded, Tokens

PAD = 0
"""Token of padding: it comes after all that counts, and causal attention never looks at it from there."""


@dataclass(frozen=True, eq=False)
class QuestionStream:
    """Questions in rows, and the rule that makes batches of them; used like a `TokenStream`.

    The seed orders the questions (for packing) by ``blake2b(seed, task, id)``, and the rows of epoch ``e`` by
    ``blake2b(seed, e, row)``. Step ``t`` takes places ``t * rows ... (t + 1) * rows - 1`` of the epochs joined: each
    question comes once an epoch.
    """

    questions: tuple[Encoded, ...]
    seed: int
    rows: int
    sequence: int
    packed: bool
    digest: str
    """SHA-256 (hex) of the contents, of the tokenizer and of the settings that decide what is learnt; part of parity.
    The seed is not in it."""
    description: str
    """One line for people: the tasks, how many questions, their tokens."""
    _bins: tuple[tuple[int, ...], ...] = ()
    """Indices of the questions of each row."""

    def __post_init__(self) -> None:
        lengths = [len(q.prompt) + len(q.choices[q.question.answer]) - 1 for q in self.questions]
        order = sorted(range(len(lengths)), key=lambda i: _key(self.seed, self.questions[i]))
        bins = pack(order, lengths, self.sequence) if self.packed else [(i,) for i in order]
        object.__setattr__(self, "_bins", tuple(bins))

    def reseeded(self, seed: int) -> QuestionStream:
        """The same questions in the order of another seed (``--baseline seed``)."""
        return replace(self, seed=seed)

    @property
    def epoch(self) -> int:
        """Rows after which every question was trained on once."""
        return len(self._bins)

    def batch(self, step: int) -> tuple[Tokens, Tokens]:
        """Tokens and targets of one step, int32 ``[rows, sequence]`` each.

        Targets are next tokens where those belong to an answer, else -1.
        """
        tokens = np.full((self.rows, self.sequence), PAD, np.int32)
        targets = np.full((self.rows, self.sequence), IGNORED, np.int32)
        for row in range(self.rows):
            epoch, place = divmod(step * self.rows + row, self.epoch)
            at = 0
            for index in self._bins[_order(self.seed, epoch, self.epoch)[place]]:
                encoded = self.questions[index]
                mine, next_ = encoded.row(encoded.question.answer)
                tokens[row, at : at + len(mine)] = mine
                targets[row, at : at + len(mine)] = next_
                at += len(mine)
        return tokens, targets


def pack(order: Sequence[int], lengths: Sequence[int], sequence: int) -> list[tuple[int, ...]]:
    """Fill rows of ``sequence`` in the order given; one that the next question does not fit into is closed.

    Args:
        order: indices into ``lengths``, each once.
        lengths: tokens of each question, 1 to ``sequence``.
        sequence: tokens of a row.
    """
    bins: list[list[int]] = []
    free = 0
    for index in order:
        if lengths[index] > free:
            bins.append([])
            free = sequence
        bins[-1].append(index)
        free -= lengths[index]
    return [tuple(row) for row in bins]


def _key(seed: int, encoded: Encoded) -> bytes:
    question = encoded.question
    return hashlib.blake2b(f"{seed}/{question.task}/{question.id}".encode(), digest_size=16).digest()


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """Order of the rows in one epoch."""
    keys = [hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=16).digest() for row in range(count)]
    return np.array(sorted(range(count), key=keys.__getitem__), np.int64)
