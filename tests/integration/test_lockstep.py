"""The heart: what differs is found, exactly, in every sync mode, and never smears over what follows."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.pairs import clean_end, found, profile, run_pair, truth

from tandem.faults.injection import FaultProfile
from tandem.records import MismatchRecord
from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.vocabulary import Cause, ControlName, ReplayClass, Role, SyncMode, Verdict
from tandem_worker.link import frames as f
from tandem_worker.lockstep import reference as reference_module
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.session.suspect import SuspectSession

pytestmark = pytest.mark.slow
MODES = (SyncMode.DIGEST, SyncMode.OPTIMISTIC, SyncMode.FULL)
SETTINGS: dict[str, Any] = {"self_replays": 2, "replays": 2}
"""Fewer repeats than the default: the verdict asks for as many as the spec says."""


def check_null_steps(count: int) -> None:
    outcome = run_pair(RunSpec(steps=count, **SETTINGS), timeout=60 + 15 * count)
    clean_end(outcome)
    records = outcome.records
    assert records.mismatches == []
    plan = outcome.reference.plan
    per_step = {step.step: sum(c.sites for c in step.classes.values()) for step in records.steps}
    assert per_step == {0: 2 * sum(len(op.sites) for op in plan.initial)} | dict.fromkeys(
        range(1, count + 1), 2 * len(plan.sites)
    )
    assert decide(records).verdict is Verdict.MATCH


def test_null_steps_mismatch_nowhere() -> None:
    """Every site of every step on every rank is compared, and none differs. `make soak` takes hundreds of steps."""
    check_null_steps(30)


def dealt(rng: random.Random, cards: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """So many cards: the whole pack in a random order, again and again."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        found += rng.sample(cards, len(cards))
    return found[:count]


def random_faults(count: int, seed: int) -> FaultProfile:
    """One fault a step: any kind, any site class, one or both ranks, few or many elements.

    Places and kinds are dealt like cards, not drawn: each 18 steps have every place once, each 6 every kind.
    """
    rng = random.Random(seed)
    where = [
        {"phase": "fwd", "tensor": t, "module": m} for m in ("attn", "ffn", "embed", "head") for t in ("out", "reduced")
    ]
    where += [{"phase": "bwd", "tensor": t, "module": m} for m in ("attn", "ffn") for t in ("dx", "dw", "reduced")]
    where += [{"phase": "update", "tensor": t} for t in ("param", "moment.mu", "moment.nu", "grad_norm")]
    kinds: list[dict[str, Any]] = [
        {"kind": "flip", "bits": "uniform"},
        {"kind": "flip", "bits": "uniform", "count": 3},
        {"kind": "flip", "bits": "exponent"},
        {"kind": "zero"},
        {"kind": "scale", "factor": -1.0},
        {"kind": "scale", "factor": 1.5},
    ]
    places, sorts = dealt(rng, where, count), dealt(rng, kinds, count)
    faults = []
    for step in range(1, count + 1):
        amount = {"elements": rng.choice((1, 1, 2, 7))} if rng.random() < 0.8 else {"rate": 0.01}
        ranks = rng.choice(([0], [1], [0, 1]))
        layers = {} if "module" not in (place := places[step - 1]) or place["module"] in ("embed", "head") else {
            "layers": [rng.randrange(2)]
        }  # fmt: skip
        faults.append({**place, **sorts[step - 1], **amount, **layers, "steps": [step], "ranks": ranks})
    return profile(*faults, seed=seed)


