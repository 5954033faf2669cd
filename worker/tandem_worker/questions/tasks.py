"""Multiple-choice questions from JSON Lines files, one file a task; every line is checked before a run starts.

A line is an object with ``id`` (text), ``context`` (text, may be empty), ``question`` (text), ``choices`` (two texts or
more) and ``answer`` (index into ``choices``, from 0). Other fields are ignored, and so are empty lines. A choice may be
empty or equal to another: published sets hold such.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.errors import DataError
from tandem_worker.files import read_file

LINE_LIMIT = 1 << 20
"""Bytes of a line at most."""
ID_LIMIT = 256
"""Characters of an id at most: it is part of a key in the database."""
CHOICES_LIMIT = 26
"""Choices of a question at most: each has a letter."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Question:
    """One question, as its line says."""

    task: str
    id: str
    context: str
    question: str
    choices: tuple[str, ...]
    answer: int
    where: str
    """``<file>:<line>``, for errors."""


@dataclass(frozen=True, slots=True)
class Task:
    """All questions of one file, in its order."""

    name: str
    """The file's name without its ending."""
    questions: tuple[Question, ...]
    digest: bytes
    """SHA-256 of the file."""


class _Line(msgspec.Struct):
    id: str
    context: str
    question: str
    choices: list[str]
    answer: int


def read_tasks(paths: Sequence[Path]) -> list[Task]:
    """Read the tasks, in the order given.

    Raises:
        DataError: no file, two of one name, or the first thing that is wrong in one, with file and line.
    """
    if not paths:
        raise DataError("fine-tuning needs questions: give JSON Lines files with --questions")
    tasks: list[Task] = []
    seen: dict[str, Path] = {}
    for path in paths:
        if path.stem in seen:
            raise DataError(f"{seen[path.stem]} and {path} are both task {path.stem!r}: give files of different names")
        if not path.stem.isprintable():
            raise DataError(f"{str(path)!r}: the name of a task must be printable: rename the file")
        seen[path.stem] = path
        tasks.append(_read_task(path))
    return tasks


def _read_task(path: Path) -> Task:
    content = read_file(path, what="JSON Lines file", binary=True)
    if content.startswith(UTF_16_MARKS):
        raise DataError(f"{path}:1: UTF-16, not UTF-8: save the file as UTF-8")
    questions: list[Question] = []
    lines: dict[str, int] = {}
    for number, line in _lines(path, content.removeprefix(BYTE_ORDER_MARK)):
        question = _question(path, number, line)
        if question.id in lines:
            raise DataError(
                f"{question.where}: id {question.id!r} is already that of line {lines[question.id]}: make ids unique"
            )
        lines[question.id] = number
        questions.append(question)
    if not questions:
        raise DataError(f"{path} holds no question: give a file with one a line")
    return Task(path.stem, tuple(questions), hashlib.sha256(content).digest())


def _lines(path: Path, content: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1."""
    stream = io.BytesIO(content)
    number = 0
    while line := stream.readline(LINE_LIMIT + 2):
        number += 1
        if len(line.rstrip(b"\r\n")) > LINE_LIMIT:
            raise DataError(
                f"{path}:{number}: longer than {LINE_LIMIT >> 20} MiB: give one question a line (JSON Lines, no array)"
            )
        if line := line.strip(b" \t\r\n"):
            yield number, line


def _question(path: Path, number: int, line: bytes) -> Question:
    """One line, checked."""
    where = f"{path}:{number}"
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: no UTF-8 (byte {error.start} of the line): save the file as UTF-8") from None
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.ValidationError as error:
        raise DataError(
            f"{where}: {error}: give id, context, question (text), choices (list of text), answer (index)"
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{where}: no JSON ({error}): give one object a line") from None
    if not 0 < len(read.id) <= ID_LIMIT or not read.id.isprintable():
        raise DataError(f"{where}: id must be 1 to {ID_LIMIT} printable characters")
    if not (read.question.strip() or read.context.strip()):
        raise DataError(f"{where}: question and context are both empty: give it a question")
    count = len(read.choices)
    if count < 2:
        raise DataError(f"{where}: {'1 choice' if count else 'no choices'}: a question needs two or more")
    if count > CHOICES_LIMIT:
        raise DataError(f"{where}: {count} choices: a question has {CHOICES_LIMIT} at most, a letter each")
    if not 0 <= read.answer < count:
        raise DataError(f"{where}: answer {read.answer} is out of range: {count} choices are numbered 0 to {count - 1}")
    return Question(path.stem, read.id, read.context, read.question, tuple(read.choices), read.answer, where)
