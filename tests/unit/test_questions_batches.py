"""Questions as rows: only answers are trained on and scored, and batches follow from (contents, seed, step) alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiz import write_quiz
from tandem.errors import DataError
from tandem.records import EvaluationRecord
from tandem.vocabulary import Arm
from tandem_worker.questions.encode import Encoded, encode
from tandem_worker.questions.evaluation import Evaluation, choose, row_scores
from tandem_worker.questions.opened import Questions, open_questions
from tandem_worker.questions.split import is_held_out
from tandem_worker.questions.tasks import Question
from tandem_worker.questions.template import Scoring, answers, prompt
from tandem_worker.questions.training import QuestionStream, pack
from tandem_worker.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from tiny_tokenizers import byte_level_json, sentencepiece_model, write_task

QUESTION = Question("t", "t-1", "It rains.", "What is wet?", ("the street", "the", "", "the"), 0, "t.jsonl:1")
SCORINGS: list[Scoring] = ["mean", "letter"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiz")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[Path]:
    return write_quiz(folder)


@pytest.fixture(scope="module", params=["bytes", "json", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Path | None:
    makers = {"json": byte_level_json, "sentencepiece": sentencepiece_model}
    return makers[request.param](folder) if request.param in makers else None


def opened(tasks: list[Path], tokenizer: Path | None = None, **changes: Any) -> Questions:
    options: dict[str, Any] = {
        "seed": 1, "batch": 3, "sequence": 256, "vocab": 400, "held_out_percent": 20, "scoring": "mean",
        "packed": False,
    }  # fmt: skip
    return open_questions(tasks, tokenizer, **(options | changes))


def one(
    tokenizer: Tokenizer, *, scoring: Scoring = "mean", sequence: int = 256, question: Question = QUESTION
) -> Encoded:
    return encode([question], tokenizer, scoring=scoring, sequence=sequence, vocab=400)[0]


def test_the_text_of_a_question() -> None:
    """Pinned: the digest's version must change with it."""
    assert prompt(QUESTION, "mean") == "It rains.\n\nQuestion: What is wet?\nAnswer:"
    assert answers(QUESTION, "mean") == [" the street", " the", " ", " the"]
    assert (
        prompt(replace(QUESTION, context=" "), "letter")
        == "Question: What is wet?\nA. the street\nB. the\nC. \nD. the\nAnswer:"
    )
    assert answers(QUESTION, "letter") == [" A", " B", " C", " D"]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_prompt_and_choice_together_are_the_text_as_one(tokenizer: Path | None, scoring: Scoring) -> None:
    """Tokenised apart, the parts are what the tokenizer makes of the whole text."""
    it = open_tokenizer(tokenizer)
    encoded = one(it, scoring=scoring)
    for choice, answer in zip(encoded.choices, answers(QUESTION, scoring), strict=True):
        whole = [*it.begin, *it.encode([prompt(QUESTION, scoring) + answer])[0]]
        assert [*encoded.prompt, *choice] == whole
    if scoring == "letter":
        assert [len(choice) for choice in encoded.choices] == [1, 1, 1, 1]
        assert len({int(choice[0]) for choice in encoded.choices}) == 4


@pytest.mark.parametrize("scoring", SCORINGS)
def test_targets_are_the_answers_next_tokens_and_nothing_else(tokenizer: Path | None, scoring: Scoring) -> None:
    encoded = one(open_tokenizer(tokenizer), scoring=scoring)
    for index, choice in enumerate(encoded.choices):
        tokens, targets = encoded.row(index)
        assert tokens.dtype == targets.dtype == np.int32
        np.testing.assert_array_equal([*tokens, choice[-1]], [*encoded.prompt, *choice])
        np.testing.assert_array_equal(targets[targets >= 0], choice)
        where = np.flatnonzero(targets >= 0)
        np.testing.assert_array_equal(where, np.arange(len(tokens) - len(choice), len(tokens)))
        np.testing.assert_array_equal(targets[where[:-1]], tokens[where[:-1] + 1])


