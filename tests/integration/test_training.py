"""The training workload (RQ3): a whole pair in one process; drift is recomputed from both sides' raw tensors."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.pairs import Outcome, clean_end, prepared, profile, run_pair

from tandem.errors import CheckpointError
from tandem.records import DriftRecord
from tandem.runs.summary import summarise
from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.vocabulary import Cause, ControlName, ReplayClass, Role, Verdict
from tandem_worker.drift.room import Room, state_bytes
from tandem_worker.drift.saved import check_start, content_digest, read_saved
from tandem_worker.lockstep.inbox import StopRequested
from tandem_worker.lockstep.machine import Machine
from tandem_worker.model.init import step_inputs
from tandem_worker.model.layout import groups
from tandem_worker.model.whole import LOSS
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.session.suspect import SuspectSession

SETTINGS: dict[str, Any] = {"workload": "training", "self_replays": 2, "replays": 2}
FORWARD = {
    "kind": "flip", "bits": [14], "elements": 1, "phase": "fwd", "module": "ffn", "layers": [1], "tensor": "out",
    "ranks": [0], "steps": [3],
}  # fmt: skip
"""One bit of one element in the middle of step 3's forward pass."""
RECIPE = profile(FORWARD | {"repeat": "once"})
STEPS = 8


@cache
def faulty() -> Outcome:
    outcome = run_pair(RunSpec(steps=STEPS, fault="x.toml", exact_every=5, **SETTINGS), RECIPE)
    clean_end(outcome)
    return outcome


@cache
def states(role: Role) -> list[dict[str, np.ndarray]]:
    """Masters after each step of one side, run alone by a machine apart from the sessions."""
    spec = RunSpec(steps=STEPS, fault="x.toml", **SETTINGS)
    side = prepared(spec, role, RECIPE)
    machine = Machine(side.machine.chain, RECIPE if role is Role.SUSPECT else None)
    machine.slots.update(side.machine.slots)
    found = []
    for step in range(1, STEPS + 1):
        tokens, targets = side.data.batch(step)
        machine.slots.update(step_inputs(tokens, targets, step, machine.chain.mesh))
        machine.execute(machine.plan.ops[0], step, 0)
        found.append({k: np.asarray(v, np.float64) for k, v in machine.slots.items() if k.startswith("master.")})
        machine.end_step()
    return found


def exact(step: int, part: str = "") -> tuple[float, float]:
    """Drift and norm by numpy, straight from the tensors."""
    suspect, reference = states(Role.SUSPECT)[step - 1], states(Role.REFERENCE)[step - 1]
    noise = signal = 0.0
    for slot, own in reference.items():
        if part and not slot.startswith(f"master.{part}."):
            continue
        weight = 1 / own.shape[0] if slot.endswith(".norm") else 1.0
        noise += weight * float(((suspect[slot] - own) ** 2).sum())
        signal += weight * float((own**2).sum())
    return float(np.sqrt(noise)), float(np.sqrt(signal))


def rows(outcome: Outcome, method: str) -> dict[tuple[int, str], DriftRecord]:
    return {(d.step, d.part): d for d in outcome.records.drifts if d.method == method and d.arm == "suspect"}


def test_a_healthy_pair_matches_and_has_no_drift() -> None:
    outcome = run_pair(RunSpec(steps=4, exact_every=2, **SETTINGS))
    clean_end(outcome)
    decision = decide(outcome.records)
    assert decision.verdict is Verdict.MATCH, decision
    assert outcome.records.drifts == []
    assert [s.step for s in outcome.records.steps] == [0, 1, 2, 3, 4]
    for row in outcome.records.steps[1:]:
        assert row.loss_reference == row.loss_suspect is not None
        assert row.grad_norm_reference == row.grad_norm_suspect is not None
        assert row.link_bytes < row.full_bytes
        assert {name.split("/")[2] for name in row.classes} == {"reduced", "grad_norm", "param", "moment"}


