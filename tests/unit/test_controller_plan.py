"""The controller's decisions as a pure function of what it sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusters import NOW, SETTINGS, Run, condition, events, kinds, node, started, told, use, world
from tandem.pairing.choose import Claim
from tandem.pairing.nodes import Node
from tandem.pairrun import names
from tandem.vocabulary import Role
from tandem_controller import observed as do
from tandem_controller.act import manifest_source
from tandem_controller.observed import Facts, Live


def test_a_new_run_is_paired_written_down_and_its_pods_made() -> None:
    run = Run()
    decision = run.plan()
    status = decision.status
    assert kinds(decision) == ["MakeChildren", "StoreAttempt"]
    assert events(decision) == ["Paired"]
    assert (status.suspect.node, status.reference.node, status.attempt) == ("sick", "well", 1)  # type: ignore[union-attr]
    assert status.attempts[0].suspect.boot_id == "boot-sick"
    assert status.attempts[0].reference.boot_id == "boot-well"
    assert status.run_id == str(names.run_id_of(run.obj["metadata"]["uid"], run.obj["metadata"]["creationTimestamp"]))
    assert condition(run, names.PAIRED) == ("True", "Paired")
    assert condition(run, names.FINISHED) == ("False", "InProgress")


def test_a_decision_is_a_function_of_what_is_seen() -> None:
    """Looking again changes nothing: no write, no event, no second attempt."""
    run = Run()
    run.plan()
    run.make()
    run.stored(1)
    first = run.plan()
    second = run.plan()
    assert first.status == second.status
    assert not events(second)
    assert kinds(second) == []


def test_the_whole_way_to_a_match() -> None:
    run = started()
    assert condition(run, names.RUNNING) == ("True", "Running")
    run.exit(Role.REFERENCE, 40)
    assert kinds(run.plan(after=30)) == []
    run.exit(Role.SUSPECT, 40)
    decision = run.plan(after=1)
    assert kinds(decision) == ["CloseAttempt", "CloseAttempt", "Judge"]
    assert decision.status.attempts[0].reason == "completed"
    run.stored(1, state="closed", live=Live(attempt=1, step=20, sites=9, elements=99))
    run.judge("match")
    decision = run.plan(after=1)
    assert (decision.status.verdict, decision.status.step, decision.status.counts.elements) == ("match", 20, 99)
    for kind, status in ((names.FINISHED, "True"), (names.SUCCEEDED, "True"), (names.FAILED, "False")):
        assert condition(run, kind) == (status, "Match")
    assert condition(run, names.RECORDS_DELIVERED) == ("True", "Delivered")
    assert run.plan(after=1000).actions == ()


@pytest.mark.parametrize("verdict", ["mismatch", "inconclusive"])
def test_consumers_see_a_failure_and_its_kind(verdict: str) -> None:
    run = started()
    for role in Role:
        run.exit(role, 41 if verdict == "mismatch" else 42)
    run.plan(after=1)
    run.stored(1, state="closed")
    run.judge(verdict)
    run.plan(after=1)
    assert condition(run, names.FAILED) == ("True", verdict.capitalize())
    assert condition(run, names.SUCCEEDED) == ("False", verdict.capitalize())


def test_situations_1_24_and_28_the_verdict_is_postgres_word_and_never_an_exit_code() -> None:
    """Exit codes prove nothing by themselves: 40 on both sides, and the records say inconclusive."""
    run = started()
    for role in Role:
        run.exit(role, 40)
    run.plan(after=1)
    run.stored(1, state="closed")
    run.judge("inconclusive", "closing_missing")
    run.plan(after=1)
    assert condition(run, names.FINISHED) == ("True", "Inconclusive")
    assert condition(run, names.RECORDS_DELIVERED) == ("False", "RecordsMissing")
    assert run.look().status.reason == "closing_missing"


# -- what people do ---------------------------------------------------------------------------------------


def test_suspension_removes_the_pods_and_costs_no_attempt() -> None:
    run = started({"retry": {"maxAttempts": 1}})
    run.obj["spec"]["suspend"] = True
    decision = run.plan(after=1)
    assert do.RemoveChildren(1) in decision.actions
    run.pods, run.jobs = [], []
    assert kinds(run.plan(after=100)) == []
    assert condition(run, names.RUNNING) == ("False", "Suspended")
    run.obj["spec"]["suspend"] = False
    status = run.plan(after=1).status
    assert status.attempt == 2
    first, second = (attempt.suspect.reason for attempt in status.attempts)
    assert second == first != "named"  # nobody named it


def test_deletion_needs_nothing_but_the_marks_taken_off() -> None:
    """Never blocked by PostgreSQL; children go with their owner."""
    run = started()
    run.facts = Facts(reachable=False)
    run.obj["metadata"]["deletionTimestamp"] = "2027-01-15T08:10:00Z"
    assert run.plan().actions == ()
    run.obj["metadata"]["finalizers"] = [names.FINALIZER]
    decision = run.plan()
    assert kinds(decision) == ["UnmarkNodes", "Release"]


def test_a_finished_run_goes_when_its_time_is_over() -> None:
    run = started({"ttlSecondsAfterFinished": 100})
    for role in Role:
        run.exit(role, 40)
    run.stored(1, state="closed")
    run.judge("match")
    run.plan(after=1)
    decision = run.plan(after=50)
    assert (decision.actions, decision.requeue_s) == ((), pytest.approx(50, abs=2))
    assert kinds(run.plan(after=51)) == ["DeleteSelf"]


def test_a_spec_that_cannot_be_used_ends_at_once_with_its_sentence() -> None:
    run = Run({"workload": {"model": "huge"}})
    decision = run.plan()
    assert decision.status.verdict == "inconclusive"
    assert "unknown preset 'huge'" in decision.status.message
    assert condition(run, names.FINISHED) == ("True", "InvalidSpec")
    assert run.plan().actions == ()


def test_a_spec_that_becomes_unusable_mid_run_ends_the_attempt_and_the_run_is_judged() -> None:
    """As after an upgrade. Its rows must not stay `running`; and the verdict is PostgreSQL's."""
    run = started()
    run.obj["spec"] = {"workload": {"model": "huge"}}
    run.facts = replace(run.facts, reachable=False)
    assert kinds(run.plan(after=1)) == ["RemoveChildren"]
    run.stored(1)
    decision = run.plan(after=1)
    last = decision.status.attempts[-1]
    assert (last.reason, last.infrastructure) == ("invalid_spec", True)
    assert "unknown preset 'huge'" in last.message
    assert decision.actions[-2:] == (do.CloseAttempt(1, "invalid_spec"), do.Judge())
    run.judge("inconclusive", "invalid_spec")
    decision = run.plan(after=1)
    assert (decision.status.verdict, decision.status.reason) == ("inconclusive", "invalid_spec")
    assert condition(run, names.FINISHED) == ("True", "Inconclusive")


