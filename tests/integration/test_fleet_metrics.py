"""Gauges of the fleet from a real database: right, one question for many scrapes, and gone while it is away."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import Engine, event

from db_samples import make_run
from node_runs import HOUR, node_run, store_run
from prometheus import lint, until
from tandem.db.nodes import read_fleet
from tandem.errors import DatabaseError
from tandem.metrics_fleet import (
    NAMED,
    REASONS,
    FleetCollector,
    FleetFacts,
    FleetGauges,
    RunCounts,
    count_runs,
    fleet_facts,
)
from tandem.vocabulary import ControlName
from tandem_api.metrics import _fleet
from tandem_api.reads.store import Store

NOW = time.time()


def told(collector: FleetGauges) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def asked(engine: Engine) -> FleetFacts:
    with engine.connect() as conn:
        return fleet_facts(read_fleet(conn), count_runs(conn, NOW))


def test_nodes_by_verdict_and_the_runs_of_the_last_day(engine: Engine) -> None:
    for records in (
        node_run(kind="null", suspect="well-1", reference="well-2", began=NOW - 50 * HOUR),
        node_run(hits={3: 5}, began=NOW - 48 * HOUR),
        node_run(hits={4: 6}, reference="other", kind="swap", began=NOW - 2 * HOUR),
        node_run(suspect="fresh", began=NOW - 3 * HOUR, missing=[ControlName.POSITIVE_START]),
        node_run(suspect="injected", synthetic=True, hits={1: 1}, began=NOW - HOUR),
    ):
        store_run(engine, records)
    make_run(engine)  # synthetic or not, it has no verdict yet
    found = told(FleetCollector(lambda: asked(engine)))
    assert found["tandem_api_database_up"] == 1
    assert found['tandem_fleet_nodes{verdict="corrupting"}'] == 1
    assert found['tandem_fleet_node_verdict{node="sick",verdict="corrupting"}'] == 1
    assert found['tandem_fleet_day_runs{verdict="mismatch",workload="submodule"}'] == 1
    assert found['tandem_fleet_day_runs{verdict="inconclusive",workload="submodule"}'] == 1
    (reason,) = [name for name in found if name.startswith("tandem_fleet_day_inconclusive_runs")]
    assert ":" not in reason
    assert found["tandem_fleet_day_tested_nodes"] == 1
    assert found["tandem_fleet_day_device_seconds"] == HOUR
    assert sum(value for name, value in found.items() if name.startswith("tandem_fleet_live_runs")) == 1
    assert not any("injected" in name for name in found)


def test_the_api_asks_both_questions_on_one_connection_in_one_snapshot(database_url: str, engine: Engine) -> None:
    """A run that ends between the two would be in both answers, or in none."""
    store_run(engine, node_run(hits={3: 5}, began=NOW - HOUR))
    store = Store(database_url)
    begun: list[str] = []
    event.listen(store._whole, "begin", lambda conn: begun.append(conn.get_isolation_level()))
    try:
        assert _fleet(store).runs.finished.total() == 1
    finally:
        asyncio.run(store.close())
    assert begun == ["REPEATABLE READ"]


def test_the_runs_are_one_query(engine: Engine) -> None:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    with engine.connect() as conn:
        count_runs(conn, NOW)
    assert len(statements) == 1


def test_many_scrapes_are_one_question_and_a_database_that_is_away_leaves_no_stale_gauge() -> None:
    now, away = 0.0, False
    questions: list[float] = []

    def ask() -> FleetFacts:
        questions.append(now)
        if away:
            raise DatabaseError("the database does not answer")
        return FleetFacts({"clean": 3}, [], RunCounts())

    collector = FleetCollector(ask, kept_s=10, clock=lambda: now)
    for _ in range(5):
        assert told(collector)['tandem_fleet_nodes{verdict="clean"}'] == 3
    assert questions == [0.0]
    away, now = True, 11.0
    assert told(collector)['tandem_fleet_nodes{verdict="clean"}'] == 3, "known, and asked for anew behind it"
    until("the answer behind it", lambda: not collector.asking)
    for _ in range(5):
        assert told(collector) == {"tandem_api_database_up": 0}
    assert questions == [0.0, 11.0]
    away, now = False, 22.0
    told(collector)
    until("the next", lambda: not collector.asking)
    assert told(collector)["tandem_api_database_up"] == 1


def test_a_scrape_does_not_wait_for_a_slow_answer_and_never_shows_an_old_one_for_long() -> None:
    now, slow = 0.0, threading.Event()
    slow.set()
    count = itertools.count(1)

    def ask() -> FleetFacts:
        assert slow.wait(60)
        return FleetFacts({"clean": next(count)}, [], RunCounts())

    def clean(collector: FleetGauges) -> float | None:
        return told(collector).get('tandem_fleet_nodes{verdict="clean"}')

    collector = FleetCollector(ask, kept_s=10, stale_s=60, clock=lambda: now)
    assert clean(collector) == 1
    slow.clear()
    now = 30.0
    assert [clean(collector), clean(collector)] == [1, 1]
    slow.set()
    until("the answer that was under way", lambda: not collector.asking)
    assert clean(collector) == 2
    slow.clear()
    now = 200.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.metrics_fleet.FIRST_S", 0.05)
        assert told(collector) == {"tandem_api_database_up": 0}
    slow.set()
    until("the next", lambda: clean(collector) == 3)


def test_the_question_begins_when_the_scrape_has_everything() -> None:
    """Beside each other both take twice as long, in one process."""
    now, begun = 0.0, threading.Event()

    def ask() -> FleetFacts:
        begun.set()
        return FleetFacts({"clean": 3}, [], RunCounts())

    collector = FleetCollector(ask, kept_s=10, clock=lambda: now)
    told(collector)
    begun.clear()
    now = 11.0
    series = collector.collect()
    names = [next(series).name for _ in range(8)]
    assert names[0] == "tandem_api_database_up"
    assert not begun.is_set()
    assert not list(series), "these were all"
    assert begun.wait(60)


def test_a_service_that_asks_itself_shows_what_it_knows() -> None:
    gauges = FleetGauges()
    assert told(gauges) == {"tandem_api_database_up": 0}
    gauges.show(FleetFacts({"clean": 3}, [], RunCounts()))
    assert told(gauges)['tandem_fleet_nodes{verdict="clean"}'] == 3
    gauges.show(None)
    assert told(gauges) == {"tandem_api_database_up": 0}


def many() -> FleetFacts:
    named = [(f"node-{n}", "corrupting") for n in range(5000)]
    runs = RunCounts(live={"submodule": 1000}, inconclusive={f"reason_{n}": 1 for n in range(REASONS + 1)})
    return FleetFacts({"corrupting": 5000}, named, runs)


def test_situation_27_however_large_the_fleet_its_series_are_bounded() -> None:
    gauges = FleetGauges()
    gauges.show(many())
    found = told(gauges)
    assert len(found) <= 1200
    assert sum(name.startswith("tandem_fleet_node_verdict") for name in found) == NAMED
    assert found['tandem_fleet_nodes{verdict="corrupting"}'] == 5000


@pytest.mark.needs("prometheus")
def test_promtool_has_nothing_against_it() -> None:
    gauges = FleetGauges()
    gauges.show(many())
    registry = CollectorRegistry()
    registry.register(gauges)
    assert lint(generate_latest(registry)) == ""


def test_reasons_beyond_the_bound_are_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.metrics_fleet.REASONS", 1)
    wrong: list[dict[str, Any]] = [{"missing": [ControlName.POSITIVE_START]}, {"reason": "dead_peer"}]
    for number, values in enumerate(wrong):
        store_run(engine, node_run(suspect="fresh", seed=number, began=NOW - HOUR, **values))
    with engine.connect() as conn:
        counted = count_runs(conn, NOW).inconclusive
    assert len(counted) == 2
    assert counted["other"] == 1