def check_random_faults(count: int, seed: int) -> None:
    recipe = random_faults(count, seed)
    keys = {}
    for mode in MODES:
        outcome = run_pair(RunSpec(steps=count, sync=mode, fault="random.toml", **SETTINGS), recipe, timeout=1500)
        clean_end(outcome)
        assert found(outcome.records) == truth(outcome.records), mode
        assert all(m.cause is Cause.COMPUTE for m in outcome.records.mismatches)
        keys[mode] = outcome.keys
    changed = {step for step, _, _ in truth(outcome.records)}
    assert len(changed) > 0.9 * count, "zeroing a zero changes nothing, but most faults must bite"
    assert keys[SyncMode.OPTIMISTIC] == keys[SyncMode.DIGEST]
    assert keys[SyncMode.FULL] == keys[SyncMode.DIGEST]


@pytest.mark.timeout(3000)
def test_random_faults_are_found_alike_in_all_modes() -> None:
    """The counts are the injector's, site by site, and the modes agree: each site class twice, each kind six times.

    `make soak` takes hundreds, in pairs of 200 steps.
    """
    check_random_faults(36, seed=11)


@pytest.mark.parametrize("mode", MODES)
def test_a_mismatch_does_not_smear(mode: SyncMode) -> None:
    """A wrong reduction is a mismatch at `reduced`, and only there; a wrong norm changes no parameter."""
    recipe = profile(
        {"kind": "flip", "bits": [14], "elements": 1, "phase": "fwd", "module": "attn", "layers": [0],
         "tensor": "reduced", "ranks": [1], "steps": [1]},
        {"kind": "scale", "factor": 3.0, "elements": 1, "tensor": "grad_norm", "ranks": [0], "steps": [2]},
        {"kind": "flip", "bits": [3], "elements": 1, "phase": "bwd", "module": "ffn", "layers": [1],
         "tensor": "dw.w_up", "ranks": [0], "steps": [3]},
    )  # fmt: skip
    outcome = run_pair(RunSpec(steps=4, sync=mode, fault="x.toml", **SETTINGS), recipe)
    clean_end(outcome)
    rows = sorted((m.step, m.tensor, m.rank, m.mismatched) for m in outcome.records.mismatches)
    assert rows[0] == (1, "reduced", 1, 1)
    assert {row[0:3] for row in rows[1:]} == {(2, "grad_norm", 0), (2, "grad_norm.clip", 0), (3, "dw.w_up", 0)}
    assert outcome.records.steps[-1].loss_reference == outcome.records.steps[-1].loss_suspect


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ({"phase": "bwd", "module": "attn", "layers": [1], "tensor": "dx", "input": "x"}, "input.x"),
        ({"phase": "fwd", "module": "ffn", "layers": [0], "tensor": "out", "input": "w_up"}, "input.w_up"),
        ({"phase": "update", "module": "attn", "layers": [0], "tensor": "param.wq", "input": "moment.nu.wq"}, None),
    ],
)
def test_a_flipped_kept_buffer_is_state_and_repaired(mode: SyncMode, place: dict[str, Any], name: str | None) -> None:
    """The consuming site names the input; nothing after it differs, and the frequency does not count it."""
    recipe = profile(
        {"kind": "flip", "bits": [14], "elements": 1, "level": "state", "ranks": [1], "steps": [2], **place}
    )
    outcome = run_pair(RunSpec(steps=3, sync=mode, fault="x.toml", **SETTINGS), recipe)
    clean_end(outcome)
    [row] = outcome.records.mismatches
    assert (row.cause, row.step, row.rank, row.mismatched) == (Cause.STATE, 2, 1, 1)
    assert row.tensor == (name or "input.moment.nu.wq")
    assert sum(c.mismatched_sites for s in outcome.records.steps for c in s.classes.values()) == 0
    assert decide(outcome.records).verdict is Verdict.MISMATCH


@pytest.mark.parametrize("mode", MODES)
def test_a_corrupted_operand_spreads_inside_its_program_only(mode: SyncMode) -> None:
    recipe = profile(
        {"kind": "scale", "factor": 100.0, "elements": 1, "level": "operand", "phase": "fwd", "module": "ffn",
         "layers": [0], "ranks": [0], "steps": [2]}
    )  # fmt: skip
    outcome = run_pair(RunSpec(steps=3, sync=mode, fault="x.toml", **SETTINGS), recipe)
    clean_end(outcome)
    [row] = outcome.records.mismatches
    assert (row.step, row.phase, row.module, row.layer, row.tensor) == (2, "fwd", "ffn", 0, "out")
    assert (row.mismatched or 0) > 1, "one operand element reaches a whole row of the output"


