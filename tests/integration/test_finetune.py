"""Fine-tuning (RQ3) in a whole pair: both sides answer the held-out questions after the same steps."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.chains import fused_logits, weights
from tests.finetune_table import check_json, check_page
from tests.pairs import Outcome, clean_end, profile, run_pair
from tests.quiz import write_quiz

from tandem.answers import results
from tandem.records import EvaluationRecord, RunRecords
from tandem.runs.summary import summarise
from tandem.runs.verdict import decide
from tandem.spec import ModelConfig, RunSpec, resolve
from tandem.vocabulary import Arm, Verdict
from tandem_worker.link import frames as f
from tandem_worker.questions.template import Scoring

STRONG = profile(
    {"kind": "scale", "factor": -3.0, "elements": 40, "phase": "bwd", "module": "ffn", "tensor": "dx", "steps": [2, 3]}
)
"""Forty gradient values of each rank and layer multiplied by -3, twice."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    paths = write_quiz(tmp_path_factory.mktemp("quiz"), per_task=15)[:2]
    return {
        "workload": "finetune", "questions": paths, "batch": 4, "sequence": 96, "steps": 6, "self_replays": 2,
        "replays": 2, "optimizer": {"learning_rate": 1e-2}, "held_out_percent": 30,
    }  # fmt: skip


@pytest.fixture(scope="module")
def healthy(settings: dict[str, Any]) -> Outcome:
    outcome = run_pair(RunSpec(evaluate_every=4, baseline="seed", **settings))
    clean_end(outcome)
    return outcome


@pytest.fixture(scope="module")
def corrupt(settings: dict[str, Any]) -> Outcome:
    outcome = run_pair(RunSpec(fault="x.toml", **settings), STRONG)
    clean_end(outcome)
    return outcome


def answers(records: RunRecords, arm: Arm, step: int) -> dict[tuple[str, str], EvaluationRecord]:
    return {(e.task, e.question): e for e in records.evaluations if (e.arm, e.step) == (arm, step)}


def test_a_healthy_pair_agrees_to_the_bit_on_every_question(healthy: Outcome) -> None:
    records = healthy.records
    assert decide(records).verdict is Verdict.MATCH, decide(records)
    for step in (4, 6):
        mine, theirs = (answers(records, arm, step) for arm in (Arm.REFERENCE, Arm.SUSPECT))
        assert mine
        assert {k: e.scores for k, e in mine.items()} == {k: e.scores for k, e in theirs.items()}
    assert answers(records, Arm.REFERENCE, 4) != answers(records, Arm.REFERENCE, 6)
    losses = [s.loss_reference for s in records.steps if s.step]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0]


def test_another_seed_on_the_reference_gives_the_comparison_its_measure(healthy: Outcome) -> None:
    records = healthy.records
    reseeded = answers(records, Arm.BASELINE, 6)
    assert set(reseeded) == set(answers(records, Arm.REFERENCE, 6))
    assert {e.scores[0] for e in reseeded.values()} != {
        e.scores[0] for e in answers(records, Arm.REFERENCE, 6).values()
    }
    table = {(line.arm, line.task): line for line in results(records.evaluations)}
    assert {arm for arm, _ in table} == set(Arm)
    for (arm, task), line in table.items():
        asked = [e for e in answers(records, Arm(arm), 6).values() if task in ("", e.task)]
        assert line.accuracy.share == pytest.approx(np.mean([e.chosen == e.answer for e in asked]))


def test_a_strong_fault_changes_the_answers_scores(corrupt: Outcome) -> None:
    records = corrupt.records
    assert decide(records).verdict is Verdict.MISMATCH
    mine, theirs = (answers(records, arm, 6) for arm in (Arm.REFERENCE, Arm.SUSPECT))
    assert set(mine) == set(theirs)
    assert any(mine[key].scores != theirs[key].scores for key in mine)
    assert "answers differed" in decide(records).sentence
    assert summarise(records).answers


def test_answers_are_a_finding_also_where_the_parameters_are_equal(healthy: Outcome) -> None:
    """The forward pass of the evaluation corrupted, nothing else: the scores alone tell."""
    records = msgspec.structs.replace(healthy.records)
    at = next(i for i, e in enumerate(records.evaluations) if e.arm == Arm.SUSPECT)
    wrong = msgspec.structs.replace(records.evaluations[at], scores=[0.0, *records.evaluations[at].scores[1:]])
    records.evaluations = [*records.evaluations[:at], wrong, *records.evaluations[at + 1 :]]
    assert decide(records).verdict is Verdict.MISMATCH


def test_the_table_is_that_of_the_stored_answers(healthy: Outcome, corrupt: Outcome) -> None:
    for records, steps in ((healthy.records, (4, 6)), (corrupt.records, (6,))):
        check_json(records, steps)
        check_page(records, 6)