def test_the_first_difference_is_replayed_measured_and_stored_once() -> None:
    outcome = faulty()
    decision = decide(outcome.records)
    assert decision.verdict is Verdict.MISMATCH, decision
    assert {m.step for m in outcome.records.mismatches} == {3}
    assert {m.cause for m in outcome.records.mismatches} == {Cause.COMPUTE}
    assert all(m.mismatched for m in outcome.records.mismatches)
    assert {m.replay for m in outcome.records.mismatches} == {ReplayClass.TRANSIENT}
    for step in outcome.records.steps:
        unequal = sum(c.mismatched_sites for c in step.classes.values())
        assert (unequal > 0) == (step.step >= 3), step
        assert step.rows == (len(outcome.records.mismatches) if step.step == 3 else 0)
    assert [(f.step, f.level) for f in outcome.records.faults] == [(3, "output")]
    losses = [(s.loss_reference, s.loss_suspect) for s in outcome.records.steps[1:]]
    assert [a == b for a, b in losses] == [True, True] + [False] * (STEPS - 2)


def test_exact_drift_is_numpys_at_the_first_difference_every_so_often_and_at_the_end() -> None:
    found = rows(faulty(), "exact")
    assert {step for step, _ in found} >= {3, 5, STEPS}
    model_groups = {group for group, _, _ in groups(_model())}
    for step in (3, 5, STEPS):
        assert {part for at, part in found if at == step} == {"", *model_groups}
    for (step, part), row in found.items():
        drift, norm = exact(step, part)
        assert row.drift == pytest.approx(drift, rel=1e-9)
        assert row.norm == pytest.approx(norm, rel=1e-9)
        assert row.error == 0


def test_sketched_drift_is_within_2_percent_of_the_exact_one_and_every_step_has_one() -> None:
    sketched, measured = rows(faulty(), "sketch"), rows(faulty(), "exact")
    assert {step for step, _ in sketched} | {step for step, _ in measured} == set(range(3, STEPS + 1))
    assert sketched, "no sketch was trusted"
    for (step, part), row in sketched.items():
        drift, norm = exact(step)
        assert part == ""
        assert row.drift == pytest.approx(drift, rel=0.02)
        assert row.norm == pytest.approx(norm, rel=0.02)
        assert 0 < row.error <= 0.01


def changed_weight(factor: float) -> Callable[[ReferenceSession, SuspectSession], None]:
    """One of the suspect's weights is multiplied between steps 1 and 2."""

    def tamper(_: ReferenceSession, suspect: SuspectSession) -> None:
        load = suspect.load

        def changed(step: int) -> None:
            load(step)
            if step == 2 and suspect.progress.look().step == 1:
                slot = "master.attn.0.wq"
                machine = suspect.machine
                value = machine.shard(machine.slots[slot], 1).copy()
                value.reshape(-1)[5] *= factor
                machine.slots[slot] = machine.replace(machine.slots[slot], 1, value)

        suspect.load = changed  # type: ignore[method-assign]

    return tamper


def test_a_dominant_element_is_told_by_sketches_once_it_was_measured() -> None:
    """Also of a model that is too large to be measured whenever a sketch cannot be trusted."""
    spec = RunSpec(steps=6, exact_every=4, exact_mib=0, **SETTINGS)
    outcome = run_pair(spec, tamper=changed_weight(32))
    clean_end(outcome)
    sketched, measured = rows(outcome, "sketch"), rows(outcome, "exact")
    whole = {step: row for (step, part), row in measured.items() if not part}
    assert set(whole) == {2, 4, 6}
    assert {step for step, _ in sketched} == {3, 4, 5, 6}
    for (step, _), row in sketched.items():
        assert row.drift is not None
        assert 0 < row.error < 5e-3
        if step in whole:
            assert row.drift == pytest.approx(whole[step].drift, rel=max(4 * row.error, 1e-4))
    parts = {part: row.drift for (step, part), row in measured.items() if step == 6 and part}
    assert parts["attn.0"] > 0.9 * whole[6].drift, "one element must dominate"  # type: ignore[operator]


@pytest.mark.parametrize(("mib", "exact", "unknown"), [(256, {2, 3, 4, 5, 6, 7}, set()), (0, {2, 3, 4, 6, 7}, {5, 7})])
def test_what_no_sketch_can_hold_is_measured(mib: int, exact: set[int], unknown: set[int]) -> None:
    """A weight beyond 1024: at every step of a small model, of a large one the 1st, 2nd, 4th time and at the end."""
    outcome = run_pair(RunSpec(steps=7, exact_every=100, exact_mib=mib, **SETTINGS), tamper=changed_weight(1e7))
    clean_end(outcome)
    assert {step for step, part in rows(outcome, "exact") if not part} == exact
    told = rows(outcome, "sketch")
    assert {step for step, _ in told} == unknown
    assert all(row.drift is None and row.error == 1 for row in told.values())


