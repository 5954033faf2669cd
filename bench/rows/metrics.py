"""Scrapes of the API, of a controller and of a pair's reference while a thousand runs are live."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection

import httpx2
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text

from bench.api import Api, served
from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, quantile
from tandem.db import store
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect
from tandem.db.nodes import read_fleet
from tandem.ids import new_run_id
from tandem.metrics_fleet import FleetFacts, count_runs, fleet_facts
from tandem.pairrun import names
from tandem.pairrun.status import read_status, timestamp
from tandem.progress import ProgressEvent
from tandem.records import AttemptRow, RunRow
from tandem.serve import exposition, serve
from tandem.vocabulary import AttemptState, Kind, Module, Phase
from tandem_controller.metrics import REASONS, Metrics
from tandem_worker.link.state import Activity
from tandem_worker.metrics import Look, PairCollector, PairLabels

LIVE = 1000
SCRAPES = 300
EVERY_S = 0.05
"""Between two scrapes: in all, the question behind the fleet's gauges is asked some times."""
BOUND_MS = 100.0
BOUND_SERIES = 5000
NOWHERE = "01a22cc1-d103-7888-87fa-7d0f4c4e4b65"
"""A run that is not there: another status of the same routes."""


def measure(options: Options) -> list[Row]:
    """Scrapes of three kinds of processes, one after the other."""
    with embedded_database() as url:
        engine = connect(url)
        _live(engine)

        def ask() -> FleetFacts:
            with engine.connect() as conn:
                return fleet_facts(read_fleet(conn), count_runs(conn, time.time()))

        with served(url) as api:
            first = _ms(lambda: _scrape(api.port))
            _every_route(engine, api)
            asked, told = _scrapes(api.port)
            if f'tandem_fleet_live_runs{{workload="submodule"}} {LIVE:.1f}' not in told:
                raise RuntimeError(f"the API does not tell of {LIVE} live runs")
        question = [_ms(ask) for _ in range(SCRAPES // 10)]
        engine.dispose()
    with _told(_pair_process) as port:
        pair, of_pair = _scrapes(port)
    with _told(_controller_process, LIVE) as port:
        controller, of_controller = _scrapes(port)
        if f'tandem_controller_runs{{state="running"}} {LIVE:.1f}' not in of_controller:
            raise RuntimeError(f"the controller does not tell of {LIVE} live runs")
    setting = options.setting(live_runs=LIVE, scrapes=SCRAPES)

    def ms(name: str, what: str, found: Estimate, bound: float | None = None) -> Row:
        return row(f"metrics.{name}", what, found, setting, unit="ms", bound=bound)

    def count(name: str, what: str, text: str, bound: float | None = None) -> Row:
        return row(f"metrics.{name}", what, _once(_series(text)), setting, unit="series", bound=bound)

    return [
        ms("api", f"scrape of the API with {LIVE:,} live runs, 99th percentile", quantile(asked, 0.99), BOUND_MS),
        count("api_series", "its series, every route asked", told, BOUND_SERIES),
        ms("first", "its first scrape, which waits for the fleet", _once(first)),
        ms("fleet_question", "the question behind the fleet's gauges, median", quantile(question)),
        ms("controller", f"scrape of a controller with {LIVE:,} live runs, 99th percentile",
           quantile(controller, 0.99), BOUND_MS),
        count("controller_series", "its series", of_controller, BOUND_SERIES),
        ms("pair", "scrape of a reference worker, 99th percentile", quantile(pair, 0.99)),
        count("pair_series", "its series", of_pair),
    ]  # fmt: skip


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def _scrapes(port: int) -> tuple[list[float], str]:
    """Milliseconds of each scrape, and the last one's text; one before them is not counted."""
    text = _scrape(port)
    taken = []
    for _ in range(SCRAPES):
        began = time.perf_counter()
        text = _scrape(port)
        taken.append((time.perf_counter() - began) * 1e3)
        time.sleep(max(0.0, began + EVERY_S - time.perf_counter()))
    return taken, text


def _series(text: str) -> int:
    return sum(bool(line) and not line.startswith("#") for line in text.splitlines())


def _once(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _every_route(engine: Engine, api: Api) -> None:
    """One request of each route and page, of a run that there is and of one that is not: each status is a series."""
    with engine.connect() as conn:
        run = str(conn.scalar(text("SELECT run_id FROM runs LIMIT 1")))
    headers = {"Authorization": f"Bearer {api.token}"}
    with httpx2.Client(base_url=f"http://{api.host}:{api.port}", headers=headers, timeout=60) as client:
        paths = client.get("/openapi.json").json()["paths"]
        for path, item in paths.items():
            for method, (which, node) in product(item, ((run, "node-1"), (NOWHERE, "nowhere"))):
                address = path.format(run_id=which, name=node, table="steps")
                with client.stream(method, address) as answer:
                    if not address.endswith("/events"):
                        answer.read()
            client.request("GET", path.format(run_id=run, name="node-1", table="steps"), headers={"Authorization": ""})
        for page in ("/", "/console/runs", "/console/launch", "/console/sign-in", f"/console/runs/{run}",
                     f"/console/runs/{run}/now", f"/console/runs/{run}/report", f"/console/runs/{run}/mismatches",
                     "/console/nodes/node-1", "/console/nowhere"):  # fmt: skip
            client.get(page)


@contextmanager
def _told(work: Callable[..., None], *arguments: int) -> Iterator[int]:
    """A process that serves what it tells, and its port."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield int(mine.recv())
    finally:
        process.kill()
        process.join()


def _serve(registry: CollectorRegistry, port: Connection) -> None:
    server = serve(0, {"/metrics": exposition(registry)}, "127.0.0.1")
    port.send(server.server_port)
    threading.Event().wait()


def _pair_process(port: Connection) -> None:
    registry = CollectorRegistry()
    registry.register(_pair())
    _serve(registry, port)


def _controller_process(port: Connection, live: int) -> None:
    """A controller's registry over PairRuns that run, as its cache has them: each scrape looks through all."""
    now = timestamp(time.time())
    condition = {"status": "True", "reason": "Made", "message": "", "lastTransitionTime": now}
    conditions = [{"type": name, **condition} for name in (names.PAIRED, names.RUNNING)]
    statuses = [
        read_status({"phase": "Running", "attempt": 1, "progressAt": now, "conditions": conditions})
        for _ in range(live)
    ]
    metrics = Metrics()
    metrics.observe(lambda: 0, lambda: statuses)
    for reason in range(2 * REASONS):
        metrics.finished(Kind.SUSPECT, read_status({"reason": f"reason_{reason}"}))
    _serve(metrics.registry, port)


def _ms(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return (time.perf_counter() - began) * 1e3


def _live(engine: Engine) -> None:
    """Runs of as many nodes, none of which has ended."""
    now = time.time()
    for number in range(LIVE):
        run_id = new_run_id(now + number * 1e-3, os.urandom(10))
        store.create_run(
            engine,
            RunRow(
                run_id=run_id, created_at=now, workload="submodule", kind="suspect", model="small", synthetic=False,
                reference_node=f"healthy-{number % 50}", suspect_node=f"node-{number}", spec={"tp": 8}, state="running",
            ),
        )  # fmt: skip
        store.start_attempt(
            engine,
            AttemptRow(
                run_id=run_id, attempt=1, state=AttemptState.RUNNING, started_at=now,
                reference_host=f"healthy-{number % 50}", suspect_host=f"node-{number}", devices=8,
            ),
        )  # fmt: skip
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("VACUUM ANALYZE"))


def _pair() -> PairCollector:
    places = frozenset((phase, module) for phase in Phase for module in Module)
    look = Look(ProgressEvent(phase="step"), Activity.COMPUTING, time.time(), places=places)
    return PairCollector(PairLabels("sick", "well", "submodule", "suspect", synthetic=False), lambda: look)