def test_replays_tell_transient_from_persistent() -> None:
    """A fault drawn anew in each replay is transient, one that repeats its draws persistent; budget in site order."""
    fresh = {"kind": "flip", "bits": [13], "elements": 1, "phase": "fwd", "tensor": "out", "ranks": [0]}
    recipe = profile(
        {**fresh, "module": "attn", "layers": [0], "steps": [1], "repeat": "once"},
        {**fresh, "module": "attn", "layers": [0], "steps": [2], "repeat": "stuck"},
        {**fresh, "module": "attn", "layers": [0], "steps": [3], "repeat": "fresh"},
        {**fresh, "module": ["attn", "ffn"], "steps": [4], "repeat": "once"},
    )
    per_mode = []
    for mode in MODES:
        spec = RunSpec(steps=4, sync=mode, fault="x.toml", replay_budget=2, **SETTINGS)
        outcome = run_pair(spec, recipe)
        clean_end(outcome)
        per_mode.append({(m.step, m.site): m.replay for m in outcome.records.mismatches})
    assert per_mode[0] == per_mode[1] == per_mode[2]
    by_step = {step: replay for (step, _), replay in per_mode[0].items() if step < 4}
    assert by_step == {1: ReplayClass.TRANSIENT, 2: ReplayClass.PERSISTENT, 3: ReplayClass.ERRATIC}
    last = [replay for (step, _), replay in sorted(per_mode[0].items()) if step == 4]
    assert last == [ReplayClass.TRANSIENT] * 2 + [ReplayClass.NOT_REPLAYED] * 2


def test_unequal_initial_parameters_are_found_at_step_0_and_repaired() -> None:
    def flip(_: ReferenceSession, suspect: SuspectSession) -> None:
        machine, slot = suspect.machine, "master.ffn.1.w_down"
        value = machine.shard(machine.slots[slot], 1).copy()
        value.reshape(-1).view(np.uint32)[5] ^= 1 << 7
        machine.slots[slot] = machine.replace(machine.slots[slot], 1, value)

    outcome = run_pair(RunSpec(steps=2, **SETTINGS), tamper=flip)
    clean_end(outcome)
    [row] = outcome.records.mismatches
    assert (row.step, row.tensor, row.rank, row.mismatched, row.first_index) == (0, "param.w_down", 1, 1, 5)
    assert row.bits == [int(i == 7) for i in range(32)]
    assert row.replay is ReplayClass.NOT_REPLAYED


def test_a_wrong_digest_of_equal_tensors_is_its_own_finding() -> None:
    def lie(_: ReferenceSession, suspect: SuspectSession) -> None:
        execute = suspect.machine.execute

        def wrong(op: Any, step: int, generation: int) -> Any:
            execution = execute(op, step, generation)
            if step == 1 and op.program == "ffn.fwd" and generation == 0:
                lanes = np.array(execution.digests)
                lanes[0, 0, 0] ^= 1
                execution.digests = lanes
            return execution

        suspect.machine.execute = wrong  # type: ignore[method-assign]

    outcome = run_pair(RunSpec(steps=2, **SETTINGS), tamper=lie)
    clean_end(outcome)
    assert outcome.records.mismatches
    assert {(m.cause, m.step, m.mismatched) for m in outcome.records.mismatches} == {(Cause.DIGEST, 1, 0)}


