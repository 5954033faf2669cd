"""Pods that Kubernetes does not make: why is only in the events of their Jobs, and reaches the condition at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusters import Run, condition
from tandem.kube.client import Kube, Listing
from tandem.kube.errors import Forbidden
from tandem.pairrun import names
from tandem.vocabulary import Role
from tandem_controller.refusals import REMEMBERED_S, PodRefusals, newest

QUOTA = 'pods "check-1" is forbidden: exceeded quota: small'


class Events(Kube):
    """A namespace's events, counted by how often they were asked for."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.error: Forbidden | None = None

    def list(self, path: str, *, label_selector: str | None = None, field_selector: str | None = None) -> Listing:
        self.asked.append(f"{path}?{field_selector}")
        if self.error is not None:
            raise self.error
        return Listing(self.items, "1")


def refused(run: Run, sentence: str) -> None:
    """Both Jobs are there, the reference's pod too; the suspect's is not made."""
    run.make()
    run.pods = [pod for pod in run.pods if pod.role is Role.REFERENCE]
    run.jobs = [replace(job, refused=sentence) if job.role is Role.SUSPECT else job for job in run.jobs]


def test_the_newest_event_counts_whatever_says_when_it_was() -> None:
    events = [
        {"message": "Error creating: old", "lastTimestamp": "2027-01-15T08:00:00Z"},
        {"message": f"Error creating: {QUOTA}\n", "eventTime": "2027-01-15T08:02:00Z", "lastTimestamp": None},
        {"message": "older", "series": {"lastObservedTime": "2027-01-15T08:01:00Z"}},
    ]
    assert newest(events) == QUOTA
    assert newest([]) == ""


def test_a_job_is_asked_about_now_and_then_and_a_right_that_is_missing_is_named() -> None:
    kube, clock = Events(), [0.0]
    refusals = PodRefusals(kube, clock=lambda: clock[0])
    kube.items = [{"message": QUOTA, "lastTimestamp": "2027-01-15T08:00:00Z"}]
    for _ in range(3):
        assert refusals.of("tandem", "job-1") == QUOTA
    assert len(kube.asked) == 1
    assert kube.asked[0].endswith("involvedObject.kind=Job,involvedObject.name=job-1,reason=FailedCreate")
    clock[0] += REMEMBERED_S + 1
    kube.error = Forbidden(403, "Forbidden", "no", "list", "events", "tandem")
    assert "not allowed to list events in namespace tandem" in refusals.of("tandem", "job-1")


def test_why_a_pod_is_not_made_is_in_the_condition_and_in_the_end() -> None:
    run = Run({"startDeadlineSeconds": 60, "retry": {"maxAttempts": 2}})
    run.plan()
    refused(run, QUOTA)
    decision = run.plan(after=6)
    assert condition(run, names.RUNNING) == ("False", "Starting")
    found = run.look().status.condition(names.RUNNING)
    assert found is not None
    assert found.message == f"the suspect's pod was not made: {QUOTA}"
    assert decision.requeue_s == pytest.approx(10, abs=1)
    last = run.plan(after=60).status.attempts[-1]
    assert (last.reason, last.infrastructure) == ("pod_refused", True)
    assert QUOTA in last.message


def test_a_pod_that_was_made_after_all_is_waited_for_as_ever() -> None:
    run = Run()
    run.plan()
    refused(run, QUOTA)
    run.plan(after=6)
    run.make()
    run.jobs = [replace(job, refused=QUOTA) for job in run.jobs]
    run.plan(after=1)
    found = run.look().status.condition(names.RUNNING)
    assert found is not None
    assert "not made" not in found.message
