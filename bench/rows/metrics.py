"""A scrape of the fleet's gauges and of the pairs' counters while a thousand runs are live."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from sqlalchemy import Engine, text

from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, quantile
from tandem.db import store
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect
from tandem.db.nodes import read_fleet
from tandem.ids import new_run_id
from tandem.metrics_fleet import FleetCollector, FleetFacts, count_runs, fleet_facts
from tandem.progress import ProgressEvent
from tandem.records import AttemptRow, RunRow
from tandem.serve import exposition, serve
from tandem.vocabulary import AttemptState, Module, Phase
from tandem_worker.link.state import Activity
from tandem_worker.metrics import Look, PairCollector, PairLabels

LIVE = 1000
SCRAPES = 300
BOUND_MS = 100.0
BOUND_SERIES = 5000


def measure(options: Options) -> list[Row]:
    """Scrapes over HTTP; nothing is kept: each one makes the database be asked, as where Prometheus comes seldom."""
    with embedded_database() as url:
        engine = connect(url)
        _live(engine)

        def ask() -> FleetFacts:
            with engine.connect() as conn:
                return fleet_facts(read_fleet(conn), count_runs(conn, time.time()))

        fleet = FleetCollector(ask, kept_s=0)
        asked, series = _scrapes(fleet, lambda: _idle(fleet))
        question = [_ms(ask) for _ in range(SCRAPES // 10)]
        engine.dispose()
    pair, of_pair = _scrapes(_pair())
    setting = options.setting(live_runs=LIVE, scrapes=SCRAPES)

    def ms(name: str, what: str, taken: list[float], q: float = 0.99, bound: float | None = None) -> Row:
        return row(f"metrics.{name}", what, quantile(taken, q), setting, unit="ms", bound=bound)

    def count(name: str, what: str, value: int, bound: float | None = None) -> Row:
        return row(f"metrics.{name}", what, Estimate(value, value, value, 1), setting, unit="series", bound=bound)

    return [
        ms("fleet", f"scrape of the fleet with {LIVE:,} live runs, 99th percentile", asked, bound=BOUND_MS),
        ms("fleet_question", "the question behind it, median", question, 0.5),
        count("fleet_series", "its series", series, BOUND_SERIES),
        ms("pair", "scrape of a reference worker, 99th percentile", pair),
        count("pair_series", "its series", of_pair),
    ]


def _idle(fleet: FleetCollector) -> None:
    while fleet.asking:
        time.sleep(0.001)


def _scrapes(collector: Collector, before: Callable[[], object] = lambda: None) -> tuple[list[float], int]:
    """Milliseconds of each scrape, and how many series it has; the first is not counted. ``before``: each of them."""
    registry = CollectorRegistry()
    registry.register(collector)
    server = serve(0, {"/metrics": exposition(registry)}, "127.0.0.1")
    url = f"http://127.0.0.1:{server.server_port}/metrics"

    def scrape() -> bytes:
        with urllib.request.urlopen(url, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    series = sum(not line.startswith(b"#") for line in scrape().splitlines())
    taken = []
    for _ in range(SCRAPES):
        before()
        taken.append(_ms(scrape))
    server.shutdown()
    server.server_close()
    return taken, series


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