class Corrupter:
    """A channel that flips a bit in some tensors on their way."""

    def __init__(self, channel: Any, times: int, purpose: str = "output") -> None:
        self.channel, self.left, self.purpose = channel, times, purpose

    def send(self, frame: Any, payload: Any = None) -> None:
        if isinstance(frame, f.Tensor) and frame.purpose == self.purpose and self.left:
            self.left -= 1
            payload = memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))
        self.channel.send(frame, payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


@pytest.mark.parametrize(("times", "verdict"), [(1, Verdict.MISMATCH), (99, Verdict.INCONCLUSIVE)])
def test_a_tensor_that_arrives_changed_is_transport_not_a_finding(times: int, verdict: Verdict) -> None:
    recipe = profile(
        {"kind": "flip", "bits": [14], "elements": 1, "phase": "fwd", "module": "attn", "layers": [0],
         "tensor": "out", "ranks": [1], "steps": [1]}
    )  # fmt: skip

    def corrupt(_: ReferenceSession, suspect: SuspectSession) -> None:
        suspect.side.channel = Corrupter(suspect.side.channel, times)  # type: ignore[assignment]

    outcome = run_pair(RunSpec(steps=2, fault="x.toml", **SETTINGS), recipe, tamper=corrupt)
    [row] = outcome.records.mismatches
    [control] = [c for c in outcome.records.controls if c.name is ControlName.TRANSPORT]
    decision = decide(outcome.records)
    assert decision.verdict is verdict
    if times == 1:
        assert control.ok
        assert row.mismatched == 1, "the tensor that was sent again is the one that counts"
    else:
        assert not control.ok
        assert row.mismatched is None, "a tensor that never came whole has no counts"
        assert decision.reason == "transport"


def test_a_reference_that_differs_from_itself_is_inconclusive_and_suspected() -> None:
    """The fault sits on the reference: its replays do not repeat what it stored."""
    recipe = profile(
        {"kind": "flip", "bits": [14], "elements": 1, "phase": "fwd", "module": "ffn", "layers": [0],
         "tensor": "out", "ranks": [0], "steps": [2], "repeat": "once"}
    )  # fmt: skip

    def swap(reference: ReferenceSession, suspect: SuspectSession) -> None:
        reference.machine.profile, suspect.machine.profile = suspect.machine.profile, None

    outcome = run_pair(RunSpec(steps=3, fault="x.toml", **SETTINGS), recipe, tamper=swap)
    clean_end(outcome)
    decision = decide(outcome.records)
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "reference_differs")
    assert decision.reference_suspected
    assert outcome.records.mismatches, "the finding is still shown"


def test_a_suspect_that_differs_from_itself_is_a_finding() -> None:
    """Also where lock-step happened to see nothing."""

    def unsteady(_: ReferenceSession, suspect: SuspectSession) -> None:
        run, calls = suspect.machine.run, Counter[str]()

        def sometimes(op: Any, inputs: Any, step: int, replay: int) -> Any:
            outputs, digests, changes = run(op, inputs, step, replay)
            if replay == 2001 and op.program == "attn.bwd":
                calls[op.program] += 1
                digests = np.array(digests) ^ np.uint32(1)
            return outputs, digests, changes

        suspect.machine.run = sometimes  # type: ignore[method-assign]

    outcome = run_pair(RunSpec(steps=2, **SETTINGS), tamper=unsteady)
    clean_end(outcome)
    assert outcome.records.mismatches == []
    decision = decide(outcome.records)
    assert decision.verdict is Verdict.MISMATCH
    assert "attn.bwd" in decision.sentence


def test_sides_that_reduce_in_another_order_are_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem_worker.lockstep import controls

    right, answers = controls.known_reduction, []

    def differs(machine: Any, seed: int) -> bytes:
        answers.append(right(machine, seed))
        return answers[-1] if len(answers) == 1 else answers[-1][::-1]

    monkeypatch.setattr(controls, "known_reduction", differs)
    outcome = run_pair(RunSpec(steps=1, **SETTINGS))
    assert outcome.reason == "collective_order"
    assert decide(outcome.records).verdict is Verdict.INCONCLUSIVE
    assert not outcome.records.steps


