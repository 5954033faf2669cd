"""The gradient workload (RQ2): a whole pair in one process; figures are recomputed from both sides' raw tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.pairs import Outcome, clean_end, prepared, profile, run_pair

from tandem.faults.injection import FaultProfile
from tandem.records import GradientRecord
from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.vocabulary import Cause, ControlName, Role, SyncMode, Verdict
from tandem_worker.lockstep.machine import Machine
from tandem_worker.model.init import step_inputs
from tandem_worker.model.whole import is_replicated, leaf_of
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.session.suspect import SuspectSession

SETTINGS: dict[str, Any] = {"workload": "gradient", "self_replays": 2, "replays": 2}
FORWARD = {
    "kind": "flip", "bits": [14], "elements": 1, "phase": "fwd", "module": "ffn", "layers": [1], "tensor": "out",
    "ranks": [0], "steps": [2],
}  # fmt: skip
"""One bit of one element in the middle of the step's forward pass."""
UPDATE = {
    "kind": "flip", "bits": [20], "elements": 3, "phase": "update", "module": "attn", "layers": [0],
    "tensor": "param.wq", "ranks": [1], "steps": [2],
}  # fmt: skip
RECIPE = profile(FORWARD | {"repeat": "once"}, UPDATE | {"steps": [3], "repeat": "stuck"})


@cache
def faulty(sync: str = "optimistic") -> Outcome:
    outcome = run_pair(RunSpec(steps=4, fault="x.toml", sync=sync, **SETTINGS), RECIPE)
    clean_end(outcome)
    return outcome


def test_a_healthy_pair_matches_and_a_clean_step_moves_digests_only() -> None:
    outcome = run_pair(RunSpec(steps=3, **SETTINGS))
    clean_end(outcome)
    decision = decide(outcome.records)
    assert decision.verdict is Verdict.MATCH, decision
    assert outcome.records.gradients == []
    step = next(op for op in outcome.reference.plan.ops)
    digests = 8 * outcome.reference.plan.tp * len(step.sites)
    for row in outcome.records.steps[1:]:
        assert row.loss_reference == row.loss_suspect is not None
        assert row.grad_norm_reference == row.grad_norm_suspect is not None
        assert digests < row.link_bytes < digests + 5_000 < row.full_bytes
        assert {name.split("/")[2] for name in row.classes} == {"reduced", "dw", "grad_norm", "param", "moment"}


def test_the_next_step_starts_equal_whatever_differed() -> None:
    """Parameter synchronisation: what follows a corrupt step is clean, and the digests of both ends prove it."""
    outcome = faulty()
    assert {m.step for m in outcome.records.mismatches} == {2, 3}
    for row in outcome.records.steps:
        counts = [c.mismatched_sites for c in row.classes.values()]
        assert (sum(counts) > 0) == (row.step in (2, 3))
    assert outcome.reference.plan.persistent
    for slot in outcome.reference.plan.persistent:
        ours, theirs = (np.asarray(side.machine.slots[slot]) for side in (outcome.reference, outcome.suspect))
        assert ours.tobytes() == theirs.tobytes(), slot


def test_what_a_wrong_gradient_makes_of_the_update_is_derived_and_in_no_frequency() -> None:
    records = faulty().records
    derived = [m for m in records.mismatches if m.cause is Cause.DERIVED]
    assert {(m.step, m.rank) for m in derived} == {(2, 0), (2, 1)}
    assert all(m.mismatched is None for m in derived)
    (step,) = (s for s in records.steps if s.step == 2)
    updated = [c for name, c in step.classes.items() if name.startswith("update/") and "grad_norm" not in name]
    assert updated
    assert all(c.mismatched_sites == 0 for c in updated)
    computed = [m for m in records.mismatches if m.step == 2 and m.cause is Cause.COMPUTE]
    assert {m.tensor.split(".")[0] for m in computed} == {"reduced", "dw", "grad_norm"}
    assert decide(records).verdict is Verdict.MISMATCH


def test_a_fault_in_the_update_alone_is_a_finding_of_its_own() -> None:
    found = [m for m in faulty().records.mismatches if m.step == 3]
    assert [(m.cause, m.tensor, m.rank, m.layer) for m in found] == [(Cause.COMPUTE, "param.wq", 1, 0)]
    assert found[0].mismatched == 3
    assert not [g for g in faulty().records.gradients if g.step == 3]


def test_replays_of_the_step_say_whether_it_repeats() -> None:
    replays = {(m.step, m.replay.value) for m in faulty().records.mismatches if m.cause is Cause.COMPUTE}
    assert replays == {(2, "transient"), (3, "persistent")}


@pytest.mark.parametrize("sync", ["digest", "full"])
def test_every_mode_records_the_same(sync: str) -> None:
    assert faulty(sync).keys == faulty().keys
    mine, theirs = ([_plain(g) for g in faulty(s).records.gradients] for s in (sync, "optimistic"))
    assert mine == theirs


def _plain(row: GradientRecord) -> tuple[object, ...]:
    return (row.step, row.leaf, row.noise, row.signal, row.suspect, row.cosine, row.elements, row.mismatched)