@given(sequence=st.integers(1, 80))
def test_a_long_prompt_is_cut_at_its_left_and_choices_never(sequence: int) -> None:
    longest = len(" the street")
    if sequence < longest:
        with pytest.raises(DataError, match=r"^t.jsonl:1: a choice of 11 tokens leaves no room .* --sequence"):
            one(ByteTokenizer(), sequence=sequence)
        return
    encoded = one(ByteTokenizer(), sequence=sequence)
    text = prompt(QUESTION, "mean").encode()
    assert bytes(encoded.prompt.tolist()) == text[encoded.dropped :]
    assert [bytes(c.tolist()).decode() for c in encoded.choices] == answers(QUESTION, "mean")
    assert len(encoded.row(0)[0]) == min(sequence, len(text) + longest - 1)
    assert (encoded.dropped == 0) == (len(text) + longest - 1 <= sequence)


def test_a_cut_prompt_keeps_the_tokenizers_beginning(folder: Path) -> None:
    it = open_tokenizer(sentencepiece_model(folder))
    whole, cut = one(it), one(it, sequence=24)
    assert cut.dropped > 0
    assert whole.prompt[0] == cut.prompt[0] == 1
    np.testing.assert_array_equal(cut.prompt[1:], whole.prompt[1 + cut.dropped :])


class Merging(ByteTokenizer):
    """Makes one token of the colon and what follows, as no common tokenizer does."""

    def encode(self, texts: Any) -> list[list[int]]:
        return [list(text.replace(": t", "\x01").encode()) for text in texts]


class Deaf(ByteTokenizer):
    def encode(self, texts: Any) -> list[list[int]]:
        return [[] for _ in texts]


class Stripping(ByteTokenizer):
    def encode(self, texts: Any) -> list[list[int]]:
        return [list(text.strip().encode()) for text in texts]


def test_a_token_across_the_border_belongs_to_the_choice() -> None:
    encoded = one(Merging(), question=replace(QUESTION, choices=("the street", "a dog")))
    assert bytes(encoded.prompt.tolist()).endswith(b"\nAnswer")
    assert [bytes(choice.tolist()) for choice in encoded.choices] == [b"\x01he street", b": a dog"]


def test_texts_that_the_tokenizer_cannot_tell_are_refused() -> None:
    with pytest.raises(DataError, match=r"^t.jsonl:1: the question has no tokens"):
        one(Deaf())
    with pytest.raises(DataError, match=r"^t.jsonl:1: choice 2 has no tokens of its own"):
        one(Stripping())


def test_tokens_outside_the_vocabulary(tasks: list[Path], folder: Path) -> None:
    for tokenizer in (None, byte_level_json(folder), sentencepiece_model(folder)):
        with pytest.raises(
            DataError, match=r"jsonl:\d+: token \d+ is outside the model's vocabulary of 50: .*--tokenizer"
        ):
            opened(tasks, tokenizer, vocab=50)