def test_a_spec_that_becomes_unusable_before_anything_is_stored_ends_the_run() -> None:
    run = Run()
    run.plan()
    run.obj["spec"] = {"workload": {"model": "huge"}}
    assert "Judge" not in kinds(run.plan(after=1))
    assert condition(run, names.FINISHED) == ("True", "InvalidSpec")


def test_a_run_that_may_have_no_further_attempt_is_judged() -> None:
    """A folder that was allowed when it began is no longer."""
    volume = {"name": "v", "mountPath": "/v", "hostPath": "/data"}
    worker = SETTINGS.worker.model_copy(update={"allowed_host_paths": ["/data"]})
    run = started({"template": {"volumes": [volume]}}, settings=SETTINGS.model_copy(update={"worker": worker}))
    run.change(Role.SUSPECT, phase="Failed", reason="Evicted")
    run.exit(Role.REFERENCE, 42, told("dead_peer"))
    run.plan(after=1)
    run.pods, run.jobs = [], []
    run.stored(1, state="orphaned")
    run.observed["settings"] = SETTINGS
    decision = run.plan(after=100)
    assert condition(run, names.PAIRED) == ("False", "VolumeForbidden")
    assert kinds(decision) == ["Judge"]


def test_a_tp_that_cannot_be_ends_at_once() -> None:
    run = Run({"workload": {"tp": 3}})
    decision = run.plan()
    assert condition(run, names.FINISHED) == ("True", "ImpossibleTP")
    assert "tp 3 does not divide" in decision.status.message


