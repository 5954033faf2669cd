"""Real pods on real kubelets: pairs from the quarantined node to the verdict, and what keeps them from starting."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from cluster.e2e.installation import CACHE, NAMESPACE, Tandem
from cluster.e2e.reaching import address, component, listening, of_the_cluster, reached
from cluster.handle import BareCluster, until
from plugins import parts
from quiz import write_quiz
from tandem.pairrun import names
from tandem.vocabulary import Role

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.slow, pytest.mark.timeout(1200)]
OPEN = 18080
"""A port on which nothing of Tandem's listens."""


def test_a_quarantined_node_gets_its_partner_without_anyone_naming_one_and_matches(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create("match")
        status = tandem.verdict("match")
    assert (status.verdict, status.reason) == ("match", "completed"), status.message
    assert status.suspect is not None
    assert status.reference is not None
    assert (status.suspect.node, status.reference.node) == (tandem.suspect, tandem.reference)
    assert "cordoned" in status.suspect.reason
    assert status.holds(names.SUCCEEDED)
    shown = tandem.show("match")
    assert (shown["verdict"], shown["steps_compared"], shown["suspect_node"]) == ("match", 3, tandem.suspect)
    assert shown["synthetic"] is False
    tandem.delete("match")


def test_a_corrupting_suspect_is_found_with_its_rows_in_postgresql(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create("corrupt", workload={"fault": "demo", "steps": 3})
        status = tandem.verdict("corrupt")
    assert status.verdict == "mismatch", status.message
    assert status.holds(names.FAILED)
    assert status.first_mismatch is not None
    shown = tandem.show("corrupt")
    assert shown["synthetic"] is True
    assert shown["mismatched_elements"] == status.counts.mismatched_elements > 0
    assert shown["fault_log"]["unequal"] == 0
    tandem.delete("corrupt")


def test_a_gradient_run_measures_the_noise_of_a_corrupting_suspect(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create("noise", workload={"name": "gradient", "fault": "demo", "steps": 3})
        status = tandem.verdict("noise")
    assert status.verdict == "mismatch", status.message
    shown = tandem.show("noise")
    assert (shown["workload"], shown["steps_compared"]) == ("gradient", 3)
    assert {line["tensor"] for line in shown["table"]} == {"dw"}
    assert shown["mismatched_elements"] > 0
    tandem.delete("noise")


def test_a_training_whose_worker_is_killed_goes_on_from_what_both_sides_have_on_their_volumes(tandem: Tandem) -> None:
    """The second attempt begins at the last step of which each node has a checkpoint of its side, and says so."""
    if not isinstance(tandem.cluster, BareCluster):
        parts.skip("machines")
    workload = {"name": "training", "checkpoints": "/compiled/drift", "checkpointEvery": 2, "durationSeconds": 20}
    with tandem.quarantined():
        tandem.create("drift", workload={**workload, "peerTimeoutSeconds": 8})
        tandem.stepping("drift")
        until("a checkpoint of both sides", lambda: checkpoints(tandem, "drift"))
        tandem.cluster.enter(tandem.suspect, "pkill", "-9", "-f", "tandem_worker pod")
        until("a second attempt", lambda: tandem.status("drift").attempt == 2)
        last = max(checkpoints(tandem, "drift"))  # its pods have only just been made
        status = tandem.verdict("drift")
    assert (status.verdict, len(status.attempts)) == ("match", 2), status
    assert status.attempts[0].reason == "suspect_killed"
    assert status.message.endswith(f"; resumed from step {last}")
    shown = tandem.show("drift")
    assert shown["drift"]["resumed"] == {"2": last}
    assert shown["steps_compared"] > last
    assert max(checkpoints(tandem, "drift")) > last
    tandem.delete("drift")


def checkpoints(tandem: Tandem, folder: str) -> set[int]:
    """Steps whose checkpoint is whole on both nodes, each of its own side."""
    assert isinstance(tandem.cluster, BareCluster)
    held = []
    for node, role in ((tandem.reference, Role.REFERENCE), (tandem.suspect, Role.SUSPECT)):
        marks = tandem.cluster.enter(node, "find", f"{CACHE}/{folder}/{role}", "-name", "orbax.checkpoint").split()
        steps = {Path(mark).parent.name for mark in marks}
        held.append({int(step) for step in steps if step.isdecimal()})
    return held[0] & held[1]


def test_fine_tuning_asks_questions_from_a_volume(tandem: Tandem, tmp_path: Path) -> None:
    if not isinstance(tandem.cluster, BareCluster):
        parts.skip("machines")
    path = write_quiz(tmp_path, per_task=12)[0]
    for node in tandem.cluster.nodes:
        tandem.cluster.enter(node, "install", "-D", "-m", "0644", str(path), f"{CACHE}/quiz/{path.name}")
    workload = {
        "name": "finetune", "questions": [f"/compiled/quiz/{path.name}"], "steps": 2, "batch": 2, "sequence": 96,
        "heldOutPercent": 40,
    }  # fmt: skip
    with tandem.quarantined():
        tandem.create("quiz", workload=workload)
        status = tandem.verdict("quiz")
    assert status.verdict == "match", status.message
    shown = tandem.show("quiz")
    assert shown["workload"] == "finetune"
    assert shown["answers"]
    tandem.delete("quiz")


def test_the_suspect_reaches_its_partners_port_and_dns_and_nothing_else(tandem: Tandem) -> None:
    """Neither PostgreSQL, the API server, another pod nor a node; and nobody reaches it."""
    cluster = tandem.cluster
    with tandem.quarantined():
        tandem.create("walled", workload={"durationSeconds": 600})
        tandem.stepping("walled")
        pods = {role: tandem.pod("walled", role) for role in Role}
        uid = tandem.get("walled")["metadata"]["uid"]
        partner = address(tandem, "pod", pods[Role.REFERENCE])
        targets = {
            "partner": (partner, names.LINK_PORT),
            "partner's other port": (partner, names.METRICS_PORT),
            "postgresql": (address(tandem, "pod", "tandem-postgres-0"), 5432),
            "postgresql's service": (address(tandem, "service", "tandem-postgres"), 5432),
            "another pod": (component(tandem, "controller")["status"]["podIP"], 8081),
            "the API": (address(tandem, "service", "tandem-api"), 80),
            **of_the_cluster(tandem),
        }
        name = f"reference.{names.child_name('walled', uid, 1)}.{NAMESPACE}.svc"
        assert reached(tandem, pods[Role.SUSPECT], name, targets) == {"dns", "partner"}
        # Somebody listens at each of these ends: the same look from a pod that may finds them.
        controller = component(tandem, "controller")["metadata"]["name"]
        assert reached(tandem, pods[Role.REFERENCE], name, targets) == {"dns", *targets}
        own = {"suspect": (address(tandem, "pod", pods[Role.SUSPECT]), OPEN)}
        with listening(tandem, pods[Role.SUSPECT], OPEN):
            assert "suspect" in reached(tandem, pods[Role.SUSPECT], name, own)
            for pod in (controller, pods[Role.REFERENCE]):
                assert reached(tandem, pod, name, own | {"partner": (partner, names.LINK_PORT)}) <= {"dns", "partner"}
            assert "partner" not in reached(tandem, controller, name, {"partner": (partner, names.LINK_PORT)})
        spec = cluster.get("pod", pods[Role.SUSPECT], "--namespace", NAMESPACE)["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert "database" not in json.dumps(spec)
        cluster.kubectl(
            "patch", "pairrun", "walled", "--namespace", NAMESPACE, "--type=merge", "-p", '{"spec":{"suspend":true}}'
        )
        tandem.wait_for("walled", names.RUNNING, "False", "Suspended", 60)
    tandem.delete("walled")


# -- what keeps a pair from starting -------------------------------------------------------------------------


def test_situation_21_an_image_that_is_missing_is_named_and_both_sides_are_removed(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create(
            "no-image", template={"image": "localhost/nothing:1"}, retry={"maxAttempts": 1}, startDeadlineSeconds=60
        )
        status = tandem.verdict("no-image")
    assert status.verdict == "inconclusive"
    assert status.reason in ("image_absent", "image_pull"), status  # as the nodes are told to pull or not
    assert status.attempts[0].infrastructure
    tandem.delete("no-image")


def test_a_class_that_does_not_exist_is_told_although_only_the_jobs_events_say_so(tandem: Tandem) -> None:
    """The Job is made, its pod is not: by a real Job controller, whose events are read."""
    with tandem.quarantined():
        tandem.create(
            "no-class", template={"priorityClassName": "nowhere"}, retry={"maxAttempts": 1}, startDeadlineSeconds=40
        )
        until("the cause", lambda: "nowhere" in str(tandem.status("no-class").condition(names.RUNNING)), 35)
        status = tandem.verdict("no-class")
    assert (status.attempts[0].reason, status.attempts[0].infrastructure) == ("pod_refused", True), status
    assert "no PriorityClass with name nowhere was found" in status.attempts[0].message
    tandem.delete("no-class")


def test_situation_23_a_node_that_is_too_small_is_told_before_any_pod_is_made(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create("huge", resources={"device": "cpu", "memory": "10Ti"})
        message = tandem.wait_for("huge", names.PAIRED, "False", "SuspectTooSmall")
        assert "memory" in message
        assert not tandem.children(tandem.get("huge")["metadata"]["uid"])
    tandem.delete("huge")


def test_situation_5_no_like_node_waits_and_goes_on_once_there_is_one(tandem: Tandem) -> None:
    label = "node.kubernetes.io/instance-type"
    with tandem.quarantined():
        tandem.cluster.kubectl("label", "node", tandem.suspect, f"{label}=other")
        try:
            tandem.create("alone")
            message = tandem.wait_for("alone", names.PAIRED, "False", "NoReference")
            assert label in message
            [passed] = [p for p in tandem.status("alone").passed_over if p.role == "reference"]
            assert (passed.node, passed.reason) == (tandem.reference, "Unlike")
        finally:
            tandem.cluster.kubectl("label", "node", tandem.suspect, f"{label}-")
        tandem.wait_for("alone", names.PAIRED, "True")
    tandem.delete("alone")


def test_a_second_pairrun_on_the_same_suspect_waits_and_then_runs(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create("first")
        tandem.wait_for("first", names.PAIRED)
        tandem.create("second")
        tandem.wait_for("second", names.PAIRED, "False", "SuspectBusy")
        assert tandem.verdict("first").verdict == "match"
        assert tandem.verdict("second").verdict == "match"
    tandem.delete("first")
    tandem.delete("second")


def test_a_volume_that_does_not_exist_and_a_path_that_is_not_allowed_are_told(tandem: Tandem) -> None:
    with tandem.quarantined():
        claim = {"name": "w", "mountPath": "/w", "persistentVolumeClaim": "nowhere"}
        tandem.create("no-claim", template={"volumes": [claim]})
        assert "nowhere" in tandem.wait_for("no-claim", names.PAIRED, "False", "InputMissing")
        path = {"name": "w", "mountPath": "/w", "hostPath": "/etc"}
        tandem.create("no-path", template={"volumes": [path]})
        tandem.wait_for("no-path", names.FINISHED, "True", "VolumeForbidden")
    tandem.delete("no-claim")
    tandem.delete("no-path")


def test_a_worker_that_cannot_use_its_inputs_says_so_and_is_not_tried_again(tandem: Tandem) -> None:
    with tandem.quarantined():
        tandem.create("no-weights", workload={"weights": "/tmp/nothing"})
        status = tandem.verdict("no-weights")
    assert status.verdict == "inconclusive"
    assert len(status.attempts) == 1
    assert "/tmp/nothing" in status.attempts[0].message
    tandem.delete("no-weights")


def test_many_creations_at_one_moment_share_no_node(tandem: Tandem) -> None:
    """Two nodes, three runs: one runs, two wait, whatever the order."""
    with tandem.quarantined():
        threads = [
            threading.Thread(target=tandem.create, args=(f"crowd-{i}",), kwargs={"workload": {"durationSeconds": 600}})
            for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        def one() -> bool:
            paired = [tandem.status(f"crowd-{i}").holds(names.PAIRED) for i in range(3)]
            assert sum(paired) <= 1
            return sum(paired) == 1

        until("one pair", one)
        for i in range(3):
            tandem.delete(f"crowd-{i}")