def segments(stream: QuestionStream, rows: int) -> list[bytes]:
    """Targets of the answers in the first rows, one entry a question, sorted."""
    found = []
    for step in range(rows // stream.rows):
        for targets in stream.batch(step)[1]:
            inside = np.concatenate([[False], targets >= 0, [False]])
            edges = np.flatnonzero(inside[1:] != inside[:-1])
            found += [targets[a:b].tobytes() for a, b in edges.reshape(-1, 2)]
    return sorted(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_each_epoch_trains_on_each_question_once(
    tasks: list[Path], tokenizer: Path | None, packed: bool, scoring: Scoring
) -> None:
    stream = replace(opened(tasks, tokenizer, packed=packed, scoring=scoring).training, rows=1)
    expected = sorted(q.choices[q.question.answer].tobytes() for q in stream.questions)
    assert segments(stream, stream.epoch) == expected
    assert segments(stream, 2 * stream.epoch) == sorted(expected * 2)
    assert stream.epoch < len(expected) if packed else stream.epoch == len(expected)


def test_nothing_held_out_is_ever_trained_on(tasks: list[Path]) -> None:
    both = opened(tasks)
    trained, held_out = ([q.question for q in part] for part in (both.training.questions, both.evaluation.questions))
    assert len(trained) + len(held_out) == 360
    assert {q.task for q in trained} == {q.task for q in held_out} == {path.stem for path in tasks}
    assert all(is_held_out(q.id, 20) for q in held_out)
    assert not any(is_held_out(q.id, 20) for q in trained)


@pytest.mark.parametrize("packed", [False, True])
def test_batches_are_a_function_of_seed_and_step(tasks: list[Path], packed: bool) -> None:
    """Whatever was asked for before: a resumed run goes on with the batches that it would have had."""
    stream, again = opened(tasks, packed=packed).training, opened(tasks, packed=packed).training
    steps = [stream.batch(step) for step in range(250)]
    for step in (249, 3, 120):
        for mine, theirs in zip(again.batch(step), steps[step], strict=True):
            assert mine.dtype == np.int32
            assert mine.shape == (3, 256)
            assert mine.flags.c_contiguous
            np.testing.assert_array_equal(mine, theirs)
    other = opened(tasks, packed=packed, seed=2).training
    np.testing.assert_array_equal(other.batch(7)[0], stream.reseeded(2).batch(7)[0])
    assert any(not np.array_equal(other.batch(step)[0], stream.batch(step)[0]) for step in range(3))
    assert other.digest == stream.digest


def test_each_epoch_has_its_own_order(tasks: list[Path]) -> None:
    stream = replace(opened(tasks).training, rows=1)
    first, second = ([stream.batch(e * stream.epoch + s)[0].tobytes() for s in range(stream.epoch)] for e in (0, 1))
    assert sorted(first) == sorted(second)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 20


def test_the_order_is_pinned(tasks: list[Path]) -> None:
    """The rule is part of a run's meaning: changing it changes every run that is repeated."""
    stream = opened(tasks).training
    rows = [bytes(row[: np.flatnonzero(row)[-1] + 1].tolist()).decode() for row in stream.batch(1)[0]]
    assert rows == PINNED


PINNED = [
    "Question: What is the opposite of win?\nAnswer: los",
    "Question: What is the opposite of dry?\nAnswer: we",
    "Question: Which of these is a fruit?\nAnswer: mang",
]


def test_the_order_of_lines_and_files_changes_no_batch(tasks: list[Path], tmp_path: Path) -> None:
    other = [write_task(tmp_path / path.name, path.read_bytes().splitlines()[::-1]) for path in tasks[::-1]]
    for packed in (False, True):
        mine, theirs = (opened(paths, packed=packed).training for paths in (tasks, other))
        for step in range(20):
            np.testing.assert_array_equal(mine.batch(step)[0], theirs.batch(step)[0])
        assert mine.digest != theirs.digest, "the files are others nonetheless"


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_packing_loses_nothing_and_overfills_nothing(lengths: list[int]) -> None:
    rows = pack(range(len(lengths)), lengths, 16)
    assert [index for row in rows for index in row] == list(range(len(lengths)))
    used = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < total <= 16 for total in used)
    assert all(total + lengths[row[0]] > 16 for total, row in zip(used, rows[1:], strict=False)), (
        "closed only when full"
    )


def test_digest_and_description_follow_what_is_learnt(tasks: list[Path], folder: Path, tmp_path: Path) -> None:
    renamed = write_task(tmp_path / "other.jsonl", [tasks[0].read_bytes()])
    variants = [
        opened(tasks), opened(tasks[:1]), opened(tasks[1:2]), opened([renamed]), opened(tasks, scoring="letter"),
        opened(tasks, packed=True), opened(tasks, held_out_percent=30), opened(tasks, sequence=128),
        opened(tasks, byte_level_json(folder)), opened(tasks, sentencepiece_model(folder)),
    ]  # fmt: skip
    assert len({it.training.digest for it in variants}) == len(variants)
    assert opened(tasks, seed=9, batch=5).training.digest == opened(tasks).training.digest
    assert len(opened(tasks).training.digest) == 64
    description = opened(tasks, sequence=40).training.description
    assert "sums, largest, opposites, kinds, letters, owners: " in description
    assert "held out, bytes, " in description
    assert f"{opened(tasks, sequence=40).truncated} cut to 40 tokens" in description
    assert "cut" not in opened(tasks).training.description


@pytest.mark.parametrize("scoring", SCORINGS)
def test_every_choice_is_a_row_and_scores_come_back_to_it(
    tasks: list[Path], tokenizer: Path | None, scoring: Scoring
) -> None:
    """Scores recomputed by another way: from the sums of a made-up log-likelihood of each token."""
    evaluation = replace(opened(tasks, tokenizer, scoring=scoring).evaluation, rows=7)
    assert evaluation.batches == -(-sum(len(q.choices) for q in evaluation.questions) // 7)
    batches = [evaluation.batch(number) for number in range(evaluation.batches)]
    rows = np.concatenate([targets for _, targets in batches])
    assert {tokens.shape for tokens, _ in batches} == {(7, 256)}
    values = [np.where(targets >= 0, -0.25 * (targets % 7) - 1, np.nan).astype(np.float32) for _, targets in batches]
    scored = evaluation.scored(values)
    at = 0
    for encoded, result in zip(evaluation.questions, scored, strict=True):
        assert (result.task, result.question) == (encoded.question.task, encoded.question.id)
        assert result.answer == encoded.question.answer
        for choice, score in zip(encoded.choices, result.scores, strict=True):
            np.testing.assert_array_equal(rows[at][rows[at] >= 0], choice)
            assert score == pytest.approx(float(np.mean(-0.25 * (choice % 7) - 1)), rel=1e-12)
            at += 1
        assert result.scores[result.chosen] == max(result.scores)
    assert (rows[at:] == -1).all(), "rows of padding have no target"


def test_nothing_is_scored_by_halves(tasks: list[Path]) -> None:
    evaluation = opened(tasks[:1]).evaluation
    good = [np.zeros((3, 256), np.float32)] * evaluation.batches
    for bad in (good[:-1], [*good, good[0]], [*good[:-1], good[0][:2]], []):
        with pytest.raises(ValueError, match="batch"):
            evaluation.scored(bad)


def test_a_scored_question_becomes_a_record(tasks: list[Path]) -> None:
    evaluation: Evaluation = opened(tasks[:1]).evaluation
    values = [np.full((3, 256), np.nan, np.float32)] * evaluation.batches
    scored = evaluation.scored(values)[0]
    record = scored.record(run_id=UUID(int=1), attempt=2, step=30, arm=Arm.SUSPECT)
    assert isinstance(record, EvaluationRecord)
    assert (record.run_id, record.attempt, record.step, record.arm) == (UUID(int=1), 2, 30, "suspect")
    assert (record.task, record.question, record.answer) == ("sums", scored.question, scored.answer)
    assert record.chosen == -1, "no score is a number"
    assert all(math.isnan(score) for score in record.scores)


@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_a_rows_score_is_the_exact_mean(values: list[float]) -> None:
    table = np.array([[*values, 7.0]], np.float32)
    targets = np.array([[5] * len(values) + [-1]], np.int32)
    [score] = row_scores(table, targets)
    if all(math.isfinite(value) for value in values):
        assert score == math.fsum(values) / len(values)
    elif any(math.isnan(value) for value in values) or {math.inf, -math.inf} <= set(values):
        assert math.isnan(score)
    else:
        assert score in (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ([-1.0, -0.5, -0.5], 1),
        ([math.nan, -3.0], 1),
        ([-3.0, math.nan], 0),
        ([math.nan, math.nan], -1),
        ([], -1),
        ([-math.inf, -math.inf], 0),
        ([-math.inf, -1e300], 1),
        ([0.0, -0.0], 0),
    ],
)
def test_the_chosen_is_the_first_of_the_largest(scores: list[float], chosen: int) -> None:
    assert choose(scores) == chosen