def test_an_attempt_says_how_many_devices_compute_and_how_many_the_node_has() -> None:
    """Its workers are told both: what a match says of the other devices is nothing."""
    amounts = {"nvidia.com/gpu": 7.0}
    sick = node("sick", gpus=8, cordoned=True, capacity=amounts, allocatable=amounts)
    run = Run({"resources": {"devices": "allocatable"}}, world(sick, node("well", gpus=8)))
    status = run.plan().status
    attempt = status.attempts[0]
    assert (attempt.devices, attempt.tp, attempt.node_devices) == (7, 4, 8)
    found = status.condition(names.PAIRED)
    assert found is not None
    assert "computes on 4 of its 8 nvidia.com/gpu" in found.message
    source = manifest_source(run.look(), attempt)
    assert (source.run.tp, source.devices, source.node_devices) == (4, 7, 8)
    older = manifest_source(run.look(), attempt.model_copy(update={"tp": 0, "node_devices": 0}))
    assert (older.run.tp, older.devices) == (7, 7)


@pytest.mark.parametrize("path", ["/data", "/data/../etc", "/other/x"])
def test_a_host_path_beyond_what_is_allowed_is_refused(path: str) -> None:
    volume = {"name": "v", "mountPath": "/v", "hostPath": path}
    run = Run({"template": {"volumes": [volume]}})
    run.plan()
    assert condition(run, names.FINISHED) == ("True", "VolumeForbidden")


def test_what_is_missing_in_the_namespace_is_told_before_pods_are_made() -> None:
    run = Run(missing=("the claim weights does not exist in tandem",))
    decision = run.plan()
    assert condition(run, names.PAIRED) == ("False", "InputMissing")
    assert kinds(decision) == []
    assert decision.requeue_s is not None


def test_a_run_without_a_partner_waits_says_why_once_and_looks_again() -> None:
    run = Run(nodes=world(node("sick", cordoned=True)))
    first = run.plan()
    assert events(first) == ["NoReference"]
    second = run.plan(after=15)
    assert (events(second), second.status) == ([], first.status)
    run.world = world(node("sick", cordoned=True), node("well"))
    assert run.plan(after=15).status.attempt == 1


def test_a_second_run_on_the_same_suspect_waits() -> None:
    claims = (Claim("tandem/first", "sick", "well"),)
    run = Run(nodes=world(node("sick", cordoned=True), node("well"), node("well-2"), claims=claims))
    run.plan()
    assert condition(run, names.PAIRED) == ("False", "SuspectBusy")


def failed_twice(*others: Node) -> Run:
    """Two attempts on the one node that is like the suspect said nothing; as many as a node gets by default."""
    run = Run()
    for number in (1, 2):
        run.world = replace(run.world, tried={"well": number - 1})
        run.plan(after=100)
        run.start(number)
        run.stored(*range(1, number + 1))
        run.plan(after=1)
        run.change(Role.SUSPECT, phase="Failed", reason="Evicted")
        run.exit(Role.REFERENCE, 42, told("dead_peer"))
        run.plan(after=1)
        run.stored(*range(1, number + 1), state="orphaned")
        run.pods, run.jobs = [], []
    run.world = world(node("sick", cordoned=True), node("well"), *others, tried={"well": 2})
    return run


@pytest.mark.parametrize("others", [(), (node("other", labels={"kubernetes.io/arch": "arm64"}, ready=False),)])
def test_a_run_whose_every_reference_has_had_its_attempts_is_judged(others: tuple[Node, ...]) -> None:
    """A third attempt is left, and no node for it: the run would wait for ever, and hold its suspect."""
    run = failed_twice(*others)
    decision = run.plan(after=100)
    assert decision.status.attempt == 2
    assert condition(run, names.PAIRED) == ("False", "NoReference")
    assert kinds(decision) == ["Judge"]
    run.judge("inconclusive", "evicted")
    run.plan(after=5)
    assert condition(run, names.FINISHED) == ("True", "Inconclusive")