@pytest.mark.parametrize("field", ["jaxlib", "data", "model", "program.attn.fwd", "cpu_affinity"])
def test_the_first_parity_field_that_differs_is_named_before_any_step(field: str) -> None:
    outcome = run_pair(RunSpec(steps=1, **SETTINGS), suspect_change=lambda fields: fields | {field: "another"})
    assert outcome.reason == f"parity:{field}"
    assert str(outcome.errors[Role.SUSPECT]) == str(outcome.errors[Role.REFERENCE])
    assert field in str(outcome.errors[Role.REFERENCE])
    assert not outcome.records.steps
    decision = decide(outcome.records)
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, f"parity:{field}")


def test_a_comparator_that_always_matches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control goes through the ordinary comparator."""
    from tandem_worker.lockstep import controls

    monkeypatch.setattr(reference_module, "compare", lambda *_: None)
    monkeypatch.setattr(controls, "compare", lambda *_: None)
    outcome = run_pair(RunSpec(steps=1, **SETTINGS))
    decision = decide(outcome.records)
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "positive_start_failed")


def test_rows_beyond_the_cap_are_counted_not_stored() -> None:
    recipe = profile({"kind": "flip", "bits": [3], "elements": 1, "phase": "fwd", "tensor": "out"})
    outcome = run_pair(RunSpec(steps=3, fault="x.toml", row_cap=5, **SETTINGS), recipe)
    clean_end(outcome)
    [closing] = outcome.records.closings
    assert len(outcome.records.mismatches) == closing.mismatches == 5
    assert closing.capped
    assert closing.mismatches_total == sum(s.rows for s in outcome.records.steps) > 5
    assert decide(outcome.records).verdict is Verdict.MISMATCH


def test_rows_carry_exact_statistics() -> None:
    """Of one flip: its element, its bit, its box, and a row that verdicts and tables can use alone."""
    recipe = profile(
        {"kind": "flip", "bits": [14], "elements": 1, "phase": "fwd", "module": "attn", "layers": [1],
         "tensor": "out", "ranks": [1], "steps": [1]}
    )  # fmt: skip
    outcome = run_pair(RunSpec(steps=1, fault="x.toml", **SETTINGS), recipe)
    [row] = outcome.records.mismatches
    [fault] = outcome.records.faults
    assert isinstance(row, MismatchRecord)
    assert [row.first_index] == fault.elements
    assert row.bits == [int(i == 14) for i in range(16)]
    assert row.extent == "element"
    assert row.box is not None
    assert all(low == high for low, high in row.box)


def test_full_exchange_that_arrives_changed_is_transport_not_a_finding() -> None:
    """Equal digests and other bits: the tensor is asked for again before anything is said."""

    def corrupt(_: ReferenceSession, suspect: SuspectSession) -> None:
        suspect.side.channel = Corrupter(suspect.side.channel, 1, "full")  # type: ignore[assignment]

    outcome = run_pair(RunSpec(steps=1, sync=SyncMode.FULL, **SETTINGS), tamper=corrupt)
    clean_end(outcome)
    assert outcome.records.mismatches == []
    assert [c.ok for c in outcome.records.controls if c.name is ControlName.TRANSPORT] == [True]
    assert decide(outcome.records).verdict is Verdict.MATCH


def test_a_digest_comparator_that_always_matches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control goes through the comparison that decides every site."""
    blind = staticmethod(lambda mine, _: np.zeros(mine.shape[:2], bool))
    monkeypatch.setattr(reference_module.Reference, "differing", blind)
    outcome = run_pair(RunSpec(steps=1, **SETTINGS))
    decision = decide(outcome.records)
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "positive_start_failed")


