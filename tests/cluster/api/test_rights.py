"""What the API server refuses the controller: the PairRun names the verb, and nothing crashes or is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.api.hands import Hands, leading
from cluster.api.replicas import replica
from cluster.api.rights import granted
from cluster.handle import until
from tandem.kube.paths import EVENTS, LEASES, PAIRRUNS, SECRETS
from tandem.pairrun import names
from tandem.pairrun.status import timestamp

pytestmark = [pytest.mark.needs("api-server"), pytest.mark.needs("helm")]


def test_rights_that_are_too_narrow_are_named_in_the_condition(pair: Hands) -> None:
    with granted(pair, without=["patch jobs"]) as rights, leading(pair, kube=rights.kube):
        pair.create()
        message = pair.wait_for(names.RUNNING, "False", "ChildrenRefused")
        assert "patch jobs" in message
        assert not pair.jobs()
        assert "patch jobs" in pair.wait_for(names.REFUSED, "True", "MakeChildren")
        rights.set()
        until("both Jobs", lambda: len(pair.jobs(1)) == 2)
        pair.wait_for(names.REFUSED, "False", "NothingRefused")


def test_with_what_the_chart_grants_a_whole_life_is_refused_nothing(pair: Hands, tmp_path: Path) -> None:
    with granted(pair) as rights, leading(pair, kube=rights.kube):
        pair.create(ttlSecondsAfterFinished=3)
        pair.start()
        pair.finish(tmp_path)
        pair.wait_for(names.FINISHED, "True", "Match")
        assert pair.condition(names.REFUSED) == ("", "")
        until("the object to go", lambda: not pair.kube.list(PAIRRUNS.path(pair.namespace)).items)


def test_an_object_that_may_not_be_deleted_when_its_time_is_up_says_so(pair: Hands, tmp_path: Path) -> None:
    with granted(pair, without=["delete pairruns"]) as rights, leading(pair, kube=rights.kube):
        pair.create(ttlSecondsAfterFinished=1)
        pair.start()
        pair.finish(tmp_path)
        message = pair.wait_for(names.REFUSED, "True", "DeleteSelf")
        assert f"delete pairruns.tandem.dev in namespace {pair.namespace}" in message
        assert pair.condition(names.FINISHED)[0] == "True"
        rights.set()
        until("the object to go", lambda: not pair.kube.list(PAIRRUNS.path(pair.namespace)).items)


def test_children_that_may_not_be_removed_are_told_and_the_others_go(pair: Hands) -> None:
    with granted(pair, without=["delete secrets"]) as rights, leading(pair, kube=rights.kube):
        pair.create(retry={"maxAttempts": 1})
        pair.make_pods()
        pair.kube.patch(PAIRRUNS.path(pair.namespace, "check"), {"spec": {"suspend": True}})
        assert "delete secrets" in pair.wait_for(names.REFUSED, "True", "RemoveChildren")
        until("no Jobs", lambda: not pair.jobs())
        assert len(pair.kube.list(SECRETS.path(pair.namespace)).items) == 3


def test_why_kubernetes_makes_no_pod_is_read_out_of_the_jobs_events(pair: Hands) -> None:
    """A priority class that does not exist, a quota, pod security: the Job itself says nothing of it."""
    refused = 'pods "check-1" is forbidden: no PriorityClass with name urgent was found'
    with leading(pair):
        pair.create(startDeadlineSeconds=15, retry={"maxAttempts": 1}, template={"priorityClassName": "urgent"})
        until("both Jobs", lambda: len(pair.jobs(1)) == 2)
        now = timestamp(time.time())
        for job in pair.jobs(1):
            meta = job["metadata"]
            body = {
                "metadata": {"name": f"{meta['name']}.1", "namespace": pair.namespace}, "reason": "FailedCreate",
                "involvedObject": {
                    "apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "namespace": pair.namespace,
                    "uid": meta["uid"],
                },
                "message": f"Error creating: {refused}", "type": "Warning", "firstTimestamp": now,
                "lastTimestamp": now, "count": 1, "source": {"component": "job-controller"},
            }  # fmt: skip
            pair.kube.create(EVENTS.path(pair.namespace), body)
        until("the cause", lambda: refused in str(pair.status().condition(names.RUNNING)))
        pair.wait_for(names.FINISHED, "True", "Inconclusive")
        attempt = pair.status().attempts[0]
        assert (attempt.reason, attempt.infrastructure) == ("pod_refused", True)
        assert refused in attempt.message


@pytest.mark.parametrize("lacking", ["list jobs", "watch nodes", "list pairruns", "get namespaces", "get leases"])
def test_a_controller_that_may_not_look_stays_up_says_so_and_goes_on_once_it_may(
    pair: Hands, tmp_path: Path, lacking: str
) -> None:
    """Never a crash loop: no restart grants a right. It is alive, not Ready, and names the verb."""
    verb, resource = lacking.split()
    with (
        granted(pair, without=[lacking]) as rights,
        replica(pair, tmp_path / "replica", rights.kubeconfig) as running,
    ):
        pair.create()
        until("the sentence", lambda: f"not allowed to {verb} {resource}" in running.probe("/readyz")[1])
        assert running.probe("/readyz")[0] == 503
        assert running.probe("/healthz")[0] == 200
        assert f"not allowed to {verb} {resource}" in running.log.read_text()
        if verb == "list":
            assert not running.leads
            assert running.metric("tandem_controller_unseen_collections") >= 1
        rights.set()
        pair.wait_for(names.PAIRED, "True")
        until("readiness", lambda: running.probe("/readyz")[0] == 200)
        assert running.process.poll() is None
        assert running.leads
        assert running.metric("tandem_controller_unseen_collections") == 0


def test_a_right_that_is_taken_away_meanwhile_is_told_too(pair: Hands, tmp_path: Path) -> None:
    values = {"resyncSeconds": 5}
    with granted(pair) as rights, replica(pair, tmp_path / "replica", rights.kubeconfig, **values) as running:
        until("the lead", lambda: running.leads)
        assert running.probe("/readyz")[0] == 200
        rights.set(without=["list pods", "watch pods"])
        until("the sentence", lambda: "list pods" in running.probe("/readyz")[1])
        assert running.probe("/healthz")[0] == 200
        rights.set()
        until("readiness", lambda: running.probe("/readyz")[0] == 200)
        pair.create()
        pair.start()
        pair.wait_for(names.RUNNING, "True")


def test_a_lease_that_somebody_deletes_is_made_anew_by_whoever_stands_by(pair: Hands, tmp_path: Path) -> None:
    with (
        granted(pair) as rights,
        replica(pair, tmp_path / "one", rights.kubeconfig) as one,
    ):
        until("the first to lead", lambda: one.leads)
        with replica(pair, tmp_path / "two", rights.kubeconfig) as two:
            until("the second to stand by", lambda: two.probe("/readyz")[0] == 200)
            pair.kube.delete(LEASES.path(pair.namespace, names.LEASE))
            until("the second to lead", lambda: two.leads)
            assert one.process.wait(60) == 1  # its pod is started again, and stands by
            assert two.probe("/readyz")[0] == 200
            pair.create()
            pair.wait_for(names.PAIRED, "True")