def test_the_suspects_state_that_changed_between_steps_is_state_and_not_the_steps_doing() -> None:
    tamper = changed_weight(2)
    outcome = run_pair(RunSpec(steps=3, **SETTINGS), tamper=tamper)
    clean_end(outcome)
    assert decide(outcome.records).verdict is Verdict.MISMATCH
    state = [m for m in outcome.records.mismatches if m.cause is Cause.STATE]
    assert [(m.step, m.rank, m.tensor, m.mismatched, m.first_index) for m in state] == [
        (2, 1, "input.master.attn.0.wq", 1, 5)
    ]
    assert {m.cause for m in outcome.records.mismatches} == {Cause.STATE, Cause.DERIVED}
    told = summarise(outcome.records)
    assert (told.timing.steps, told.timing.affected, told.mismatched_sites) == (2, 0, 0)  # what follows says nothing


# -- checkpoints ---------------------------------------------------------------------------------


def final_digests(outcome: Outcome) -> tuple[bytes, bytes]:
    """Of every output of the last step, on both sides."""
    sides = (outcome.reference, outcome.suspect)
    return tuple(side.last.run.lanes.tobytes() for side in sides)  # type: ignore[attr-defined,return-value]


def losses(outcome: Outcome) -> dict[int, tuple[float | None, float | None]]:
    return {s.step: (s.loss_reference, s.loss_suspect) for s in outcome.records.steps if s.step}


def pair(folder: Path, steps: int, *, resume: bool, fault: bool) -> Outcome:
    spec = RunSpec(
        steps=steps,
        checkpoints=folder,
        checkpoint_every=2,
        resume=resume,
        fault="x.toml" if fault else None,
        **SETTINGS,
    )
    return run_pair(spec, RECIPE if fault else None)


@pytest.mark.parametrize("fault", [False, True])
def test_a_resumed_training_has_the_same_bits_as_one_without_interruption(tmp_path: Path, fault: bool) -> None:
    whole = pair(tmp_path / "whole", 6, resume=False, fault=fault)
    first = pair(tmp_path / "parts", 5, resume=False, fault=fault)
    # Only the reference got as far as saving the last step: both go on from the one before.
    shutil.rmtree(tmp_path / "parts" / "suspect" / "5")
    again = pair(tmp_path / "parts", 6, resume=True, fault=fault)
    for outcome in (whole, first, again):
        clean_end(outcome)
        assert decide(outcome.records).verdict is (Verdict.MISMATCH if fault else Verdict.MATCH)
    assert [s.step for s in again.records.steps] == [0, 5, 6]
    assert [(c.step, c.ok) for c in again.records.controls if c.name is ControlName.RESUMED] == [(4, True)]
    assert final_digests(again) == final_digests(whole)
    assert losses(again) == {step: loss for step, loss in losses(whole).items() if step > 4}
    drift = summarise(again.records).drift
    assert drift is not None
    assert (drift.resumed, drift.started_from) == ({1: 4}, 4)
    assert "resumed from step 4" in decide(again.records).sentence
    if fault:
        assert {(m.step, m.cause) for m in again.records.mismatches} == {(0, Cause.DERIVED)}
        assert all(s.rows == 0 for s in again.records.steps[1:])
        assert {d.step for d in again.records.drifts} == {5, 6}
        assert drift.first_divergence == 3


def test_a_suspects_checkpoint_that_is_not_what_it_reported_is_a_finding(tmp_path: Path) -> None:
    clean_end(pair(tmp_path, 2, resume=False, fault=False))
    other = RunSpec(steps=2, seed=3, checkpoints=tmp_path / "other", checkpoint_every=2, **SETTINGS)
    clean_end(run_pair(other))
    mine, theirs = tmp_path / "suspect" / "2", tmp_path / "other" / "suspect" / "2"
    saved = json.loads((mine / "_CHECKPOINT_METADATA").read_text())
    swapped = json.loads((theirs / "_CHECKPOINT_METADATA").read_text())
    kept, taken = (json.loads(m["custom_metadata"]["tandem"]) for m in (saved, swapped))
    swapped["custom_metadata"]["tandem"] = json.dumps(kept | {"digests": taken["digests"]})
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    (mine / "_CHECKPOINT_METADATA").write_text(json.dumps(swapped))
    sizes = {str(p.relative_to(mine)): p.stat().st_size for p in sorted(mine.rglob("*")) if p.is_file()}
    (tmp_path / "suspect" / "2.files").write_text(json.dumps(sizes))
    outcome = pair(tmp_path, 3, resume=True, fault=False)
    clean_end(outcome)
    assert decide(outcome.records).verdict is Verdict.MISMATCH
    assert (0, Cause.STATE) in {(m.step, m.cause) for m in outcome.records.mismatches}


