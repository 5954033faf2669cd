"""The controller's decisions as a pure function of what it sees."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from clusters import NOW, Run, node, world
from tandem.pairing.choose import Claim
from tandem.pairrun import names
from tandem.vocabulary import Role
from tandem_controller import observed as do
from tandem_controller.observed import Closing, Decision, Facts, Live
from tandem_controller.reasons import ADMISSION, DISRUPTED, WAITING, final


def kinds(decision: Decision) -> list[str]:
    return [type(a).__name__ for a in decision.actions if not isinstance(a, do.Event)]


def events(decision: Decision) -> list[str]:
    return [a.reason for a in decision.actions if isinstance(a, do.Event)]


def condition(run: Run, kind: str) -> tuple[str, str]:
    found = run.look().status.condition(kind)
    return (found.status, found.reason) if found else ("", "")


def told(reason: str, message: str = "as told") -> str:
    return json.dumps({"reason": reason, "message": message})


def started(values: dict[str, Any] | None = None, **options: Any) -> Run:
    """A run whose first attempt runs."""
    run = Run(values, **options)
    run.plan()
    run.start()
    run.stored(1)
    run.plan(after=5)
    return run


def test_a_new_run_is_paired_written_down_and_its_pods_made() -> None:
    run = Run()
    decision = run.plan()
    status = decision.status
    assert kinds(decision) == ["MakeChildren", "StoreAttempt"]
    assert events(decision) == ["Paired"]
    assert (status.suspect.node, status.reference.node, status.attempt) == ("sick", "well", 1)  # type: ignore[union-attr]
    assert status.attempts[0].suspect.boot_id == "boot-sick"
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


def test_the_verdict_is_postgres_word_and_never_an_exit_code() -> None:
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


# -- infrastructure and retries --------------------------------------------------------------------------

OUTSIDE: list[tuple[dict[str, Any], str]] = [
    *(
        ({"phase": "Failed", "reason": reason, "message": "m"}, ours)
        for reason, ours in ADMISSION.items()
        if ours != "deadline"
    ),
    *(({"phase": "Failed", "disrupted": reason}, ours) for reason, ours in DISRUPTED.items()),
    ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}, "device_gone"),
    ({"phase": "Failed", "exit_code": 137, "exit_reason": "OOMKilled"}, "oom_killed"),
    ({"phase": "Failed", "exit_code": 137, "exit_reason": "Error"}, "suspect_killed"),
]


@pytest.mark.parametrize(("values", "reason"), OUTSIDE, ids=[str(v) for v, _ in OUTSIDE])
def test_what_happens_to_a_pod_from_outside_is_named_and_tried_again(values: dict[str, Any], reason: str) -> None:
    """The reference notices that its peer is gone; what happened to the peer is the cause."""
    run = started()
    run.change(Role.SUSPECT, **values, ended_at=run.now)
    run.exit(Role.REFERENCE, 42, told("dead_peer"))
    decision = run.plan(after=1)
    last = decision.status.attempts[-1]
    assert (last.reason, last.infrastructure) == (reason, True)
    assert decision.status.verdict == ""
    assert condition(run, names.PAIRED) == ("False", "BackOff")
    assert "CloseAttempt" in kinds(decision)
    run.stored(1, state="closed")
    again = run.plan(after=31)
    assert again.status.attempt == 2
    assert "MakeChildren" in kinds(again)


def test_backoff_doubles_and_attempts_are_capped() -> None:
    run = Run({"retry": {"maxAttempts": 3, "backoffSeconds": 10, "maxAttemptsPerNode": 20}})
    run.plan()
    for number, wait in ((1, 10), (2, 20)):
        run.start(number)
        run.stored(*range(1, number + 1))
        run.change(Role.SUSPECT, phase="Failed", reason="Evicted")
        run.exit(Role.REFERENCE, 42, told("dead_peer"))
        run.plan(after=1)
        assert run.plan(after=wait - 2).status.attempt == number
        assert run.plan(after=3).status.attempt == number + 1
    run.start(3)
    run.stored(1, 2, 3)
    run.change(Role.SUSPECT, phase="Failed", reason="Evicted")
    run.exit(Role.REFERENCE, 42)
    decision = run.plan(after=1)
    assert kinds(decision)[-1] == "Judge"
    assert run.plan(after=1000).status.attempt == 3


@pytest.mark.parametrize(
    "reason", ["parity:jaxlib", "collective_order", "input", "setup", "protocol", "reference_differs"]
)
def test_what_the_next_attempt_would_meet_again_is_not_tried_again(reason: str) -> None:
    assert final(reason)
    run = started()
    run.exit(Role.SUSPECT, 42, told("peer_left"))
    run.exit(Role.REFERENCE, 42, told(reason))
    decision = run.plan(after=1)
    assert decision.status.attempts[-1].reason == reason
    assert kinds(decision)[-1] == "Judge"


def test_a_worker_that_crashes_is_no_finding() -> None:
    run = started()
    run.exit(Role.SUSPECT, 1, "Traceback ...\nValueError: x")
    run.exit(Role.REFERENCE, 42, told("dead_peer"))
    decision = run.plan(after=1)
    assert decision.status.attempts[-1].reason == "suspect_crashed"
    assert decision.status.verdict == ""


@pytest.mark.parametrize("message", ["", "{", "[]", '{"reason": 3}', '{"reason": "<b>"}', told("a\nb"), told("match")])
def test_a_suspects_last_words_are_taken_only_if_they_are_a_name(message: str) -> None:
    run = started()
    run.exit(Role.SUSPECT, 42, message)
    run.exit(Role.REFERENCE, 42, told("dead_peer", "line\nwith \x1b[31m colour"))
    decision = run.plan(after=1)
    last = decision.status.attempts[-1]
    assert last.reason in ("dead_peer", "match")
    assert last.message.isprintable()
    assert decision.status.verdict == ""


def test_one_side_that_ended_waits_for_the_other_but_not_for_ever() -> None:
    run = started()
    run.exit(Role.SUSPECT, 1)
    assert run.plan(after=5).status.attempts[-1].ended_at is None
    decision = run.plan(after=200)
    assert decision.status.attempts[-1].reason == "suspect_crashed"
    assert "RemoveChildren" in kinds(decision)


def test_situation_18_a_pod_stuck_terminating_does_not_hold_the_next_attempt() -> None:
    """Names carry the attempt; the reference's pod is removed, so its node is free."""
    run = started()
    run.change(Role.SUSPECT, leaving=True)
    run.exit(Role.REFERENCE, 42, told("dead_peer"))
    run.plan(after=1)
    stuck = list(run.pods)
    decision = run.plan(after=40)
    assert decision.status.attempt == 2
    assert run.pods == stuck


