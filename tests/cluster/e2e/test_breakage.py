"""Pods, nodes, the API server and PostgreSQL break in the middle of a run: each ends rightly, nothing is doubled."""

from __future__ import annotations

import json
import time

import pytest

from cluster.e2e.installation import NAMESPACE, Tandem
from cluster.e2e.reaching import address, component, of_the_cluster, reached
from cluster.handle import BareCluster, until
from plugins.parts import skip
from tandem.pairrun import names
from tandem.vocabulary import Role

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.slow, pytest.mark.timeout(1200)]
LONG = {"durationSeconds": 18, "selfReplays": 2}
"""Long enough to break something in the middle; ends by itself."""
KILLED = {**LONG, "peerTimeoutSeconds": 8}
"""The side that lives notices sooner than by default."""


def whole(tandem: Tandem, name: str) -> None:
    """The records of every conclusive attempt are complete: the closing record's counts are those of the rows."""
    shown = tandem.show(name)
    assert shown["reason"] == "completed", shown["sentence"]
    assert shown["steps_compared"] > 0


def test_a_reference_that_is_deleted_ends_the_pair_cleanly_and_what_was_compared_counts(tandem: Tandem) -> None:
    """A drain, an eviction: the worker is asked to stop, the pair runs its end controls and closes."""
    with tandem.quarantined():
        tandem.create("drained", workload={"durationSeconds": 600, "selfReplays": 2})
        tandem.stepping("drained")
        pod = tandem.pod("drained", Role.REFERENCE)
        tandem.cluster.kubectl("delete", "pod", pod, "--namespace", NAMESPACE, "--wait=false")
        status = tandem.verdict("drained")
    assert (status.verdict, len(status.attempts)) == ("match", 1), status
    whole(tandem, "drained")
    tandem.delete("drained")


@pytest.mark.parametrize("role", list(Role))
def test_situations_18_and_19_a_worker_that_is_killed_costs_an_attempt_and_no_verdict(
    tandem: Tandem, machines: BareCluster, role: Role
) -> None:
    name = f"killed-{role}"
    with tandem.quarantined():
        tandem.create(name, workload=KILLED)
        tandem.stepping(name)
        machines.enter(
            tandem.suspect if role is Role.SUSPECT else tandem.reference, "pkill", "-9", "-f", "tandem_worker pod"
        )
        status = tandem.verdict(name)
    assert status.verdict == "match", status
    assert len(status.attempts) == 2
    # What was done to it, and not what its partner says of it.
    assert (status.attempts[0].reason, status.attempts[0].infrastructure) == (f"{role}_killed", True), status
    whole(tandem, name)
    tandem.delete(name)


def test_situation_14_postgresql_gone_for_a_minute_holds_the_verdict_back_and_loses_nothing(tandem: Tandem) -> None:
    if not tandem.keeps_records():
        skip("disk")
    scale = ["scale", "statefulset/tandem-postgres", "--namespace", NAMESPACE]
    with tandem.quarantined():
        tandem.create("dry", workload=LONG)
        tandem.stepping("dry")
        tandem.cluster.kubectl(*scale, "--replicas=0")
        gone = time.monotonic()
        try:
            tandem.wait_for("dry", names.RECORDS_DELIVERED, "Unknown", "DatabaseUnreachable", 60)
            until("a minute without it", lambda: time.monotonic() - gone > 60, 90)
            assert tandem.status("dry").verdict == ""
        finally:
            tandem.cluster.kubectl(*scale, "--replicas=1")
        status = tandem.verdict("dry")
    assert (status.verdict, len(status.attempts)) == ("match", 1), status
    whole(tandem, "dry")
    tandem.delete("dry")


def test_a_node_whose_kubelet_dies_mid_run_ends_by_what_the_workers_say(tandem: Tandem, machines: BareCluster) -> None:
    """NotReady alone stops nobody: the containers live, and the records decide."""
    with tandem.quarantined():
        tandem.create("notready", workload={**LONG, "durationSeconds": 60})
        tandem.stepping("notready")
        machines.stop(f"kubelet@{tandem.suspect}")
        try:
            until("the node to be NotReady", lambda: not machines.node_is_ready(tandem.suspect), 50)
            assert not tandem.status("notready").holds(names.FINISHED)
            status = tandem.verdict("notready")
        finally:
            machines.start(f"kubelet@{tandem.suspect}")
            until("the node", lambda: machines.node_is_ready(tandem.suspect), 120)
    assert (status.verdict, len(status.attempts)) == ("match", 1), status
    whole(tandem, "notready")
    tandem.delete("notready")


def test_a_node_without_power_ends_the_attempt_as_infrastructure(tandem: Tandem, machines: BareCluster) -> None:
    with tandem.quarantined():
        tandem.create("dark", workload={"durationSeconds": 120, "peerTimeoutSeconds": 5}, retry={"maxAttempts": 1})
        tandem.stepping("dark")
        machines.stop(tandem.suspect)
        try:
            status = tandem.verdict("dark")
        finally:
            machines.start(tandem.suspect)
            until("the node", lambda: machines.node_is_ready(tandem.suspect), 120)
    assert status.verdict == "inconclusive"
    assert status.reason in ("node_lost", "dead_peer", "half_open_link", "evicted_by_taint", "pod_deleted"), status
    assert status.attempts[0].infrastructure, status
    tandem.delete("dark")