@pytest.mark.parametrize(("scoring", "packed"), [("mean", True), ("letter", False)])
def test_scores_are_those_of_the_raw_parameters(settings: dict[str, Any], scoring: Scoring, packed: bool) -> None:
    """By a model written apart, from the question files and the parameters that training left on each side."""
    questions = settings["questions"][:1]  # two of these fit into a row, one with its letters
    own = {"steps": 3, "questions": questions, "scoring": scoring, "packed": packed}
    spec = RunSpec(fault="x.toml", compute="float32", **settings | own)
    outcome = run_pair(spec, STRONG)
    clean_end(outcome)
    model, _ = resolve(spec)
    lines = [json.loads(line) | {"task": path.stem} for path in questions for line in path.read_text().splitlines()]
    for arm, side in ((Arm.REFERENCE, outcome.reference), (Arm.SUSPECT, outcome.suspect)):
        params = weights(model, spec.tp, side.machine.slots)
        held_out = answers(outcome.records, arm, 3)
        assert 0 < len(held_out) < len(lines)
        for line in (x for x in lines if (x["task"], x["id"]) in held_out):
            row = held_out[line["task"], line["id"]]
            expected = [score(model, params, line, number, scoring) for number in range(len(line["choices"]))]
            np.testing.assert_allclose(row.scores, expected, rtol=0, atol=5e-5)
            assert row.answer == line["answer"]
            assert row.chosen == int(np.argmax(row.scores))
    both = [answers(outcome.records, arm, 3) for arm in (Arm.REFERENCE, Arm.SUSPECT)]
    apart = max(abs(np.subtract(both[0][key].scores, both[1][key].scores)).max() for key in both[0])
    assert apart > 2e-4, "else one side's parameters would do for the other"
    learnt = {"".join(parts(x, x["answer"], scoring)) for x in lines if (x["task"], x["id"]) not in both[0]}
    rows = [row for step in (1, 2, 3) for row in trained_texts(outcome, step)]
    pairs = {one[:-1] + other for one in learnt for other in learnt}  # an answer's last token is a target only
    assert all(row in learnt | pairs for row in rows)
    assert packed == any(row in pairs for row in rows)


def trained_texts(outcome: Outcome, step: int) -> list[str]:
    """What each row of a step's batch says, up to the last character that is learnt."""
    tokens, targets = outcome.reference.prepared.data.batch(step)
    ends = [int(np.flatnonzero(row >= 0)[-1]) for row in targets]
    return [
        bytes(row[: end + 1].astype(np.uint8)).decode() + chr(int(target[end]))
        for row, target, end in zip(tokens, targets, ends, strict=True)
    ]


def parts(line: dict[str, Any], choice: int, scoring: Scoring) -> tuple[str, str]:
    """What is given, and what is learnt and scored: the choice with its space, or the letter alone."""
    context = f"{line['context']}\n\n" if line["context"] else ""
    named = [f"{'ABCD'[i]}. {c}\n" for i, c in enumerate(line["choices"])] if scoring == "letter" else []
    prompt = f"{context}Question: {line['question']}\n{''.join(named)}Answer:"
    return (f"{prompt} ", "ABCD"[choice]) if scoring == "letter" else (prompt, f" {line['choices'][choice]}")


def score(model: ModelConfig, params: dict[str, np.ndarray], line: dict[str, Any], choice: int, how: Scoring) -> float:
    """Mean log-likelihood of the answer's bytes after the prompt."""
    prompt, answer = (part.encode() for part in parts(line, choice, how))
    tokens = np.frombuffer(prompt + answer, np.uint8).astype(np.int32)
    logits = np.asarray(fused_logits(model, params, tokens[None, :-1])[0], np.float64)
    likely = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(likely[np.arange(len(prompt) - 1, len(tokens) - 1), tokens[len(prompt) :]].mean())


@pytest.mark.parametrize("arm", [Arm.REFERENCE, Arm.SUSPECT])
def test_a_run_whose_answers_are_missing_never_matches(healthy: Outcome, arm: Arm) -> None:
    records = msgspec.structs.replace(healthy.records)
    records.evaluations = [e for e in records.evaluations if e.arm != arm]
    closing = records.closings[0]
    records.closings = [msgspec.structs.replace(closing, evaluations=len(records.evaluations))]
    assert (decide(records).verdict, decide(records).reason) == (Verdict.INCONCLUSIVE, "answers_missing")


@pytest.mark.parametrize(
    "wrong",
    [
        f.Answers(step=6, first=1, scores=[[0.0] * 4]),
        f.Answers(step=6, first=0, scores=[[0.0] * 4] * 500),
        f.Answers(step=6, first=0, scores=[]),
    ],
    ids=["not from the first", "too many", "none"],
)
def test_answers_that_were_not_asked_for_end_the_pair(settings: dict[str, Any], wrong: f.Answers) -> None:
    def tamper(_: Any, suspect: Any) -> None:
        suspect.answered = lambda *_: suspect.channel.send(wrong)

    outcome = run_pair(RunSpec(**settings), tamper=tamper)
    assert outcome.reason == "protocol"
    assert decide(outcome.records).verdict is Verdict.INCONCLUSIVE
