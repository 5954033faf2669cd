"""Questions as tokens: one prompt that all choices share, and the tokens of each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.errors import DataError
from tandem_worker.questions.tasks import Question
from tandem_worker.questions.template import LAST, Scoring, answers, prompt
from tandem_worker.tokenizer import Tokenizer

AT_ONCE = 256
"""Questions per call of the tokenizer."""
IGNORED = -1
"""Target of a position that is neither trained on nor scored."""

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One question as tokens."""

    question: Question
    prompt: Tokens
    """``[P]``, P >= 1: the tokenizer's beginning, and what is kept of the prompt."""
    choices: tuple[Tokens, ...]
    """``[C]`` each, C >= 1."""
    dropped: int
    """Tokens that the prompt lost at its left end."""

    def row(self, choice: int) -> tuple[Tokens, Tokens]:
        """Tokens and targets of the prompt with one choice, int32 ``[P + C - 1]`` each.

        The targets are the next tokens where those are the choice's, else `IGNORED`.
        """
        whole = np.concatenate([self.prompt, self.choices[choice]])
        targets = whole[1:].copy()
        targets[: len(self.prompt) - 1] = IGNORED
        return whole[:-1], targets


def encode(
    questions: Sequence[Question], tokenizer: Tokenizer, *, scoring: Scoring, sequence: int, vocab: int
) -> list[Encoded]:
    """Tokens of every question.

    The prompt is tokenised alone, each choice behind the prompt's last word, "Answer:", so that its first token is the
    one that stands after that word. A choice begins at the first token that is not this word's own; where letters are
    scored, at the first in which the letters differ, so that it is one token in every tokenizer that has the letters.
    A prompt that leaves no room for its longest choice loses tokens at its left end, the same for each choice; choices
    are never cut.

    Args:
        questions: of any tasks.
        tokenizer: gives the tokens.
        scoring: what follows the prompt: the choices' texts or letters.
        sequence: tokens per row.
        vocab: of the model; every token must be less.

    Raises:
        DataError: with file and line: a token that the model does not have, a choice without tokens, or one too long
            for a row.
    """
    return [
        _encoded(question, start, endings, tokenizer, scoring=scoring, sequence=sequence, vocab=vocab)
        for at in range(0, len(questions), AT_ONCE)
        for question, start, endings in _tokenised(questions[at : at + AT_ONCE], tokenizer, scoring)
    ]


def _tokenised(
    questions: Sequence[Question], tokenizer: Tokenizer, scoring: Scoring
) -> list[tuple[Question, Tokens, list[Tokens]]]:
    """Each question with the tokens of its prompt and of `LAST`, alone and with each choice."""
    prompts = [prompt(question, scoring) for question in questions]
    endings = [[LAST, *(LAST + answer for answer in answers(question, scoring))] for question in questions]
    distinct = list(dict.fromkeys(text for texts in endings for text in texts))
    ids = [np.asarray(tokens, np.int32) for tokens in tokenizer.encode([*prompts, *distinct])]
    ending = dict(zip(distinct, ids[len(prompts) :], strict=True))
    return [
        (question, tokens, [ending[text] for text in texts])
        for question, tokens, texts in zip(questions, ids[: len(prompts)], endings, strict=True)
    ]


def _encoded(
    question: Question,
    start: Tokens,
    endings: Sequence[Tokens],
    tokenizer: Tokenizer,
    *,
    scoring: Scoring,
    sequence: int,
    vocab: int,
) -> Encoded:
    alone, *wholes = endings
    shared = _common(wholes if scoring == "letter" else endings)
    choices = tuple(whole[shared:] for whole in wholes)
    # Tokens of the choice may begin in the last word, or after tokens that all choices share.
    before = np.concatenate([start[: max(0, len(start) + min(0, shared - len(alone)))], wholes[0][len(alone) : shared]])
    begin = np.asarray(tokenizer.begin, np.int32)
    if not len(before):
        raise DataError(f"{question.where}: the question has no tokens: give the model's own --tokenizer")
    if any(len(choice) == 0 for choice in choices):
        index = next(i for i, choice in enumerate(choices) if len(choice) == 0)
        raise DataError(f"{question.where}: choice {index} has no tokens of its own: give it another text")
    largest = max(int(part.max()) for part in (begin, before, *choices) if len(part))
    if largest >= vocab:
        raise DataError(
            f"{question.where}: token {largest} is outside the model's vocabulary of {vocab}: "
            "give the model's own --tokenizer"
        )
    longest = max(len(choice) for choice in choices)
    room = sequence + 1 - longest - len(begin)
    if room < 1:
        raise DataError(
            f"{question.where}: a choice of {longest} tokens leaves no room for the question in {sequence}: "
            "give a larger --sequence"
        )
    kept = before[max(0, len(before) - room) :]
    return Encoded(question, np.concatenate([begin, kept]), choices, len(before) - len(kept))


def _common(rows: Sequence[Tokens]) -> int:
    """Length of the longest beginning that all rows share."""
    length = min(len(row) for row in rows)
    table = np.stack([row[:length] for row in rows])
    differs = np.flatnonzero((table != table[0]).any(axis=0))
    return int(differs[0]) if differs.size else length
