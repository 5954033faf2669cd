"""What a task file may hold, and how questions are held out: by their ids alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiz import quiz, write_quiz
from tandem.errors import DataError
from tandem_worker import files
from tandem_worker.questions.split import is_held_out, split
from tandem_worker.questions.tasks import ID_LIMIT, LINE_LIMIT, Question, Task, read_tasks
from tiny_tokenizers import write_task

GOOD: dict[str, Any] = {
    "id": "a-1", "context": "", "question": "What is 1 plus 1?", "choices": ["1", "2"], "answer": 1,
}  # fmt: skip


def changed(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in (GOOD | fields).items() if value is not ...}


def refusal(*paths: Path) -> str:
    with pytest.raises(DataError) as error:
        read_tasks(paths)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_quiz_is_read_as_it_was_written(tmp_path: Path) -> None:
    tasks = read_tasks(write_quiz(tmp_path))
    written = quiz()
    assert [task.name for task in tasks] == list(written)
    for task in tasks:
        rows = [
            {"id": q.id, "context": q.context, "question": q.question, "choices": list(q.choices), "answer": q.answer}
            for q in task.questions
        ]
        assert rows == written[task.name]
        assert len({q.id for q in task.questions}) == len(rows) >= 50
        assert {q.answer for q in task.questions} == {0, 1, 2, 3}, "the place of the answer tells nothing"
        assert all(len(set(q.choices)) == 4 for q in task.questions)
    assert tasks[0].questions[3].where == f"{tmp_path / 'sums.jsonl'}:4"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *[(changed(**{name: ...}), f"missing required field `{name}`") for name in GOOD],
        (changed(id=7), "got `int` - at `$.id`"),
        (changed(question=None), "got `null` - at `$.question`"),
        (changed(choices="ab"), "got `str` - at `$.choices`"),
        (changed(choices=["a", 1]), "got `int` - at `$.choices[1]`"),
        (changed(answer="1"), "got `str` - at `$.answer`"),
        (changed(answer=True), "got `bool` - at `$.answer`"),
        (changed(answer=0.5), "got `float` - at `$.answer`"),
        (changed(answer=2), "answer 2 is out of range: 2 choices are numbered 0 to 1"),
        (changed(answer=-1), "answer -1 is out of range"),
        (changed(answer=10**30), "out of range"),
        (changed(choices=["a"], answer=0), "1 choice: a question needs two or more"),
        (changed(choices=[], answer=0), "no choices"),
        (changed(choices=["x"] * 27), "27 choices"),
        (changed(id=""), "id must be 1 to 256 printable characters"),
        (changed(id="x" * (ID_LIMIT + 1)), "id must be"),
        (changed(id="a\0b"), "id must be"),
        (changed(id="a\nb"), "id must be"),
        (changed(question=" ", context="\n"), "question and context are both empty"),
        (GOOD, "id 'a-1' is already that of line 1"),
        ([GOOD], "Expected `object`, got `array`"),
        (b"{", "no JSON"),
        (b'{"id": "a", }', "no JSON"),
        (b"[" * 100_000, "got `array`"),
        (b'{"id": ' + b"[" * 100_000, "got `array`"),
        (b'{"x": ' + b"[" * 100_000, "no JSON"),
        (b'{"id": "\\ud800"}', "no JSON"),
        (b"plain text", "no JSON"),
        ('{"id": "é"}'.encode("latin-1"), "no UTF-8 (byte 8 of the line)"),
        (b'{"id": "' + b"x" * LINE_LIMIT, "longer than 1 MiB"),
        (b" " * 10 + b"y" * (3 * LINE_LIMIT), "longer than 1 MiB"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, line: Any, words: str) -> None:
    path = write_task(tmp_path / "quiz.jsonl", [GOOD, b"", line, changed(id="a-9")])
    message = refusal(path)
    assert message.startswith(f"{path}:3: ")
    assert words in message


def test_other_encodings_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    for encoding in ("utf-16", "utf-16-be"):
        path.write_text(json.dumps(GOOD), encoding=encoding)
        assert f"{path}:1: " in refusal(path)
    path.write_text(json.dumps(GOOD), encoding="utf-16")
    assert "UTF-16, not UTF-8" in refusal(path)
    path.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert read_tasks([path])[0].questions[0].id == "a-1"


def test_files_that_hold_no_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--questions" in refusal()
    assert "is missing" in refusal(tmp_path / "none.jsonl")
    assert "is a directory" in refusal(tmp_path)
    (tmp_path / "a.jsonl").touch()
    assert "a.jsonl is empty" in refusal(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("\n \r\n\n")
    assert "b.jsonl holds no question" in refusal(tmp_path / "b.jsonl")
    monkeypatch.setattr(files, "SIZE_LIMIT", 10)
    assert "larger than" in refusal(write_task(tmp_path / "c.jsonl", [GOOD]))


def test_two_files_of_one_task(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, two = (write_task(folder / "quiz.jsonl", [GOOD]) for folder in (tmp_path, tmp_path / "other"))
    assert "are both task 'quiz'" in refusal(one, two)
    assert "are both task 'quiz'" in refusal(one, one)
    assert "printable" in refusal(write_task(tmp_path / "a\nb.jsonl", [GOOD]))


def test_what_published_sets_hold_is_read(tmp_path: Path) -> None:
    """Windows line ends, other fields, empty and equal choices, an empty question with a context."""
    lines: list[object] = [
        json.dumps(changed(source="x", choices=["", "2"])).encode() + b"\r",
        changed(id="a-2", choices=["1", "1"]),
        changed(id="a-3", question="", context="It rains, so the street is"),
    ]
    [task] = read_tasks([write_task(tmp_path / "quiz.jsonl", lines)])
    assert [q.choices for q in task.questions] == [("", "2"), ("1", "1"), ("1", "2")]


ids = st.text(min_size=1, max_size=40)


@given(ids, st.integers(1, 90), st.integers(1, 90))
def test_a_greater_share_holds_out_all_that_a_smaller_one_does(id_: str, one: int, other: int) -> None:
    assert is_held_out(id_, min(one, other)) <= is_held_out(id_, max(one, other))


@pytest.mark.parametrize("percent", [1, 20, 50, 90])
def test_the_share_is_about_what_it_says(percent: int) -> None:
    found = sum(is_held_out(f"mathqa-{n}", percent) for n in range(20_000)) / 200
    assert abs(found - percent) < 4 * (percent * (100 - percent) / 20_000) ** 0.5


def test_the_split_is_pinned() -> None:
    """It is part of a run's meaning: another rule would train on what older runs held out."""
    assert [n for n in range(20) if is_held_out(f"sums-{n}", 20)] == [3, 8, 13, 18]


