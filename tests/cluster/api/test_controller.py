"""The whole controller against a real API server and a real PostgreSQL; pods and nodes are driven by hand."""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path

import pytest
from bench.rows.controller import counted
from prometheus_client import Counter, Histogram
from sqlalchemy import text

from cluster.api.hands import IMAGE, Hands, Term, forever, leading
from cluster.handle import ApiServer, until
from tandem.db import queries
from tandem.db.engine import connect, parse
from tandem.db.fence import Fence
from tandem.kube.paths import PAIRRUNS, PODS, SECRETS
from tandem.pairrun import names
from tandem.pairrun.status import timestamp
from tandem.vocabulary import Role
from tandem_controller import controller as controller_module

pytestmark = pytest.mark.needs("api-server")
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}


def dead_peer() -> str:
    return json.dumps({"reason": "dead_peer", "message": "gone"})


# -- a life ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "verdict"), [(0, "match"), (7, "mismatch")])
def test_a_quarantined_node_gets_its_partner_and_its_verdict(
    pair: Hands, tmp_path: Path, rows: int, verdict: str
) -> None:
    with leading(pair):
        pair.create()
        pair.wait_for(names.PAIRED, "True")
        status = pair.status()
        assert status.suspect is not None
        assert status.reference is not None
        assert (status.suspect.node, status.suspect.reason) == (f"sick-{pair.namespace}", "cordoned")
        assert status.reference.node == f"well-{pair.namespace}"
        pair.start()
        pair.finish(tmp_path, rows=rows)
        pair.wait_for(names.FINISHED, "True", verdict.capitalize())
        assert pair.condition(names.SUCCEEDED)[0] == ("True" if verdict == "match" else "False")
        assert pair.condition(names.RECORDS_DELIVERED) == ("True", "Delivered")
        status = pair.status()
        assert (status.verdict, status.step, status.reason) == (verdict, 12, "completed")
        assert (status.first_mismatch is None) is (rows == 0)
        until("the events", lambda: {"Paired", "Running", verdict.capitalize()} <= set(pair.events()))
    engine = connect(pair.database)
    records = queries.load_run(engine, pair.run_id())
    engine.dispose()
    assert (records.run.verdict, records.run.suspect_node) == (verdict, f"sick-{pair.namespace}")
    assert records.attempts[0].state == "closed"
    assert records.attempts[0].images == {"reference": IMAGE, "suspect": IMAGE}
    with engine.connect() as conn:
        assert conn.scalar(text("SELECT count(*) FROM run_profiles")) > 0  # type: ignore[operator]
    engine.dispose()


def test_nodes_that_run_different_images_under_one_name_never_match(pair: Hands, tmp_path: Path) -> None:
    """Whatever the workers' records say: all of them are there, and every check of theirs held."""
    with leading(pair, factsSeconds=60):
        pair.create()
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        until("the attempt's row", lambda: pair.deliver(tmp_path))
        pair.run(Role.SUSPECT, image="i@sha256:2")
        pair.wait_for(names.FINISHED, "True", "Inconclusive")
        assert pair.status().reason == "parity:image_digest"


@pytest.mark.parametrize("role", list(Role))
def test_a_pod_that_is_asked_to_stop_drains_and_what_was_compared_counts(
    pair: Hands, tmp_path: Path, role: Role
) -> None:
    with leading(pair):
        pair.create()
        pair.start()
        pair.wait_for(names.RUNNING, "True", "Running")
        pair.ask_to_stop(role)
        pair.wait_for(names.RUNNING, "True", "Stopping")
        pair.finish(tmp_path)
        pair.wait_for(names.FINISHED, "True", "Match")
        assert len(pair.status().attempts) == 1


def test_each_pod_gets_only_its_own_keys_and_they_are_made_once(pair: Hands) -> None:
    with leading(pair):
        pair.create()
        until("both Jobs", lambda: len(pair.jobs(1)) == 2)
        uid = pair.get()["metadata"]["uid"]
        secrets = {
            role: pair.kube.get(SECRETS.path(pair.namespace, names.child_name("check", uid, 1, role))) for role in Role
        }
        keys = {role: {k: base64.b64decode(v) for k, v in s["data"].items()} for role, s in secrets.items()}
        assert all(s["immutable"] for s in secrets.values())
        assert keys[Role.SUSPECT]["peer.public"] == keys[Role.REFERENCE]["own.public"]
        assert keys[Role.SUSPECT]["own.secret"] != keys[Role.REFERENCE]["own.secret"]
    with leading(pair, token=2):  # another controller takes over: the pair must not be cut apart
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        for role, before in secrets.items():
            now = pair.kube.get(SECRETS.path(pair.namespace, before["metadata"]["name"]))
            assert now["data"] == before["data"], role


