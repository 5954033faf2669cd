"""Everything that fine-tuning reads, from the files that a spec names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_worker.questions import template
from tandem_worker.questions.encode import Encoded, encode
from tandem_worker.questions.evaluation import Evaluation
from tandem_worker.questions.split import split
from tandem_worker.questions.tasks import Task, read_tasks
from tandem_worker.questions.template import Scoring
from tandem_worker.questions.training import QuestionStream
from tandem_worker.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class Questions:
    """The two parts of the tasks' questions."""

    training: QuestionStream
    evaluation: Evaluation
    truncated: int
    """Questions, of both parts, whose prompt lost tokens."""


def open_questions(
    paths: Sequence[Path],
    tokenizer: Path | None,
    *,
    seed: int,
    batch: int,
    sequence: int,
    vocab: int,
    held_out_percent: int,
    scoring: Scoring,
    packed: bool,
) -> Questions:
    """Read the questions of a run; all that can be wrong with them is found here.

    Args:
        paths: JSON Lines files, one a task.
        tokenizer: a ``tokenizer.json`` or SentencePiece model; none: each byte is a token.
        seed: of the run; orders the training.
        batch: rows per step, and per batch of the evaluation.
        sequence: tokens per row.
        vocab: of the model; every token must be less.
        held_out_percent: share of each task that is evaluated and never trained on, 1 to 90.
        scoring: by the choices' texts or letters.
        packed: several questions a row.

    Raises:
        DataError: one line with the file and, where there is one, the line.
    """
    opened = open_tokenizer(tokenizer)
    tasks = read_tasks(paths)
    parts = split(tasks, held_out_percent)
    training, held_out = (
        tuple(encode(part, opened, scoring=scoring, sequence=sequence, vocab=vocab)) for part in parts
    )
    digest = _digest(tasks, opened, f"{template.VERSION}/{held_out_percent}/{scoring}/{sequence}/{packed}")
    truncated = sum(encoded.dropped > 0 for encoded in (*training, *held_out))
    description = _description(tasks, training, held_out, opened, truncated, sequence)
    stream = QuestionStream(training, seed, batch, sequence, packed, digest, description)
    return Questions(stream, Evaluation(held_out, batch, sequence), truncated)


def _digest(tasks: Sequence[Task], tokenizer: Tokenizer, settings: str) -> str:
    digest = hashlib.sha256(f"questions/{settings}/".encode())
    for task in tasks:
        digest.update(hashlib.sha256(task.name.encode()).digest() + task.digest)
    digest.update(b"tokenizer" + tokenizer.digest)
    return digest.hexdigest()


def _description(
    tasks: Sequence[Task],
    training: Sequence[Encoded],
    held_out: Sequence[Encoded],
    tokenizer: Tokenizer,
    truncated: int,
    sequence: int,
) -> str:
    names = ", ".join(task.name for task in tasks[:6]) + (", ..." if len(tasks) > 6 else "")
    cut = f", {truncated:,} cut to {sequence:,} tokens" if truncated else ""
    return f"{names}: {len(training):,} questions to train on, {len(held_out):,} held out, {tokenizer.name}{cut}"