def test_situation_20_an_admission_error_after_a_reboot_is_infrastructure() -> None:
    run = Run()
    run.plan()
    run.make()
    run.stored(1)
    run.change(Role.SUSPECT, phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed")
    decision = run.plan(after=5)
    last = decision.status.attempts[-1]
    assert (last.reason, last.infrastructure) == ("unexpected_admission", True)
    assert "RemoveChildren" in kinds(decision)


@pytest.mark.parametrize(("waiting", "reason"), WAITING.items())
def test_situation_21_the_start_deadline_covers_image_pulls_and_names_the_cause(waiting: str, reason: str) -> None:
    run = Run({"startDeadlineSeconds": 100})
    run.plan()
    run.start()
    run.stored(1)
    run.change(Role.SUSPECT, phase="Pending", started_at=None, waiting=waiting, waiting_message="no such image")
    early = run.plan(after=50)
    if early.status.attempts[-1].ended_at is None:
        assert "no such image" in run.look().status.condition(names.RUNNING).message  # type: ignore[union-attr]
        decision = run.plan(after=60)
    else:
        decision = early
    last = decision.status.attempts[-1]
    assert (last.reason, last.infrastructure) == (reason, True)
    assert "no such image" in last.message
    assert "RemoveChildren" in kinds(decision)


def test_gang_one_side_without_a_place_removes_both() -> None:
    run = Run({"startDeadlineSeconds": 100})
    run.plan()
    run.start()
    run.stored(1)
    run.change(Role.SUSPECT, phase="Pending", started_at=None, node="", unschedulable="0/2 nodes are available")
    run.plan(after=50)
    decision = run.plan(after=60)
    assert decision.status.attempts[-1].reason == "unschedulable"
    assert do.RemoveChildren(1) in decision.actions


def test_pods_that_could_not_be_made_say_which_right_is_missing() -> None:
    failures = {"MakeChildren": "the controller may not create jobs in tandem: grant it the verb create"}
    run = Run(failures=failures)
    run.plan()
    run.stored(1)
    run.plan(after=5)
    assert condition(run, names.RUNNING) == ("False", "ChildrenRefused")
    assert "verb create" in run.look().status.condition(names.RUNNING).message  # type: ignore[union-attr]


def test_a_node_that_no_longer_exists_ends_the_attempt() -> None:
    run = started()
    run.world = world(node("well"))
    decision = run.plan(after=1)
    assert decision.status.attempts[-1].ended_at is None or decision.status.attempts[-1].reason == "node_lost"
    decision = run.plan(after=100)
    assert decision.status.attempts[-1].reason == "node_lost"


def test_different_images_under_one_name_are_a_parity_failure() -> None:
    run = started()
    for role in Role:
        run.change(role, image_id=f"repo@sha256:{role}")
    decision = run.plan(after=1)
    assert decision.status.attempts[-1].reason == "parity:image"
    assert kinds(decision)[-1] == "Judge"


def test_somebody_removes_a_job() -> None:
    run = started()
    run.jobs = [job for job in run.jobs if job.role is not Role.SUSPECT]
    run.pods = [pod for pod in run.pods if pod.role is not Role.SUSPECT]
    run.plan(after=1)
    decision = run.plan(after=100)
    assert decision.status.attempts[-1].reason == "job_deleted"


def test_the_active_deadline_ends_it_for_good() -> None:
    run = started({"activeDeadlineSeconds": 60})
    assert run.plan(after=30).status.attempts[-1].ended_at is None
    decision = run.plan(after=60)
    assert decision.status.attempts[-1].reason == "deadline"
    assert {"RemoveChildren", "Judge"} <= set(kinds(decision))


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
    assert run.plan(after=1).status.attempt == 2


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


def test_a_tp_that_cannot_be_ends_at_once() -> None:
    run = Run({"workload": {"tp": 3}})
    decision = run.plan()
    assert condition(run, names.FINISHED) == ("True", "ImpossibleTP")
    assert "tp 3 does not divide" in decision.status.message


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


def test_a_verdict_that_another_controller_gave_is_taken_over() -> None:
    """It judged and died before it could write the status."""
    run = started()
    run.stored(1, state="closed")
    run.facts = replace(run.facts, closings={1: Closing(1, "completed")})
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
