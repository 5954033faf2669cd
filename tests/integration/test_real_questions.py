"""Real tokenizers and real task files: SmolLM2's, Mistral 7B v0.3's, and the files in ``TANDEM_MCQA_DIR``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from quiz import write_quiz
from real_inputs import mistral_tokenizer, smollm2_dir, task_files
from tandem.errors import DataError
from tandem_worker.questions.encode import Encoded, encode
from tandem_worker.questions.opened import Questions, open_questions
from tandem_worker.questions.tasks import Question, read_tasks
from tandem_worker.questions.template import Scoring, answers, prompt
from tandem_worker.tokenizer import check_tokenizer, open_tokenizer

VOCABULARY = {"smollm2": 49152, "mistral": 32768}


@pytest.fixture(scope="module", params=["smollm2", "mistral"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A tokenizer's file and its model's vocabulary."""
    if request.param == "mistral":
        return mistral_tokenizer(), VOCABULARY["mistral"]
    return smollm2_dir(tmp_path_factory.mktemp("real")) / "tokenizer.json", VOCABULARY["smollm2"]


def whole_texts_agree(questions: list[Question], path: Path, vocab: int, scoring: Scoring) -> None:
    """Parts tokenised apart are the whole text's tokens, and letters are one token each."""
    it = open_tokenizer(path)
    encoded = encode(questions, it, scoring=scoring, sequence=4096, vocab=vocab)
    for question, mine in zip(questions, encoded, strict=True):
        texts = [prompt(question, scoring) + answer for answer in answers(question, scoring)]
        for choice, whole in zip(mine.choices, it.encode(texts), strict=True):
            np.testing.assert_array_equal([*mine.prompt, *choice], [*it.begin, *whole], err_msg=question.where)
        assert mine.dropped == 0
        assert scoring == "mean" or {len(choice) for choice in mine.choices} == {1}


@pytest.mark.parametrize("scoring", ["mean", "letter"])
def test_our_questions_in_a_real_models_tokens(tmp_path: Path, real: tuple[Path, int], scoring: Scoring) -> None:
    path, vocab = real
    tasks = read_tasks(write_quiz(tmp_path))
    whole_texts_agree([q for task in tasks for q in task.questions], path, vocab, scoring)


def test_mistrals_texts_begin_with_its_token_and_need_its_vocabulary(tmp_path: Path) -> None:
    path = mistral_tokenizer()
    it = open_tokenizer(path)
    assert it.begin == (1,)
    with pytest.raises(DataError, match="outside the model's vocabulary of 256: give the model's own --tokenizer"):
        open_questions(
            write_quiz(tmp_path), path, seed=0, batch=2, sequence=64, vocab=256, held_out_percent=20, scoring="mean",
            packed=False,
        )  # fmt: skip


def test_a_real_tokenizer_fits_its_own_weights_only(real: tuple[Path, int]) -> None:
    path, vocab = real
    check_tokenizer(path, vocab, None)
    other = sum(VOCABULARY.values()) - vocab
    with pytest.raises(DataError, match=f"has {vocab:,} tokens, the weights have {other:,}"):
        check_tokenizer(path, other, None)


@pytest.mark.slow
@pytest.mark.parametrize("scoring", ["mean", "letter"])
def test_real_task_files(real: tuple[Path, int], scoring: Scoring) -> None:
    """All are read, all fit; the split is about what it says; few prompts are cut; parts agree with whole texts."""
    files = task_files()
    path, vocab = real
    tasks = read_tasks(files)
    questions = {(q.task, q.id) for task in tasks for q in task.questions}
    assert len(questions) == sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    both = open_questions(
        files, path, seed=0, batch=8, sequence=512, vocab=vocab, held_out_percent=20, scoring=scoring, packed=True
    )
    trained, held_out = (
        {(q.question.task, q.question.id) for q in part}
        for part in (both.training.questions, both.evaluation.questions)
    )
    assert trained | held_out == questions
    assert not trained & held_out
    assert abs(len(held_out) / len(questions) - 0.2) < 0.02
    assert both.truncated < len(questions) / 100
    assert both.training.epoch < len(trained) / 2, "packing saves rows"
    for task in tasks:
        whole_texts_agree(list(task.questions[:50]), path, vocab, scoring)


def test_each_real_task_alone_is_split_and_read_as_among_the_others(tmp_path: Path) -> None:
    """The first lines of each, as bytes: a task's questions do not depend on what else is trained on."""
    tasks = [tmp_path / file.name for file in task_files()]
    for file, task in zip(task_files(), tasks, strict=True):
        task.write_text("\n".join(file.read_text(encoding="utf-8").splitlines()[:40]) + "\n", encoding="utf-8")

    def opened(files: list[Path]) -> Questions:
        return open_questions(
            files, None, seed=3, batch=2, sequence=512, vocab=256, held_out_percent=20, scoring="mean", packed=False,
        )  # fmt: skip

    def texts(questions: Iterable[Encoded], task: str) -> dict[str, list[bytes]]:
        mine = [q for q in questions if q.question.task == task]
        return {q.question.id: [part.tobytes() for part in (q.prompt, *q.choices)] for q in mine}

    together = opened(tasks)
    assert {q.question.task for q in together.evaluation.questions} == {task.stem for task in tasks}
    for task in tasks:
        alone = opened([task])
        for mine, among in ((alone.training, together.training), (alone.evaluation, together.evaluation)):
            assert {q.question.task for q in mine.questions} == {task.stem}
            assert texts(mine.questions, task.stem) == texts(among.questions, task.stem)
        assert alone.training.digest != together.training.digest
        tokens, targets = alone.training.batch(1)
        assert tokens.shape == targets.shape == (2, 512)
        assert (targets >= 0).any(axis=1).all()
