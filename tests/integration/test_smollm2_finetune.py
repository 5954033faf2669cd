"""Fine-tuning a real model: SmolLM2-135M, two worker processes, PostgreSQL, a verdict, answers to every question.

All runs have one shape and one optimizer, so that they share their compiled programs; the fault is one of the state,
which needs no program of its own.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.quiz import TASKS, write_quiz

from real_inputs import smollm2_dir, task_files
from tandem.answers import results
from tandem.progress import ProgressEvent
from tandem.records import EvaluationRecord, RunRecords
from tandem.runs.summary import summarise
from tandem.spec import RunSpec
from tandem.supervisor import Local, run_local
from tandem.vocabulary import Arm, Cause, ControlName, Kind, Role, Verdict
from tandem_worker.questions.opened import Questions, open_questions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STATE = 3 * 4 * 134_515_008
"""Bytes of the parameters and two moments, fp32."""
BESIDE = 5 << 29
"""Bytes of a worker beside the states that it holds: programs, the step's own needs, Python."""
STEPS, EPOCH = 24, 8
"""Each question is trained on three times."""
HELD_OUT, OF_REAL_TASKS = 30, 20
"""Percent."""
SHAPE: dict[str, Any] = {
    "workload": "finetune", "tp": 1, "batch": 2, "sequence": 48, "compute": "float32", "self_replays": 2, "replays": 1,
    "optimizer": {"learning_rate": 1e-4, "warmup_steps": 2, "schedule": "constant"},
}  # fmt: skip
FAULT = """
name = "signs of the norms' weights, 64 of 576 each"
[[fault]]
level = "state"
kind = "flip"
bits = [31]
elements = 64
phase = "fwd"
module = ["attn", "ffn"]
tensor = "out"
input = "norm"
steps = [2, 3]
"""