def test_several_flips_of_one_buffer_are_one_row_of_truth() -> None:
    recipe = profile(
        {"kind": "flip", "bits": [3, 14], "elements": 2, "level": "state", "phase": "bwd", "module": "ffn",
         "layers": [0], "tensor": "dx", "input": "x", "ranks": [0], "steps": [1]}
    )  # fmt: skip
    outcome = run_pair(RunSpec(steps=1, fault="x.toml", **SETTINGS), recipe)
    clean_end(outcome)
    [fault] = outcome.records.faults
    [row] = outcome.records.mismatches
    assert fault.changed == row.mismatched == 2
    assert decide(outcome.records).verdict is Verdict.MISMATCH


@pytest.mark.parametrize(("again", "verdict"), [(2, Verdict.MISMATCH), (9, Verdict.INCONCLUSIVE)])
def test_a_buffer_that_flips_again_is_stored_each_time_and_given_up_in_the_end(again: int, verdict: Verdict) -> None:
    """A sticky memory cell: repaired, and wrong again when the program runs again."""
    recipe = profile(
        {"kind": "flip", "bits": [14], "elements": 1, "level": "state", "phase": "bwd", "module": "attn",
         "layers": [1], "tensor": "dx", "input": "x", "ranks": [1], "steps": [1]}
    )  # fmt: skip

    def sticky(_: ReferenceSession, suspect: SuspectSession) -> None:
        machine = suspect.machine
        rewind, left = machine.rewind, [again - 1]

        def wrong_again(execution: Any) -> None:
            rewind(execution)
            if left[0] > 0:
                left[0] -= 1
                machine._cured.clear()

        machine.rewind = wrong_again  # type: ignore[method-assign]

    outcome = run_pair(RunSpec(steps=1, fault="x.toml", **SETTINGS), recipe, tamper=sticky)
    names = [m.tensor for m in outcome.records.mismatches if m.cause is Cause.STATE]
    assert names == ["input.x", "input.x#2", "input.x#3"][: min(again, 3)]
    decision = decide(outcome.records)
    assert decision.verdict is verdict
    assert decision.reason == ("completed" if verdict is Verdict.MISMATCH else "state_not_repairable")


def test_a_suspect_that_falls_silent_in_lock_step_ends_by_name() -> None:
    """Its link answers, its main thread waits: one digest that never comes must not hang the pair."""

    class Swallower(Corrupter):
        def send(self, frame: Any, payload: Any = None) -> None:
            if not (isinstance(frame, f.Digests) and frame.step == 1 and frame.op == 4):
                self.channel.send(frame, payload)

    def swallow(_: ReferenceSession, suspect: SuspectSession) -> None:
        suspect.side.channel = Swallower(suspect.side.channel, 0)  # type: ignore[assignment]

    outcome = run_pair(RunSpec(steps=1, **SETTINGS), tamper=swallow, step_timeout=5.0, timeout=120)
    assert outcome.reason == "deadlock"
    decision = decide(outcome.records)
    assert (decision.verdict, decision.reason) == (Verdict.INCONCLUSIVE, "deadlock")


@pytest.mark.parametrize("options", [{"tp": 1}, {"compute": "float32"}, {"tp": 1, "compute": "float32"}])
def test_other_shapes_of_pairs_match_and_find(options: dict[str, Any]) -> None:
    """One rank, fp32 (no compute copies): a null pair matches, one flip is found where it is."""
    assert decide(run_pair(RunSpec(steps=1, **options, **SETTINGS)).records).verdict is Verdict.MATCH
    recipe = profile(
        {"kind": "flip", "bits": [9], "elements": 1, "phase": "fwd", "module": "ffn", "layers": [1],
         "tensor": "out", "ranks": [0], "steps": [1]}
    )  # fmt: skip
    outcome = run_pair(RunSpec(steps=1, fault="x.toml", **options, **SETTINGS), recipe)
    clean_end(outcome)
    assert found(outcome.records) == truth(outcome.records) != {}