def test_where_the_sides_hold_nothing_in_common_they_begin_anew_and_say_so(tmp_path: Path) -> None:
    outcome = pair(tmp_path, 2, resume=True, fault=False)
    clean_end(outcome)
    assert decide(outcome.records).verdict is Verdict.MATCH
    (row,) = [c for c in outcome.records.controls if c.name is ControlName.RESUMED]
    assert (row.step, row.detail["why"]) == (0, "no checkpoint that both sides hold")


def test_checkpoints_that_cannot_be_used_are_refused_before_the_run(tmp_path: Path) -> None:
    clean_end(pair(tmp_path, 2, resume=False, fault=False))
    with pytest.raises(CheckpointError, match="step 2 of an earlier run"):
        pair(tmp_path, 4, resume=False, fault=False)
    with pytest.raises(CheckpointError, match="of another spec: its seed differs"):
        run_pair(RunSpec(steps=4, seed=1, checkpoints=tmp_path, resume=True, **SETTINGS))
    with pytest.raises(CheckpointError, match="is missing"):
        pair(tmp_path / "nowhere", 4, resume=True, fault=False)
    done = pair(tmp_path, 2, resume=True, fault=False)
    assert "nothing is left to do" in str(done.errors[Role.REFERENCE])
    for side in ("reference", "suspect"):
        data = max((p for p in (tmp_path / side / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        raw = bytearray(data.read_bytes())
        data.write_bytes(raw[: len(raw) // 2])
        broken = pair(tmp_path, 4, resume=True, fault=False)
        assert "cut off or damaged" in str(broken.errors[Role.REFERENCE])
        data.write_bytes(raw)
    (tmp_path / "suspect" / "2" / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="cut off, or was not written by Tandem"):
        pair(tmp_path, 4, resume=True, fault=False)


# -- from one checkpoint -------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["reference", "suspect"])
def test_both_sides_start_from_one_checkpoints_weights(tmp_path: Path, side: str) -> None:
    """Also from the suspect's, which differ from the reference's: the new pair is healthy and equal all the same."""
    before = pair(tmp_path, 4, resume=False, fault=True)
    clean_end(before)
    session = {"reference": before.reference, "suspect": before.suspect}[side]
    after = run_pair(RunSpec(steps=2, start=tmp_path / side / "4", **SETTINGS))
    clean_end(after)
    assert decide(after.records).verdict is Verdict.MATCH, decide(after.records)
    assert [s.step for s in after.records.steps] == [0, 1, 2]
    parity = {c.subject: c.detail for c in after.records.controls if c.name is ControlName.PARITY}
    assert parity["weights"]["reference"] == f"checkpoint {content_digest(tmp_path / side / '4')}"
    # By hand: the trained weights as they lie in the session that trained them, no moments, the first batch.
    again = prepared(RunSpec(steps=2, **SETTINGS), Role.REFERENCE, None)
    flight = session.last  # type: ignore[attr-defined]
    for slot, value in flight.state(session.plan.persistent).items():
        array = np.zeros_like(value) if slot.startswith(("mu.", "nu.")) else np.asarray(value)
        again.machine.slots[slot] = again.machine.put(array)
    tokens, targets = again.data.batch(1)
    again.machine.slots.update(step_inputs(tokens, targets, 1, again.machine.chain.mesh))
    (op,) = again.machine.plan.ops
    run = again.machine.execute(op, 1, 0)
    assert losses(after)[1] == (float(np.asarray(run.outputs[op.outputs.index(LOSS)])[0]),) * 2
    assert losses(after)[1] != losses(before)[1]


def test_a_checkpoint_that_cannot_be_started_from_is_refused_before_the_run(tmp_path: Path) -> None:
    clean_end(pair(tmp_path, 2, resume=False, fault=False))
    saved = tmp_path / "reference" / "2"
    with pytest.raises(CheckpointError, match=r"is missing: give the folder of one step, such as .*/reference/100"):
        run_pair(RunSpec(steps=1, start=tmp_path / "reference" / "3", **SETTINGS))
    with pytest.raises(CheckpointError, match="of another spec: its tp differs"):
        check_start(saved, {"model": read_saved(saved).fields["model"], "tp": "1"})
    data = max((p for p in saved.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        run_pair(RunSpec(steps=1, start=saved, **SETTINGS))


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "ahead"), [(1 << 40, 1), (0, 0)])
def test_where_memory_is_short_no_step_runs_ahead_and_the_bits_are_the_same(free: int, ahead: int) -> None:
    """Counted in live buffers: two states a side where nothing runs ahead, three where a step does."""
    most: dict[Role, int] = {}
    """Bytes beside what lies there before the run, which one state is part of."""

    def count(machine: Machine, role: Role) -> None:
        run, devices = machine.run, set(machine.chain.mesh.devices.flat)

        def alive() -> int:
            found = (a for a in jax.live_arrays() if not a.is_deleted() and a.devices() <= devices)
            return sum(a.nbytes for a in found)

        def counted(*args: Any, **kwargs: Any) -> Any:
            made = run(*args, **kwargs)
            most[role] = max(most.get(role, 0), alive() - before)
            return made

        gc.collect()
        before, machine.run = alive(), counted  # type: ignore[method-assign]

    def tamper(reference: ReferenceSession, suspect: SuspectSession) -> None:
        reference.look = lambda: Room(100, 10, free, "host")  # type: ignore[attr-defined]
        for side, role in ((reference, Role.REFERENCE), (suspect, Role.SUSPECT)):
            count(side.machine, role)

    outcome = run_pair(RunSpec(steps=6, **SETTINGS), tamper=tamper)
    clean_end(outcome)
    assert decide(outcome.records).verdict is Verdict.MATCH, decide(outcome.records)
    (row,) = [c for c in outcome.records.controls if c.name is ControlName.RUN_AHEAD]
    assert (row.ok, row.detail) == (
        True,
        {"steps": ahead, "state_bytes": 100, "working_bytes": 10, "free_bytes": free, "memory": "host"},
    )
    state = outcome.reference.plan.tp * state_bytes(outcome.reference.plan)
    for role in Role:
        assert (1 + ahead) * state <= most[role] < (1.5 + ahead) * state
    assert final_digests(outcome) == final_digests(run_pair(RunSpec(steps=6, **SETTINGS)))


# -- the baseline --------------------------------------------------------------------------------


def test_a_baseline_that_is_stopped_says_so() -> None:
    def stop(reference: Any, _: Any) -> None:
        store = reference.baseline._store

        def once(session: Any, flight: Any) -> None:
            store(session, flight)
            session.inbox.queue.put(StopRequested("stopped"))

        reference.baseline._store = once

    outcome = run_pair(RunSpec(steps=3, baseline="seed", **SETTINGS), tamper=stop)
    clean_end(outcome)
    assert {d.step for d in outcome.records.drifts if d.arm == "baseline"} == {1}
    assert any("not trained to the end (1 of 3 steps)" in line for line in summarise(outcome.records).not_checked)


def test_the_baseline_is_the_references_model_trained_with_another_seed() -> None:
    outcome = run_pair(RunSpec(steps=3, baseline="seed", **SETTINGS))
    clean_end(outcome)
    assert decide(outcome.records).verdict is Verdict.MATCH
    found = [d for d in outcome.records.drifts if d.arm == "baseline"]
    sketched = {d.step: d for d in found if d.method == "sketch"}
    assert set(sketched) == {1, 2, 3}
    (whole,) = [d for d in found if d.method == "exact" and not d.part]
    parts = [d for d in found if d.method == "exact" and d.part]
    assert whole.step == 3
    assert whole.drift == pytest.approx(sum(d.drift**2 for d in parts) ** 0.5)  # type: ignore[operator,misc]
    assert sketched[3].drift == pytest.approx(whole.drift, rel=0.02)
    assert 0.2 < whole.drift / whole.norm < 2, "other weights, but the same norms"  # type: ignore[operator]
    alone = run_pair(RunSpec(steps=3, seed=1, **SETTINGS))
    assert [sketched[s].loss for s in (1, 2, 3)] == [losses(alone)[s][0] for s in (1, 2, 3)]


def _model() -> Any:
    from tandem.spec import resolve

    return resolve(RunSpec(**SETTINGS))[0]