@dataclass
class Watch:
    """Largest resident size of each worker so far, bytes."""

    peak: dict[Role, int] = field(default_factory=dict)
    _workers: dict[Role, int] = field(default_factory=dict)

    def started(self, _: UUID, workers: dict[Role, int]) -> None:
        self._workers = workers

    def look(self, _: ProgressEvent) -> None:
        for role, pid in self._workers.items():
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:  # it has ended
                continue
            found = (1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
            self.peak[role] = max(self.peak.get(role, 0), *found, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    weights = smollm2_dir(tmp_path_factory.mktemp("model"))
    return {"weights": weights, "tokenizer": weights / "tokenizer.json"}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """16 to train on, 8 held out."""
    return write_quiz(tmp_path_factory.mktemp("quiz"), per_task=4)


def finetune(url: str, **spec: Any) -> RunRecords:
    """A run to its end; no worker may have held more states than it says.

    Where a step runs ahead, because there is memory enough, that is three. Else two, and one more in a replay: two
    workers, PostgreSQL and this process then fit into 16 GB.
    """
    watch = Watch()
    records = run_local(
        RunSpec(**SHAPE, **spec), Local(url=url, on_started=watch.started, on_progress=watch.look)
    )  # fmt: skip
    assert set(watch.peak) == set(Role)
    (row,) = [c for c in records.controls if c.name is ControlName.RUN_AHEAD]
    assert row.detail["state_bytes"] == STATE
    states = 2 + int(row.detail["steps"]) + bool(records.mismatches)
    print(f"largest workers {watch.peak}, {row.detail}")  # noqa: T201
    assert max(watch.peak.values()) < states * STATE + BESIDE, watch.peak
    return records


def answers(records: RunRecords, arm: Arm) -> dict[tuple[str, str], EvaluationRecord]:
    return {(e.task, e.question): e for e in records.evaluations if e.arm == arm}


def losses(records: RunRecords) -> list[tuple[float, float]]:
    found = [(s.loss_reference, s.loss_suspect) for s in records.steps if s.step]
    assert all(mine is not None and theirs is not None for mine, theirs in found)
    return found  # type: ignore[return-value]


def equal_to_the_bit(records: RunRecords) -> None:
    """Both sides' losses and answers, and what the table says of them."""
    assert records.run.verdict == Verdict.MATCH, records.run.sentence
    assert all(mine == theirs for mine, theirs in losses(records))
    mine, theirs = (answers(records, arm) for arm in (Arm.REFERENCE, Arm.SUSPECT))
    assert {key: e.scores for key, e in mine.items()} == {key: e.scores for key, e in theirs.items()}
    (whole,) = [r for r in results(records.evaluations) if r.arm is Arm.SUSPECT and not r.task]
    assert whole.against is not None
    assert (whole.against.equal_scores, whole.against.disagreement.found) == (len(mine), 0)


def test_a_null_pair_learns_our_questions_and_agrees_to_the_bit_on_every_one(
    model: dict[str, Any], questions: list[Path], database_url: str
) -> None:
    records = finetune(
        database_url, kind=Kind.NULL, questions=questions, steps=STEPS, held_out_percent=HELD_OUT, **model
    )  # fmt: skip
    equal_to_the_bit(records)
    assert {task for task, _ in answers(records, Arm.REFERENCE)} == set(TASKS)
    course = [mine for mine, _ in losses(records)]
    assert len(course) == STEPS == 3 * EPOCH
    first, last = statistics.fmean(course[:EPOCH]), statistics.fmean(course[-EPOCH:])
    print(f"losses {course}")  # noqa: T201
    assert last < 0.6 * first, course


def test_a_strong_fault_moves_the_answers(
    model: dict[str, Any], questions: list[Path], database_url: str, tmp_path: Path
) -> None:
    fault = tmp_path / "fault.toml"
    fault.write_text(FAULT)
    records = finetune(
        database_url, fault=fault, questions=questions, steps=4, held_out_percent=HELD_OUT, **model
    )  # fmt: skip
    assert records.run.verdict == Verdict.MISMATCH, records.run.sentence
    assert "answers differed" in (records.run.sentence or "")
    assert records.run.synthetic
    assert {m.step for m in records.mismatches} == {2}
    assert Cause.STATE in {m.cause for m in records.mismatches}
    apart = [mine != theirs for mine, theirs in losses(records)]
    assert apart == [False, True, True, True]
    mine, theirs = (answers(records, arm) for arm in (Arm.REFERENCE, Arm.SUSPECT))
    assert set(mine) == set(theirs)
    assert all(mine[key].scores != theirs[key].scores for key in mine)
    table = {(r.task, r.arm): r for r in summarise(records).answers[4]}
    whole = table["", Arm.SUSPECT].against
    assert whole is not None
    assert (whole.equal_scores, whole.missing) == (0, 0)
    chosen = sum(mine[key].chosen != theirs[key].chosen for key in mine)
    assert whole.disagreement.found == chosen > 0
    drift = [d for d in records.drifts if (d.step, d.part, d.method) == (4, "", "exact")]
    assert len(drift) == 1


def test_six_real_tasks_at_once(model: dict[str, Any], database_url: str, tmp_path: Path) -> None:
    """Some lines of each: they are all trained on, all asked about, and a healthy pair agrees on each."""
    tasks = [some_lines(file, tmp_path) for file in task_files()]
    names = {path.stem for path in tasks}
    records = finetune(
        database_url, kind=Kind.NULL, questions=tasks, steps=6, held_out_percent=OF_REAL_TASKS, **model
    )  # fmt: skip
    equal_to_the_bit(records)
    both = open_again(tasks, model["tokenizer"])
    (data,) = [c.detail for c in records.controls if (c.name, c.subject) == (ControlName.PARITY, "data")]
    assert data["reference"] == data["suspect"] == both.training.digest
    held_out = {(q.question.task, q.question.id) for q in both.evaluation.questions}
    assert set(answers(records, Arm.REFERENCE)) == held_out
    assert {task for task, _ in held_out} == names
    assert trained(both, steps=6) == names
    assert {line.task for line in results(records.evaluations)} == {*names, ""}


def some_lines(file: Path, folder: Path) -> Path:
    """The first questions of a real task whose choices are short, in a file of the same name."""
    lines = file.read_text(encoding="utf-8").splitlines()
    short = [line for line in lines if max(map(len, json.loads(line)["choices"])) <= 80]
    (folder / file.name).write_text("\n".join(short[:14]) + "\n", encoding="utf-8")
    return folder / file.name


def open_again(tasks: list[Path], tokenizer: Path) -> Questions:
    return open_questions(
        tasks, tokenizer, seed=0, batch=SHAPE["batch"], sequence=SHAPE["sequence"], vocab=49152,
        held_out_percent=OF_REAL_TASKS, scoring="mean", packed=False,
    )  # fmt: skip


def trained(questions: Questions, steps: int) -> set[str]:
    """Tasks of the rows of the first steps, by their tokens."""
    stream = questions.training
    task = {encoded.row(encoded.question.answer)[0].tobytes(): encoded.question.task for encoded in stream.questions}
    rows = [row for step in range(1, steps + 1) for row in stream.batch(step)[0]]
    return {name for row in rows for text, name in task.items() if row.tobytes().startswith(text)}
