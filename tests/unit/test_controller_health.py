"""Liveness and readiness over HTTP, of the real process object: alive as long as anything is heard of the cluster."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from clusters import POLICY, SETTINGS
from tandem.db.engine import connect
from tandem.kube.client import Kube
from tandem_controller import main
from tandem_controller.controller import QUIET_S, Controller
from tandem_controller.main import STANDBY_S, Process

pytest.importorskip("kubernetes")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A replica that stands by, of a cluster that does not answer; nothing of it runs but its servers."""
    server = {"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    config = {
        "apiVersion": "v1", "kind": "Config", "clusters": [server], "contexts": [context], "current-context": "none",
        "users": [{"name": "none", "user": {"token": "x"}}],
    }  # fmt: skip
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    engine = connect("postgresql://nobody@127.0.0.1:9/none")
    kube = Kube.connect(kubeconfig=str(path), namespace="tandem")
    made = Process(kube, engine, SETTINGS, POLICY, health=0, metrics=0)
    yield made
    made._stop()


def lead(process: Process) -> Controller:
    """It leads, as far as its probes can tell."""
    process.controller = Controller(
        process.kube, process.engine, 1, "cluster", POLICY, SETTINGS, process.metrics, leads=lambda: True,
        ended=lambda _: None,
    )  # fmt: skip
    return process.controller


def probe(process: Process, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{process.servers[0].server_port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def test_a_replica_that_stands_by_is_dead_once_its_election_hangs(process: Process) -> None:
    assert probe(process, "/healthz") == (200, "ok")
    assert probe(process, "/readyz") == (200, "ok")
    process.election._last_heard -= STANDBY_S + 1
    status, said = probe(process, "/healthz")
    assert status == 503
    assert "the Lease" in said


@pytest.mark.parametrize("which", range(4), ids=["pairruns", "jobs", "pods", "nodes"])
def test_a_leader_is_dead_once_nothing_is_heard_of_any_one_of_its_collections(process: Process, which: int) -> None:
    """Neither an event nor a list, for a resync and more: its watch hangs, however well the others do."""
    controller = lead(process)
    informer = controller.caches.informers[which]
    informer._last_heard -= SETTINGS.resync_seconds + QUIET_S - 5
    assert probe(process, "/healthz") == (200, "ok")
    informer._last_heard -= 10
    status, said = probe(process, "/healthz")
    assert status == 503
    assert f"nothing was heard of {informer.path}" in said


def test_a_leader_is_dead_once_one_of_its_threads_is(process: Process) -> None:
    controller = lead(process)
    controller._spawn(lambda: None, "worker-7")
    (thread,) = controller._threads
    thread.join(20)
    assert probe(process, "/healthz") == (503, "threads have ended: worker-7")
    controller._stopping.set()
    assert probe(process, "/healthz") == (200, "ok")


def test_a_leader_that_sees_nothing_yet_is_alive_and_not_ready(process: Process) -> None:
    controller = lead(process)
    starting = threading.Thread(target=controller.start, daemon=True)
    starting.start()
    deadline = time.monotonic() + 20
    while "does not answer" not in (said := probe(process, "/readyz"))[1]:
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    assert said[0] == 503
    assert probe(process, "/healthz") == (200, "ok")
    controller.stop()
    starting.join(20)
    assert not starting.is_alive()


def test_a_leader_that_cannot_tell_the_cluster_waits_and_ends_when_it_is_told_to(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "RETRY_S", 0.02)
    leading = threading.Thread(target=process._lead, args=(1,), daemon=True)
    leading.start()
    deadline = time.monotonic() + 20
    while "which cluster this is" not in (said := probe(process, "/readyz"))[1]:
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    assert probe(process, "/healthz") == (200, "ok")
    process._stopping.set()
    leading.join(20)
    assert not leading.is_alive()
    assert process.controller is None