def test_looking_again_writes_nothing(pair: Hands) -> None:
    with leading(pair) as term:
        pair.create()
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        until("the attempt's row", lambda: term.controller.facts.of(pair.run_id()).attempts)
        until("an empty queue", lambda: len(term.controller.queue) == 0)
        version = pair.get()["metadata"]["resourceVersion"]
        for _ in range(5):
            term.controller.queue.add(f"{pair.namespace}/check")
        forever(lambda: pair.get()["metadata"]["resourceVersion"] == version, 1.0)


# -- attempts ----------------------------------------------------------------------------------------------


def test_situations_18_and_19_a_restart_is_always_both_under_new_names(pair: Hands, tmp_path: Path) -> None:
    """The evicted pod stays, stuck; the next attempt has other names, keys and pods, and the reference's pod went."""
    with leading(pair):
        pair.create(retry={"backoffSeconds": 0})
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        pair.set_pod(Role.SUSPECT, EVICTED)
        pair.exit(Role.REFERENCE, 42, dead_peer())
        until("a second attempt", lambda: len(pair.jobs(2)) == 2)
        first = pair.status().attempts[0]
        assert (first.reason, first.infrastructure) == ("evicted", True)
        one, two = ({j["metadata"]["name"] for j in pair.jobs(number)} for number in (1, 2))
        assert not one & two
        pair.start(2)
        pair.wait_for(names.RUNNING, "True")
        assert pair.status().attempt == 2


def test_situation_25_attempts_are_capped_and_the_end_says_why(pair: Hands) -> None:
    with leading(pair):
        pair.create(retry={"backoffSeconds": 0, "maxAttempts": 2})
        for attempt in (1, 2):
            pair.start(attempt)
            pair.set_pod(Role.SUSPECT, EVICTED, attempt)
            pair.exit(Role.REFERENCE, 42, dead_peer(), attempt)
        pair.wait_for(names.FINISHED, "True", "Inconclusive")
        assert pair.status().reason == "evicted"
        assert [a.reason for a in pair.status().attempts] == ["evicted", "evicted"]
        assert len(pair.jobs()) <= 4


