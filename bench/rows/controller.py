"""The controller with 200 live PairRuns on a real API server: how soon a pair is made, what rest and a restart cost.

The controller runs in a process of its own, as in its pod, with the settings of an installation; nodes, pods and the
steps in PostgreSQL are made by this one: each pair starts as soon as its Jobs are there, and steps every second.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil
from sqlalchemy import text

from bench.options import Options
from bench.replica import Replica
from bench.results import Row, row
from bench.stats import Estimate, quantile
from bench.telling import tell
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect

RUNS = 200
PER_SECOND = 5.0
QUIET_S = 60.0
"""How long the steady state is looked at."""
UP_S = 120.0


def measure(options: Options) -> list[Row]:
    """Boot an API server, run the controller, create the PairRuns, look at it at rest, start it again."""
    from cluster.handle import ApiServer
    from cluster.sessions import booted

    runs = RUNS if options.blocks >= 8 else 20
    with embedded_database() as url, booted("--nodes", "0") as root, tempfile.TemporaryDirectory() as folder:
        return _measure(ApiServer(root), url, Path(folder), runs)


def _measure(server: Any, url: str, folder: Path, runs: int) -> list[Row]:
    from cluster.api.hands import Hands
    from tandem.kube.informer import Informer
    from tandem.kube.paths import JOBS

    hands = Hands(server, url)
    for i in range(runs):
        hands.node(f"sick-{i:03}", cordoned=True)
        hands.node(f"well-{i:03}")
    settings = {"namespace": hands.namespace, "worker": {"image": "tandem-worker:1"}, "leaseSeconds": 3}
    setting = {"runs": runs, "per_second": PER_SECOND, "cores": os.cpu_count()}
    with _leading(server, folder, url, settings) as process:
        created: dict[str, float] = {}
        made: dict[str, dict[str, float]] = {}
        ready: Queue[Any] = Queue()

        def changed(key: str, before: Any, now: Any) -> None:
            if before is None and now is not None:
                name = now["metadata"]["labels"]["tandem.dev/pairrun"]
                made.setdefault(name, {})[key] = time.monotonic()
                ready.put(now)

        jobs = Informer(hands.kube, JOBS.path(hands.namespace), changed)
        jobs.start()
        jobs.wait_synced(UP_S)
        with _background(lambda: hands.make_pod(ready.get(timeout=1), runs=True)), _background(lambda: _step(url)):
            for i in range(runs):
                due = time.monotonic() + 1 / PER_SECOND
                name = f"run-{i:03}"
                created[name] = time.monotonic()
                hands.create(name)
                tell(f"created {i + 1} of {runs}")
                time.sleep(max(due - time.monotonic(), 0))
            _wait(lambda: process.metric('tandem_controller_runs{state="running"}') == runs)
            jobs.stop()
            waits = [max(made[name].values()) - created[name] for name in created]
            tell("at rest")
            quiet = _requests(server, QUIET_S)
            memory = psutil.Process(process.process.pid).memory_info().rss / 2**20
        steps = [hands.status(name).step for name in created]
        if min(steps) < 1:
            raise RuntimeError("a PairRun's status holds no step: nothing was followed")
    with _leading(server, folder, url, settings) as process:
        _wait(lambda: process.caught_up)
        restart = time.monotonic() - process.began
        if (seen := process.metric('tandem_controller_runs{state="running"}')) != runs:
            raise RuntimeError(f"{seen:.0f} of {runs} runs were there to be looked at")
    hands.close()
    limit = runs / 60 + 1
    return [
        row(
            "controller.made", "PairRun created to both Jobs made, 99th percentile", quantile(waits, 0.99), setting,
            unit="s", bound=1.0,
        ),
        row("controller.made_median", "the same, median", quantile(waits), setting, unit="s"),
        row(
            "controller.requests", "requests to the API server beyond leases and watches, all runs live",
            Estimate(quiet, quiet, quiet, 1), setting | {"seconds": QUIET_S}, unit="/s", bound=limit,
        ),
        row(
            "controller.memory", "resident memory, all runs live", Estimate(memory, memory, memory, 1), setting,
            unit="MB", bound=256.0,
        ),
        row(
            "controller.restart", "start of the process to every run reconciled, the Lease included",
            Estimate(restart, restart, restart, 1), setting, unit="s", bound=5.0,
        ),
    ]  # fmt: skip


@contextmanager
def _background(work: Callable[[], object]) -> Iterator[None]:
    """Do something again and again meanwhile; an empty queue is no failure, everything else is."""
    stop, failures = threading.Event(), list[BaseException]()

    def loop() -> None:
        while not stop.is_set():
            try:
                work()
            except Empty:
                pass
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(UP_S)
    if failures:
        raise RuntimeError("what should have gone on beside the controller ended") from failures[0]


_STEP = text(
    """
INSERT INTO attempt_totals (run_id, attempt, last_step, sites, elements)
SELECT run_id, attempt, 1, 100, 100000 FROM attempts WHERE state = 'running'
ON CONFLICT (run_id, attempt) DO UPDATE SET last_step = attempt_totals.last_step + 1,
  sites = attempt_totals.sites + 100, elements = attempt_totals.elements + 100000, updated_at = now()
"""
)


def _step(url: str) -> None:
    """One more step of every run that is stored, as the sinks of its references would write it."""
    begun = time.monotonic()
    engine = connect(url)
    with engine.begin() as connection:
        connection.execute(_STEP)
    engine.dispose()
    time.sleep(max(begun + 1 - time.monotonic(), 0))


@contextmanager
def _leading(server: Any, folder: Path, url: str, settings: dict[str, Any]) -> Iterator[Replica]:
    """A controller that leads; it is asked to end, as Kubernetes would."""
    replica = Replica(server.environment, folder, url, settings)
    try:
        _wait(lambda: replica.leads)
        yield replica
    finally:
        replica.end()


def _wait(check: Any) -> None:
    deadline = time.monotonic() + UP_S
    while not check():
        if time.monotonic() > deadline:
            raise RuntimeError("the controller did not get there in time")
        time.sleep(0.1)  # whoever asks more often slows down what is measured


def _requests(server: Any, seconds: float) -> float:
    """Requests a second that the API server counts, of the verbs and kinds that a controller at rest might send."""
    before = counted(server)
    time.sleep(seconds)
    return (counted(server) - before) / seconds


def counted(server: Any) -> float:
    """Requests that an API server has counted, beyond leases and watches.

    Its own housekeeping and the looks of whoever measures are left out by kind.
    """
    kinds = "pairruns|jobs|pods|nodes|secrets|services|networkpolicies|events"
    total = 0.0
    for line in server.kubectl("get", "--raw", "/metrics").splitlines():
        if not line.startswith("apiserver_request_total{") or 'verb="WATCH"' in line:
            continue
        if re.search(rf'resource="({kinds})"', line):
            total += float(line.rsplit(" ", 1)[1])
    return total