def test_situation_18_a_suspect_stuck_terminating_does_not_hold_the_next_attempt(
    tandem: Tandem, machines: BareCluster
) -> None:
    """Its worker hangs, so that nothing drains; its pod's object stays after the container is gone."""
    with tandem.quarantined():
        tandem.create("stuck", workload=KILLED)
        tandem.stepping("stuck")
        pod = tandem.pod("stuck", Role.SUSPECT)
        machines.enter(tandem.suspect, "pkill", "-STOP", "-f", "tandem_worker pod")
        patch = json.dumps({"metadata": {"finalizers": ["test.tandem.dev/stuck"]}})
        tandem.cluster.kubectl("patch", "pod", pod, "--namespace", NAMESPACE, "--type=merge", "-p", patch)
        tandem.cluster.kubectl("delete", "pod", pod, "--namespace", NAMESPACE, "--wait=false", "--grace-period=1")
        try:
            status = tandem.verdict("stuck")
            assert tandem.cluster.get("pod", pod, "--namespace", NAMESPACE)["metadata"]["deletionTimestamp"]
        finally:
            tandem.cluster.kubectl(
                "patch", "pod", pod, "--namespace", NAMESPACE, "--type=merge", "-p", '{"metadata":{"finalizers":[]}}'
            )  # fmt: skip
    assert (status.verdict, len(status.attempts)) == ("match", 2), status
    tandem.delete("stuck")


def test_a_suspect_that_outlives_its_pairrun_reaches_nobody(tandem: Tandem, machines: BareCluster) -> None:
    """Both pods hang while they are asked to stop. The policies of their attempt went with the PairRun, as is seen when
    the reference lets others in: from then on the suspect is held by the installation's alone, and reaches nobody.
    """
    own, name = ["-l", names.LABEL_PAIR, "--namespace", NAMESPACE], "outlived"
    with tandem.quarantined():
        tandem.create(name, workload={"durationSeconds": 600, "selfReplays": 2})
        tandem.stepping(name)
        uid = tandem.get(name)["metadata"]["uid"]
        pods = {role: tandem.pod(name, role) for role in Role}
        partner = address(tandem, "pod", pods[Role.REFERENCE])
        targets = {
            "partner": (partner, names.LINK_PORT),
            "postgresql": (address(tandem, "pod", "tandem-postgres-0"), 5432),
            "postgresql's service": (address(tandem, "service", "tandem-postgres"), 5432),
            "another pod": (component(tandem, "controller")["status"]["podIP"], 8081),
            **of_the_cluster(tandem),
        }

        def opened() -> bool:
            """Whether the suspect's node, which is no pod, reaches the reference's."""
            knock = f"timeout 3 bash -c '</dev/tcp/{partner}/{names.LINK_PORT}' && echo open || echo closed"
            return machines.enter(tandem.suspect, "sh", "-c", f"({knock}) 2>/dev/null") == "open"

        for node in machines.nodes:
            machines.enter(node, "pkill", "-STOP", "-f", "tandem_worker pod")
        try:
            assert not opened()
            tandem.cluster.kubectl("delete", "pairrun", name, "--namespace", NAMESPACE)
            until("the end of the attempt's own policies", opened, 25)
            assert not tandem.cluster.get("networkpolicies", *own)["items"]
            assert reached(tandem, pods[Role.SUSPECT], "", targets) == set()
            leaves = tandem.cluster.get("pod", pods[Role.SUSPECT], "--namespace", NAMESPACE)
            assert leaves["metadata"]["deletionTimestamp"]
            assert reached(tandem, pods[Role.REFERENCE], "", targets) == set(targets)
        finally:
            for node in machines.nodes:
                machines.enter(node, "sh", "-c", "pkill -9 -f 'tandem_worker po[d]' || true")
        until(f"nothing of {name}", lambda: not tandem.children(uid), 90)


def test_a_pairrun_deleted_mid_run_leaves_no_object_and_a_closed_run(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create("dropped", workload={"durationSeconds": 600})
        tandem.stepping("dropped")
        run = tandem.status("dropped").run_id
        tandem.delete("dropped")

        def closed() -> bool:
            words = [
                "exec",
                "--namespace",
                NAMESPACE,
                "deploy/tandem-controller",
                "--",
                "tandem",
                "show",
                run,
                "--json",
            ]
            shown = json.loads(tandem.cluster.kubectl(*words))
            # Its pods were asked to stop: a pair that drained before its network went has a regular end.
            found = (shown["verdict"], shown["reason"])
            assert found in (("inconclusive", "pairrun_deleted"), ("match", "completed")), shown["sentence"]
            return True

        until("the closed run", closed, 150)
