"""Later attempts of a training: they go on from what the ones before them saved, to the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.pairs import Outcome, clean_end, profile, run_pair

from tandem.errors import CheckpointError, LinkError
from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.vocabulary import Arm, ControlName, Role, Verdict
from tandem_worker.drift.saved import read_saved
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.session.suspect import SuspectSession

SPEC = RunSpec(
    workload="training", steps=6, checkpoint_every=2, checkpoints="/", fault="x.toml", self_replays=2, replays=2
)
RECIPE = profile({
    "kind": "flip", "bits": [14], "elements": 1, "phase": "fwd", "module": "ffn", "layers": [1], "tensor": "out",
    "ranks": [0], "steps": [3], "repeat": "once",
})  # fmt: skip
"""The sides train apart from step 3 on: each must go on from its own checkpoint."""


def final_digests(outcome: Outcome) -> tuple[bytes, bytes]:
    """Of every output of the last step, on both sides."""
    sides = (outcome.reference, outcome.suspect)
    return tuple(side.last.run.lanes.tobytes() for side in sides)  # type: ignore[attr-defined,return-value]


def losses(outcome: Outcome) -> dict[int, tuple[float | None, float | None]]:
    return {s.step: (s.loss_reference, s.loss_suspect) for s in outcome.records.steps if s.step}


def attempt(folder: Path, number: int, run: UUID, **more: Any) -> Outcome:
    """An attempt of one and the same spec."""
    spec = SPEC.model_copy(update={"checkpoints": folder, **more.pop("spec", {})})
    return run_pair(spec, RECIPE, run=run, attempt=number, **more)


def cut_off_in(step: int) -> Callable[[ReferenceSession, SuspectSession], None]:
    """The reference ends in the middle of a step."""

    def tamper(reference: ReferenceSession, _: SuspectSession) -> None:
        load = reference.load

        def changed(number: int) -> None:
            if number == step:
                raise LinkError("evicted", "its node is drained")
            load(number)

        reference.load = changed  # type: ignore[method-assign]

    return tamper


def test_the_next_attempt_goes_on_from_what_the_one_before_it_saved(tmp_path: Path) -> None:
    """Nobody asks it to resume: a controller that tries again says no more than the attempt's number."""
    run = uuid4()
    first = attempt(tmp_path / "parts", 1, run, tamper=cut_off_in(6))
    assert first.reason == "evicted"
    second = attempt(tmp_path / "parts", 2, run)
    clean_end(second)
    assert [s.step for s in second.records.steps] == [0, 5, 6]
    (row,) = [c for c in second.records.controls if c.name is ControlName.RESUMED]
    assert (row.step, row.attempt, row.detail["began"]) == (4, 2, run.hex)
    assert decide(second.records).verdict is Verdict.MISMATCH, decide(second.records)
    whole = attempt(tmp_path / "whole", 1, uuid4())
    assert final_digests(second) == final_digests(whole)
    assert losses(second) == {step: loss for step, loss in losses(whole).items() if step > 4}


@pytest.mark.parametrize("resume", [False, True])
def test_an_attempt_before_which_nothing_was_saved_begins_anew(tmp_path: Path, resume: bool) -> None:
    """The first one may have ended before it made the folder, whoever asked to resume from there."""
    outcome = attempt(tmp_path / "none", 2, uuid4(), spec={"resume": resume})
    clean_end(outcome)
    assert [s.step for s in outcome.records.steps] == list(range(7))
    (row,) = [c for c in outcome.records.controls if c.name is ControlName.RESUMED]
    assert (row.step, row.detail["why"]) == (0, "no checkpoint that both sides hold")


def test_no_attempt_takes_another_runs_checkpoints_for_its_own(tmp_path: Path) -> None:
    """The first attempt would have been refused; where it ended before that, the second is."""
    clean_end(attempt(tmp_path, 1, uuid4()))
    with pytest.raises(CheckpointError, match="step 6 of an earlier run"):
        attempt(tmp_path, 2, uuid4())


def test_what_one_side_alone_holds_is_not_kept_where_an_attempt_begins_anew(tmp_path: Path) -> None:
    """Else the sides could later agree on a step that each saved in another course."""
    run = uuid4()
    assert attempt(tmp_path, 1, run, tamper=cut_off_in(6)).reason == "evicted"
    shutil.rmtree(tmp_path / "suspect")
    second = attempt(tmp_path, 2, run, tamper=cut_off_in(3))
    assert [s.step for s in second.records.steps][:2] == [0, 1]
    assert steps_held(tmp_path / "reference") in ([], [2])


def steps_held(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


# -- after the last save -----------------------------------------------------------------------------


def baseline_fails(reference: ReferenceSession, _: SuspectSession) -> None:
    """The run ends when everything is trained and saved, before the rest."""

    def train(_: object) -> None:
        raise LinkError("evicted", "its node is drained")

    reference.baseline.train = train  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [1, 2])
def test_what_comes_after_the_last_save_is_done_by_whoever_goes_on(tmp_path: Path, number: int) -> None:
    """A later attempt, or a run that is asked to resume: the last steps are trained again, to the same bits, and then
    come the controls and the baseline, so that it can speak.
    """
    run, more = uuid4(), {"spec": {"baseline": "seed"}}
    first = attempt(tmp_path, 1, run, tamper=baseline_fails, **deepcopy(more))
    assert first.reason == "evicted"
    assert steps_held(tmp_path / "suspect") == steps_held(tmp_path / "reference") == [2, 4, 6]
    saved = [read_saved(tmp_path / role / "6").digests for role in Role]
    again = {"spec": more["spec"] | {"resume": True}} if number == 1 else more
    last = attempt(tmp_path, number, run if number > 1 else uuid4(), **again)
    clean_end(last)
    assert [s.step for s in last.records.steps] == [0, 5, 6]
    assert decide(last.records).verdict is Verdict.MISMATCH, decide(last.records)
    assert [read_saved(tmp_path / role / "6").digests for role in Role] == saved
    assert {d.step for d in last.records.drifts if d.arm == Arm.BASELINE} == {5, 6}
    assert steps_held(tmp_path / "suspect") == steps_held(tmp_path / "reference") == [2, 4, 6]


def test_with_the_last_step_alone_an_attempt_begins_anew_and_a_person_is_asked_for_more_steps(tmp_path: Path) -> None:
    """Whoever asks to resume a training that is whole did not ask to train it all again."""
    run, more = uuid4(), {"baseline": "seed", "checkpoint_every": 0}
    assert attempt(tmp_path, 1, run, tamper=baseline_fails, spec=dict(more)).reason == "evicted"
    asked = attempt(tmp_path, 1, uuid4(), spec=more | {"resume": True})
    assert "both sides hold step 6 of 6: nothing is left to do" in str(asked.errors[Role.REFERENCE])
    second = attempt(tmp_path, 2, run, spec=dict(more))
    clean_end(second)
    assert [s.step for s in second.records.steps] == list(range(7))
    (row,) = [c for c in second.records.controls if c.name is ControlName.RESUMED]
    assert (row.step, row.detail["why"]) == (0, "no checkpoint that both sides hold before the last step")


def test_a_training_that_went_further_is_not_cut_back(tmp_path: Path) -> None:
    clean_end(attempt(tmp_path, 1, uuid4()))
    asked = attempt(tmp_path, 1, uuid4(), spec={"resume": True, "steps": 5})
    assert "both sides hold step 6 of 5: nothing is left to do" in str(asked.errors[Role.REFERENCE])
    assert steps_held(tmp_path / "suspect") == steps_held(tmp_path / "reference") == [2, 4, 6]