def test_norms_equal_those_of_the_raw_gradients() -> None:
    """Both gradients of step 2, computed apart and subtracted whole in fp64, by another way than the pair's pieces."""
    spec = RunSpec(steps=4, fault="x.toml", **SETTINGS)
    clean, corrupt = (_gradients(spec, role) for role in (Role.REFERENCE, Role.SUSPECT))
    rows = {g.leaf: g for g in faulty().records.gradients if g.step == 2}
    assert set(rows) == {""} | {leaf for leaf in clean if clean[leaf].tobytes() != corrupt[leaf].tobytes()}
    whole = {"": tuple(np.concatenate([g[leaf] for leaf in clean]) for g in (corrupt, clean))}
    for leaf, row in rows.items():
        s, r = whole.get(leaf) or (corrupt[leaf], clean[leaf])
        assert row.noise == pytest.approx(np.linalg.norm(s - r), rel=1e-12)
        assert row.signal == pytest.approx(np.linalg.norm(r), rel=1e-12)
        assert row.suspect == pytest.approx(np.linalg.norm(s), rel=1e-12)
        assert row.cosine == pytest.approx(s @ r / np.linalg.norm(s) / np.linalg.norm(r), rel=1e-12)
    norm = next(s.grad_norm_reference for s in faulty().records.steps if s.step == 2)
    assert rows[""].signal == pytest.approx(norm, rel=1e-3)  # the program's own is fp32


def _gradients(spec: RunSpec, role: Role) -> dict[str, np.ndarray]:
    """Every leaf of step 2, fp64, flat: sharded leaves whole, replicated ones of each rank, scaled to count once."""
    made = prepared(spec, role, RECIPE)
    machine: Machine = made.machine
    (op,) = machine.plan.ops
    outputs: tuple[Any, ...] = ()
    for step in (1, 2):
        machine.slots.update(step_inputs(*made.data.batch(step), step, machine.chain.mesh))
        outputs = machine.execute(op, step, 0).outputs
    found = {}
    for site, value in zip(op.sites, outputs, strict=True):
        if site.family == "dw":
            raw = np.asarray(value).astype(np.float64).reshape(-1)
            found[leaf_of(site)] = raw / np.sqrt(machine.plan.tp) if is_replicated(site) else raw
    return found


def test_small_pieces_change_nothing() -> None:
    """A piece of 96 bytes: no leaf's size is a multiple of it."""

    def shrink(reference: ReferenceSession, suspect: SuspectSession) -> None:
        side = reference.reference
        object.__setattr__(side.settings, "exchange_bytes", 192)
        assert side.settings is not suspect.suspect.settings

    recipe = profile(UPDATE, FORWARD | {"repeat": "once"}, seed=RECIPE.seed)
    spec = RunSpec(steps=2, fault="x.toml", **SETTINGS)
    small = run_pair(spec, recipe, tamper=shrink)
    large = run_pair(spec, recipe)
    clean_end(small)
    assert small.keys == large.keys
    for mine, theirs in zip(small.records.gradients, large.records.gradients, strict=True):
        assert mine.noise == pytest.approx(theirs.noise, rel=1e-12)
        assert (mine.leaf, mine.mismatched) == (theirs.leaf, theirs.mismatched)


STATE = profile(
    {"kind": "flip", "bits": [12], "level": "state", "input": "wq", "phase": "fwd", "module": "attn",
     "layers": [1], "ranks": [1], "steps": [2], "elements": 2}
)  # fmt: skip


def test_a_flipped_parameter_is_state_and_is_repaired() -> None:
    outcome = run_pair(RunSpec(steps=3, fault="x.toml", **SETTINGS), STATE)
    clean_end(outcome)
    found = [(m.step, m.cause, m.tensor, m.rank, m.mismatched) for m in outcome.records.mismatches]
    assert found == [(2, Cause.STATE, "input.copy.attn.1.wq", 1, 2)]
    assert [(f.level, f.changed) for f in outcome.records.faults] == [("state", 2)]


@pytest.mark.parametrize(
    ("overwrite", "recipe"),
    [("overwrite_output", profile(FORWARD | {"steps": [9]}, UPDATE)), ("overwrite_input", STATE)],
    ids=["output", "input"],
)
@pytest.mark.parametrize(("times", "verdict"), [(1, Verdict.MISMATCH), (99, Verdict.INCONCLUSIVE)])
def test_a_digest_proves_that_the_suspect_took_what_overwrites_it(
    overwrite: str, recipe: FaultProfile, times: int, verdict: Verdict
) -> None:
    """A suspect whose memory does not take the reference's tensor: once is repaired, always is not gone on from."""
    written = 0

    def tamper(_: ReferenceSession, suspect: SuspectSession) -> None:
        machine = suspect.machine
        right = getattr(machine, overwrite)

        def wrong(execution: Any, index: int, rank: int, value: np.ndarray, **kwargs: Any) -> Any:
            nonlocal written
            written += 1
            if written <= times:
                value = value.copy()
                value.reshape(-1).view(np.uint8)[-1] ^= 1
            return right(execution, index, rank, value, **kwargs)

        setattr(machine, overwrite, wrong)

    outcome = run_pair(RunSpec(steps=3, fault="x.toml", **SETTINGS), recipe, tamper=tamper)
    decision = decide(outcome.records)
    assert decision.verdict is verdict, decision
    (control,) = [c for c in outcome.records.controls if c.name is ControlName.TRANSPORT]
    assert control.ok == (times == 1)
    if times == 1:
        clean_end(outcome)
        assert written == 2
        assert {m.step for m in outcome.records.mismatches} == {2}
        for slot in outcome.reference.plan.persistent:
            ours, theirs = (np.asarray(side.machine.slots[slot]) for side in (outcome.reference, outcome.suspect))
            assert ours.tobytes() == theirs.tobytes(), slot
    else:
        assert (outcome.reason, decision.reason) == ("transport", "transport")
        assert [s.step for s in outcome.records.steps] == [0, 1], "no step goes on from parameters that differ"


def test_sync_modes_are_those_of_the_lock_step() -> None:
    assert {SyncMode(row.sync) for row in faulty("digest").records.steps} == {SyncMode.DIGEST}