def test_a_pair_that_does_not_start_is_removed_whole(pair: Hands) -> None:
    with leading(pair):
        pair.create(startDeadlineSeconds=10, retry={"maxAttempts": 1})
        pair.make_pods()
        state = {"waiting": {"reason": "ErrImageNeverPull", "message": "image x is not present"}}
        waiting = {"name": "worker", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
        pair.set_pod(Role.SUSPECT, {"phase": "Pending", "containerStatuses": [waiting]})
        pair.wait_for(names.FINISHED, "True", "Inconclusive")
        assert pair.status().attempts[0].reason == "image_absent"
        until("no Jobs", lambda: not pair.jobs())


def test_a_suspended_run_loses_its_pods_and_no_attempt_and_goes_on_once_it_is_resumed(pair: Hands) -> None:
    def suspend(wanted: bool) -> None:
        pair.kube.patch(PAIRRUNS.path(pair.namespace, "check"), {"spec": {"suspend": wanted}})

    with leading(pair):
        pair.create(retry={"maxAttempts": 1, "backoffSeconds": 600})
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        suspend(True)
        pair.wait_for(names.RUNNING, "False", "Suspended")
        until("no Jobs", lambda: not pair.jobs())
        assert pair.status().attempts[0].reason == "suspended"
        suspend(False)
        pair.start(2)
        pair.wait_for(names.RUNNING, "True", "Running")
        assert pair.status().attempt == 2


def test_an_active_deadline_that_is_raised_mid_run_is_raised_for_the_jobs_too(pair: Hands) -> None:
    """What a real API server lets be changed of a Job that runs; and taken away again."""
    with leading(pair):
        pair.create(activeDeadlineSeconds=60)
        pair.start()
        pair.wait_for(names.RUNNING, "True")

        def limits() -> set[int | None]:
            return {job["spec"].get("activeDeadlineSeconds") for job in pair.jobs(1)}

        assert limits() == {960}
        for limit, there in ((3600, {4500}), (None, {None})):
            pair.kube.patch(PAIRRUNS.path(pair.namespace, "check"), {"spec": {"activeDeadlineSeconds": limit}})
            until("the Jobs' limit", lambda there=there: limits() == there)
        assert pair.condition(names.REFUSED) == ("", "")


# -- other runs, other people ------------------------------------------------------------------------------


def test_a_second_run_on_the_same_suspect_waits_for_the_first(pair: Hands, tmp_path: Path) -> None:
    pair.node("well-2")
    with leading(pair):
        pair.create("first")
        pair.wait_for(names.PAIRED, "True", name="first")
        pair.create("second")
        message = pair.wait_for(names.PAIRED, "False", "SuspectBusy", name="second")
        assert f"{pair.namespace}/first" in message
        pair.start(name="first")
        pair.finish(tmp_path, name="first")
        pair.wait_for(names.FINISHED, "True", name="first")
        pair.wait_for(names.PAIRED, "True", name="second")


def test_situation_8_a_swap_asks_postgresql_which_reference_was_used_before(pair: Hands, tmp_path: Path) -> None:
    with leading(pair):
        pair.create("first")
        pair.start(name="first")
        pair.finish(tmp_path, name="first")
        pair.wait_for(names.FINISHED, "True", "Match", name="first")
        sick = {"nodeName": f"sick-{pair.namespace}"}
        pair.create("swap", kind="swap", suspect=sick)
        pair.wait_for(names.PAIRED, "False", "NoReference", name="swap")
        assert [p.reason for p in pair.status("swap").passed_over if p.node.startswith("well")] == ["UsedBefore"]
        other = pair.node("other")
        pair.wait_for(names.PAIRED, "True", name="swap")
        found = pair.status("swap").reference
        assert found is not None
        assert found.node == other


def test_many_at_once_never_share_a_suspect_or_a_reference(hands: Hands) -> None:
    """Created in one moment, reconciled by several threads."""
    for i in range(6):
        hands.node(f"sick-{i}", cordoned=True)
        hands.node(f"well-{i}")
    with leading(hands):
        threads = [threading.Thread(target=hands.create, args=(f"run-{i}",)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(6):
            hands.wait_for(names.PAIRED, "True", name=f"run-{i}")
        nodes = [
            chosen.node
            for i in range(6)
            for chosen in (hands.status(f"run-{i}").suspect, hands.status(f"run-{i}").reference)
            if chosen is not None
        ]
        assert len(nodes) == len(set(nodes)) == 12


def test_many_that_wait_for_a_partner_ask_the_api_server_little(hands: Hands, api_server: ApiServer) -> None:
    """At rest: at most one request per run and minute, and one a second for all together."""
    runs, seconds = 40, 16.0
    for i in range(runs):
        hands.node(f"sick-{i}", cordoned=True)
    with leading(hands, pairingSeconds=15, factsSeconds=5, resyncSeconds=300, leaseSeconds=15):
        for i in range(runs):
            hands.create(f"run-{i}")
        for i in range(runs):
            hands.wait_for(names.PAIRED, "False", "NoPartner", name=f"run-{i}")
        before, begun = counted(api_server), time.monotonic()
        forever(lambda: True, seconds)
        asked = (counted(api_server) - before) / (time.monotonic() - begun)
    assert asked <= runs / 60 + 1


@pytest.mark.parametrize("seconds", [0, 3])
def test_a_finished_pairrun_goes_when_its_time_is_over_and_its_run_stays(
    pair: Hands, tmp_path: Path, seconds: int
) -> None:
    with leading(pair):
        pair.create(ttlSecondsAfterFinished=seconds)
        pair.start()
        run_id = pair.run_id()
        pair.finish(tmp_path)
        until("the object to go", lambda: not pair.kube.list(PAIRRUNS.path(pair.namespace)).items)
    engine = connect(pair.database)
    assert queries.load_run(engine, run_id).run.verdict == "match"
    engine.dispose()


def test_a_pairrun_deleted_mid_run_leaves_a_closed_run_behind(pair: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "SWEEP_S", 0.2)
    engine = connect(pair.database)
    with leading(pair) as term:
        pair.create()
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        run_id = pair.run_id()
        until("the attempt's row", lambda: term.controller.facts.of(run_id).attempts)
        pair.kube.delete(PAIRRUNS.path(pair.namespace, "check"))
        until("the verdict", lambda: queries.load_run(engine, run_id).run.verdict == "inconclusive")
        records = queries.load_run(engine, run_id)
        assert records.attempts[0].reason == "pairrun_deleted"
    engine.dispose()


def test_a_status_that_a_hand_edited_does_no_other_run_any_harm(pair: Hands, tmp_path: Path) -> None:
    """PostgreSQL refuses the rows of an attempt that nobody started, again and again, and is not away for that."""
    now = timestamp(time.time())
    suspect = {"node": "a", "image": "i\0"}
    attempt = {"number": 7, "startedAt": now, "suspect": suspect, "reference": {"node": "b"}}
    pair.create("broken")
    pair.kube.patch_status(PAIRRUNS.path(pair.namespace, "broken"), {"attempts": [attempt], "attempt": 7})
    with leading(pair, factsSeconds=60) as term:
        pair.wait_for(names.REFUSED, "True", "StoreAttempt", name="broken", seconds=30)
        pair.create("sound")
        pair.start(name="sound")
        pair.wait_for(names.RUNNING, "True", name="sound")
        forever(lambda: _reached(term, pair), 3.0)
        pair.finish(tmp_path, name="sound")
        pair.wait_for(names.FINISHED, "True", "Match", name="sound", seconds=30)
        assert _reached(term, pair)


def _reached(term: Term, pair: Hands) -> bool:
    return term.controller.facts.error is None and "DatabaseUnreachable" not in str(pair.get("sound")["status"])


def test_an_object_whose_look_raises_stops_no_other(pair: Hands, tmp_path: Path) -> None:
    """There is no number for its next attempt. It is tried again, later each time, and counted."""
    other = pair.node("sick-2", cordoned=True)
    pair.create("broken", suspect={"nodeName": other})
    pair.kube.patch_status(PAIRRUNS.path(pair.namespace, "broken"), {"attempt": 2**31 - 1})
    with leading(pair) as term:
        errors = term.controller.metrics.reconcile_errors
        until("an error", lambda: sample(errors, "_total") > 0)
        pair.create("sound")
        pair.start(name="sound")
        pair.finish(tmp_path, name="sound")
        pair.wait_for(names.FINISHED, "True", "Match", name="sound")
        assert term.controller.wrong() is None
        assert sample(errors, "_total") > 1
        assert sample(term.controller.metrics.reconcile_seconds, "_count") > sample(errors, "_total")


def sample(metric: Counter | Histogram, suffix: str) -> float:
    """The value of one sample of a metric."""
    return next(s.value for family in metric.collect() for s in family.samples if s.name.endswith(suffix))


# -- what breaks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd"])
def test_situations_11_and_12_a_restart_of_the_api_server_loses_nothing(
    pair: Hands, api_server: ApiServer, tmp_path: Path, part: str
) -> None:
    """Watches break in the middle of a run; what happened meanwhile is seen by a new list."""
    with leading(pair) as term:
        pair.create()
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        api_server.stop(part)
        if part == "kube-apiserver":  # without etcd it keeps watches open, and says nothing
            until("a broken watch", lambda: any(i.error for i in term.controller.caches.informers))
        api_server.start(part)
        pair.finish(tmp_path)
        pair.wait_for(names.FINISHED, "True", "Match", seconds=60)
        assert not term.over.is_set()
        assert term.controller.wrong() is None
        assert pair.status().attempt == 1


def test_a_database_that_is_away_holds_the_verdict_back_and_nothing_else(pair: Hands, tmp_path: Path) -> None:
    admin = parse(pair.database).set(drivername="postgresql", database="postgres").render_as_string(False)
    name = parse(pair.database).database
    engine = connect(admin)

    def database(up: bool) -> None:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {str(up).lower()}"))
            conn.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"))

    try:
        with leading(pair):
            database(up=False)
            pair.create()
            pair.start()
            pair.wait_for(names.RUNNING, "True")
            pair.wait_for(names.RECORDS_DELIVERED, "Unknown", "DatabaseUnreachable")
            pods = len(pair.kube.list(PODS.path(pair.namespace)).items)
            forever(lambda: len(pair.kube.list(PODS.path(pair.namespace)).items) == pods, 1.0)
            database(up=True)
            pair.finish(tmp_path)
            pair.wait_for(names.FINISHED, "True", "Match")
    finally:
        database(up=True)
        engine.dispose()


def test_situation_13_an_old_leader_is_refused_by_the_database_and_ends(pair: Hands) -> None:
    """It was suspended, believes in its lease, and goes on: what it writes to PostgreSQL carries its old token."""
    with leading(pair, token=5) as old:
        pair.create("before")
        until("the attempt's row", lambda: old.controller.facts.of(pair.run_id("before")).attempts)
        engine = connect(pair.database)
        Fence(engine, names.LEASE, 6).claim()
        engine.dispose()
        pair.node("sick-2", cordoned=True)
        pair.node("well-2")
        pair.create("after")
        until("the old leader's end", old.over.is_set)
        assert "newer" in old.reason
        assert not old.controller.facts.of(pair.run_id("after")).attempts
    with leading(pair, token=6) as new:
        until("the attempt's row", lambda: new.controller.facts.of(pair.run_id("after")).attempts)
        assert not new.over.is_set()
        assert [pair.status(name).attempt for name in ("before", "after")] == [1, 1]