def _task(name: str, names: list[str]) -> Task:
    return Task(name, tuple(Question(name, n, "", "q", ("a", "b"), 0, "f:1") for n in names), b"")


@given(st.permutations([f"q{n}" for n in range(30)]), st.integers(0, 29))
def test_order_and_other_questions_change_nothing(order: list[str], kept: int) -> None:
    part = order[:kept]
    training, held_out = split([_task("t", [*order, "extra"])], 30)
    assert {q.id for q in training} | {q.id for q in held_out} == {*order, "extra"}
    assert {q.id for q in held_out} == {n for n in [*order, "extra"] if is_held_out(n, 30)}
    assert {n for n in part if is_held_out(n, 30)} == {q.id for q in held_out} & set(part)


def test_each_task_needs_both_parts() -> None:
    names = [f"sums-{n}" for n in range(60)]
    out = [n for n in names if is_held_out(n, 20)]
    rest = [n for n in names if not is_held_out(n, 20)]
    full = _task("full", names)
    with pytest.raises(DataError, match=r"^bare: none of its \d+ questions is held out at 20 %"):
        split([full, _task("bare", rest)], 20)
    with pytest.raises(DataError, match=r"^bare: each of its \d+ questions is held out at 20 %"):
        split([full, _task("bare", out)], 20)
    assert len(split([full, _task("other", [out[0], rest[0]])], 20)[1]) == len(out) + 1
