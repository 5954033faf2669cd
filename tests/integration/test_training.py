"""The training workload (RQ3): a whole pair in one process; drift is recomputed from both sides' raw tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.pairs import Outcome, clean_end, prepared, profile, run_pair

from tandem.records import DriftRecord
from tandem.spec import RunSpec
from tandem.verdict import decide
from tandem.vocabulary import Cause, ReplayClass, Role, Verdict
from tandem_worker.lockstep.machine import Machine
from tandem_worker.model.init import step_inputs
from tandem_worker.model.layout import groups

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


def _model() -> Any:
    from tandem.spec import resolve

    return resolve(RunSpec(**SETTINGS))[0]