@pytest.mark.parametrize("how", ["NodeNotReady", "Busy", "NoRoom"])
def test_a_run_with_attempts_left_waits_for_a_reference_that_may_come(how: str) -> None:
    run = failed_twice(node("well-2", ready=how != "NodeNotReady"))
    claims = (Claim("tandem/other", "well-2", "x"),) if how == "Busy" else ()
    usage = {"well-2": [use("job", "well-2", cpu=8)]} if how == "NoRoom" else {}
    run.world = replace(run.world, claims=claims, usage=usage)
    decision = run.plan(after=100)
    assert how in [p.reason for p in decision.status.passed_over]
    assert kinds(decision) == []
    assert decision.requeue_s is not None
    run.world = replace(
        run.world, nodes=[n if n.ready else node("well-2") for n in run.world.nodes], claims=(), usage={}
    )
    assert run.plan(after=15).status.attempt == 3


# -- PostgreSQL -------------------------------------------------------------------------------------------


def test_an_outage_never_removes_pods_and_never_makes_a_verdict() -> None:
    run = started()
    run.facts = Facts(reachable=False, error="the database does not answer")
    decision = run.plan(after=1)
    assert decision.actions == ()
    assert condition(run, names.RECORDS_DELIVERED) == ("Unknown", "DatabaseUnreachable")
    for role in Role:
        run.exit(role, 40)
    decision = run.plan(after=1)
    assert "Judge" not in kinds(decision)
    assert decision.status.verdict == ""
    assert decision.requeue_s is not None
    run.stored(1)
    assert kinds(run.plan(after=1))[-1] == "Judge"


def test_launching_works_while_the_database_is_away_and_is_stored_later() -> None:
    run = Run()
    run.facts = Facts(reachable=False, error="away")
    assert kinds(run.plan()) == ["MakeChildren"]
    run.start()
    run.facts = Facts(reachable=True)
    assert do.StoreAttempt(1) in run.plan(after=1).actions


def test_step_and_counts_are_written_now_and_then_and_the_first_mismatch_at_once() -> None:
    run = started()
    run.stored(1, live=Live(attempt=1, step=3, sites=30, elements=300))
    before = run.plan(after=100).status
    assert before.step == 3
    run.stored(1, live=Live(attempt=1, step=4, sites=40, elements=400))
    assert run.plan(after=5).status.step == 3
    first = {"step": 5, "site": "fwd/ffn layer 1 out", "rank": 0, "mismatched": 2}
    run.stored(
        1, live=Live(attempt=1, step=5, sites=50, elements=500, mismatched_sites=1, mismatched_elements=2, first=first)
    )
    decision = run.plan(after=1)
    assert (decision.status.step, decision.status.counts.mismatched_elements) == (5, 2)
    assert decision.status.first_mismatch is not None
    assert events(decision) == ["Mismatch"]
    assert run.plan(after=1).status == decision.status
    assert run.plan(after=61).status == decision.status


def test_an_attempt_that_another_controller_judged_gets_the_reason_of_the_verdict() -> None:
    """Not a regular end that nobody saw."""
    run = started()
    run.stored(1, state="orphaned")
    run.judge("inconclusive", "evicted")
    assert run.plan(after=1).status.attempts[-1].reason == "evicted"


def test_a_verdict_that_another_controller_gave_is_taken_over() -> None:
    """It judged and died before it could write the status."""
    run = started()
    run.stored(1, state="closed")
    run.judge("mismatch")
    decision = run.plan(after=1)
    assert decision.status.verdict == "mismatch"
    assert decision.status.attempts[-1].ended_at is not None


@pytest.mark.parametrize("status", [None, 3, {"attempts": "x"}, {"conditions": [{"type": 3}]}, {"attempt": -5}])
def test_a_corrupt_status_is_planned_like_a_new_run(status: Any) -> None:
    run = Run()
    run.obj["status"] = status
    decision = run.plan()
    assert decision.status.attempts
    assert run.now == NOW
