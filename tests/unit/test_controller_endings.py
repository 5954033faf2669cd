"""How attempts end: infrastructure kept apart from findings, what is tried again and what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusters import Run, condition, kinds, node, started, told, world
from tandem.pairrun import names
from tandem.vocabulary import Role
from tandem_controller import observed as do
from tandem_controller.observed import Facts, Live
from tandem_controller.reasons import ADMISSION, DISRUPTED, WAITING, final

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
def test_situation_31_what_happens_to_a_pod_from_outside_is_named_and_tried_again(
    values: dict[str, Any], reason: str
) -> None:
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
    run.change(Role.SUSPECT, leaves_at=run.now - 100)
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


def test_situation_10_a_node_that_no_longer_answers_is_told_as_such() -> None:
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
    assert decision.status.attempts[-1].reason == "parity:image_digest"
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


@pytest.mark.parametrize(
    ("before", "after", "job"), [(60, 600, 1500), (600, 60, 960), (60, None, None), (None, 60, 960)]
)
def test_an_active_deadline_that_changes_mid_run_holds_for_the_jobs_too(
    before: int | None, after: int | None, job: int | None
) -> None:
    """Kubernetes would end a Job by what it was made with, and the controller believe it."""
    run = started({"activeDeadlineSeconds": before} if before else {})
    assert kinds(run.plan(after=1)) == []
    run.obj["spec"] = {"activeDeadlineSeconds": after} if after else {}
    assert run.plan(after=1).actions == (do.SetDeadline(1, job),)
    run.jobs = [replace(each, deadline=job) for each in run.jobs]
    assert kinds(run.plan(after=1)) == []
    ended = run.plan(after=100).status.attempts[-1].reason
    assert ended == ("deadline" if after == 60 else "")


# -- asked to stop: a drain, an eviction, a taint --------------------------------------------------------

ASKED: list[dict[str, Any]] = [{}, *({"disrupted": reason} for reason in DISRUPTED)]


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("values", ASKED, ids=str)
def test_a_pod_that_is_asked_to_stop_may_drain_and_its_end_counts(values: dict[str, Any], role: Role) -> None:
    """Until its grace is over it works on; what the other says meanwhile is not the last word."""
    run = started()
    run.change(role, leaves_at=run.now + 60, **values)
    other = Role.SUSPECT if role is Role.REFERENCE else Role.REFERENCE
    decision = run.plan(after=5)
    assert condition(run, names.RUNNING) == ("True", "Stopping")
    assert decision.requeue_s is not None
    run.exit(other, 40 if other is Role.REFERENCE else 42, told("stopped"))
    assert run.plan(after=5).status.attempts[-1].ended_at is None
    run.exit(role, 40 if role is Role.REFERENCE else 42, told("stopped"))
    last = run.plan(after=1).status.attempts[-1]
    assert (last.reason, last.infrastructure) in (("completed", False), ("stopped", False))


def test_a_pod_that_outlives_its_grace_is_gone() -> None:
    run = started()
    run.change(Role.SUSPECT, leaves_at=run.now + 60, disrupted="EvictionByEvictionAPI")
    run.exit(Role.REFERENCE, 42, told("dead_peer"))
    assert run.plan(after=50).status.attempts[-1].ended_at is None
    assert run.plan(after=30).status.attempts[-1].reason == "evicted"


@pytest.mark.parametrize("closing", ["completed", "stopped"])
@pytest.mark.parametrize(("phase", "reason"), [("Failed", "Evicted"), ("Failed", "NodeLost")])
def test_an_attempt_whose_regular_end_is_stored_has_ended_so_whatever_became_of_its_pods(
    phase: str, reason: str, closing: str
) -> None:
    run = started()
    run.stored(1, live=Live(attempt=1, step=9, closing=closing))
    for role in Role:
        run.change(role, phase=phase, reason=reason)
    decision = run.plan(after=1)
    assert (decision.status.attempts[-1].reason, decision.status.attempts[-1].infrastructure) == (closing, False)
    assert "Judge" in kinds(decision)


@pytest.mark.parametrize(
    "live", [Live(attempt=1, closing="dead_peer"), Live(attempt=1), Live(attempt=0, closing="completed")]
)
def test_an_end_that_is_not_regular_or_of_another_attempt_changes_nothing(live: Live) -> None:
    run = started()
    run.stored(1, live=live)
    for role in Role:
        run.change(role, phase="Failed", reason="Evicted")
    assert run.plan(after=1).status.attempts[-1].reason == "evicted"


def test_while_postgresql_is_away_the_reference_may_wait_for_it_and_then_has_its_grace() -> None:
    run = started()
    run.exit(Role.SUSPECT, 42, told("stopped"))
    away, there = Facts(reachable=False, error="away"), run.facts
    run.facts = away
    assert run.plan(after=300).status.attempts[-1].ended_at is None
    run.facts = there
    assert run.plan(after=1).status.attempts[-1].ended_at is None
    assert run.plan(after=60).status.attempts[-1].ended_at is None
    assert run.plan(after=60).status.attempts[-1].ended_at is not None


def test_the_reference_does_not_wait_for_postgresql_for_ever() -> None:
    run = started()
    run.exit(Role.SUSPECT, 42, told("stopped"))
    run.facts = Facts(reachable=False, error="away")
    assert run.plan(after=600).status.attempts[-1].ended_at is None
    assert run.plan(after=200).status.attempts[-1].ended_at is not None


def test_the_images_that_the_nodes_told_are_kept_after_the_pods_are_gone() -> None:
    run = started()
    for role in Role:
        run.change(role, image_id="repo@sha256:1")
    run.plan(after=1)
    run.pods = []
    status = run.plan(after=1).status
    assert (status.attempts[-1].suspect.image, status.attempts[-1].reference.image) == ("repo@sha256:1",) * 2


def test_images_that_differ_count_even_when_both_sides_have_ended_well() -> None:
    run = started()
    run.exit(Role.REFERENCE, 40)
    run.exit(Role.SUSPECT, 40)
    for role in Role:
        run.change(role, image_id=f"repo@sha256:{role}")
    assert run.plan(after=1).status.attempts[-1].reason == "parity:image_digest"
