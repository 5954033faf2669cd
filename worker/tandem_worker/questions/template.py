"""The text that a question becomes. Pure.

::

    <context>                          (left out where empty, with the empty line)

    Question: <question>
    A. <first choice>                  (these lines only where letters are scored)
    B. <second choice>
    Answer:

It is followed by a space and the answer: the choice's text, or its letter. The model is trained on the answer's tokens
alone and scored by them.
"""

from __future__ import annotations

from string import ascii_uppercase
from typing import Literal

from tandem_worker.questions.tasks import Question

VERSION = 1
"""Part of the data's digest; changes with the text that a question becomes."""
LAST = "Answer:"
"""Last word of every prompt."""
Scoring = Literal["mean", "letter"]


def prompt(question: Question, scoring: Scoring) -> str:
    """The text before the answer."""
    lines = [question.context.strip(), ""] if question.context.strip() else []
    lines.append(f"Question: {question.question.strip()}")
    if scoring == "letter":
        lines += [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, question.choices, strict=False)]
    return "\n".join([*lines, LAST])


def answers(question: Question, scoring: Scoring) -> list[str]:
    """The texts that may follow the prompt, one a choice."""
    if scoring == "letter":
        return [f" {letter}" for letter in ascii_uppercase[: len(question.choices)]]
    return [f" {choice}" for choice in question.choices]
