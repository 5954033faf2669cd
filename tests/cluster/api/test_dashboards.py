"""Every query of every panel and variable, asked of a real Prometheus that scrapes real Tandem processes, or of a real
PostgreSQL: each returns data.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import Engine, text

from alert_rules import FOLDER, looked_at, rule
from api_server import serving
from cluster.api.hands import Hands, settings
from cluster.handle import ApiServer
from databases import fresh_database
from node_runs import HOUR, node_run, store_run
from pods import Pair
from prometheus import Prometheus, free_port, lint, prometheus, scrape, until
from supervised import FAULTS
from tandem.db.engine import connect
from tandem.pairrun import names
from tandem.vocabulary import ControlName, Role

pytestmark = [pytest.mark.needs("prometheus"), pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[3]
BOARDS = sorted((ROOT / "deploy" / "helm" / "tandem" / "files" / "dashboards").glob("*.json"))
CONTROLLER = """
import sys
from pathlib import Path
import yaml
from tandem.db.engine import connect
from tandem.kube.client import Kube
from tandem.pairing.policy import read_policy
from tandem.spec import validate
from tandem_controller.main import Process
from tandem_controller.settings import Settings
settings = validate(Settings, yaml.safe_load(Path(sys.argv[1]).read_text()), "settings")
kube = Kube.connect(kubeconfig=sys.argv[2], namespace=settings.namespace)
sys.exit(Process(kube, connect(sys.argv[3]), settings, read_policy({}), health=0, metrics=int(sys.argv[4])).run())
"""
"""As ``tandem controller``, with a kubeconfig and a port of the test's own."""


@dataclass
class Sources:
    """What Grafana would be connected to."""

    prometheus: Prometheus
    engine: Engine
    ports: dict[str, int]
    pair: Pair


def queries(value: Any) -> Iterator[dict[str, Any]]:
    """Targets of all panels."""
    if isinstance(value, dict):
        yield from value.get("targets", [])
        for inner in value.values():
            yield from queries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from queries(inner)


TARGETS = [
    pytest.param(target, id=f"{path.stem}-{panel['title']}-{target['refId']}")
    for path in BOARDS
    for panel in json.loads(path.read_text())["panels"]
    for target in queries(panel)
]
VARIABLES = [
    pytest.param(variable, id=f"{path.stem}-{variable['name']}")
    for path in BOARDS
    for variable in json.loads(path.read_text())["templating"]["list"]
    if variable["type"] == "query"
]


@pytest.fixture(scope="module")
def sources(api_server: ApiServer, database_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    """A pair with injected faults, a controller and the API, all scraped; and the records behind them."""
    folder = tmp_path_factory.mktemp("sources")
    with ExitStack() as stack:
        url = stack.enter_context(fresh_database(database_server))
        engine = connect(url)
        stack.callback(engine.dispose)
        records(engine)
        ports = {name: free_port() for name in ("worker", "controller")}
        api = stack.enter_context(serving(url))
        ports["api"] = int(api.url.rsplit(":", 1)[1])
        for path, status in (
            ("/v1/nodes", 200),
            ("/v1/nodes/sick", 200),
            ("/v1/nodes/nowhere", 404),
            ("/nowhere", 404),
        ):
            api.get(path, status)
        pair = stack.enter_context(live_pair(folder, url, engine, ports["worker"]))
        hands = Hands(api_server, url)
        stack.callback(hands.close)
        stack.enter_context(controller(hands, folder, ports["controller"]))
        found = stack.enter_context(prometheus(folder, ports))
        pairruns(hands, folder)
        until("all targets", found.up)
        yield Sources(found, engine, ports, pair)


def records(engine: Engine) -> None:
    """A node with everything that a panel shows."""
    now = time.time()
    for run in (
        node_run(kind="null", suspect="well-1", reference="well-2", began=now - 9 * HOUR),
        node_run(hits={3: 5}, began=now - 8 * HOUR),
        node_run(hits={4: 6}, reference="other", kind="swap", began=now - 7 * HOUR),
        node_run(suspect="fresh", missing=[ControlName.POSITIVE_START], began=now - 6 * HOUR),
        node_run(suspect="third", reference="sick", differs=[Role.REFERENCE], began=now - 5 * HOUR),
    ):
        store_run(engine, run)
    long_ago = datetime.now(UTC) - timedelta(days=30)
    with engine.begin() as conn:
        conn.execute(
            text("INSERT INTO node_decisions (node, decision, reason, decided_by, decided_at) "
                 "VALUES ('sick', 'cleared', 'a new board', 'me', :at)"),
            {"at": long_ago},
        )  # fmt: skip


@contextmanager
def live_pair(folder: Path, url: str, engine: Engine, port: int) -> Iterator[Pair]:
    """A real pair of workers, whose suspect is given faults, until the test ends."""
    faults = folder / "faults.toml"
    faults.write_text(FAULTS)
    pair = Pair(folder / "pair", url, steps=1_000_000, fault=str(faults))
    pair.store(engine)
    try:
        pair.start(Role.SUSPECT)
        pair.start(Role.REFERENCE, TANDEM_METRICS_PORT=str(port), TANDEM_SUSPECT_NODE="sick")
        until(
            f"a mismatch\n{pair.log(Role.REFERENCE)}",
            lambda: pair.pods[Role.REFERENCE].poll() is None and re.search(
                rb"^tandem_pair_elements_mismatched_total\{.*\} [1-9]", _try(port), re.MULTILINE
            ),
            600,
        )  # fmt: skip
        yield pair
    finally:
        for pod in pair.pods.values():
            pod.kill()
            pod.wait()


def _try(port: int) -> bytes:
    try:
        return scrape(port)
    except OSError:
        return b""


@contextmanager
def controller(hands: Hands, folder: Path, port: int) -> Iterator[None]:
    config = folder / "settings.yaml"
    config.write_text(yaml.safe_dump(settings(hands.namespace).model_dump(mode="json", by_alias=True)))
    arguments = [str(config), str(hands.server.kubeconfig), hands.database, str(port)]
    with open(folder / "controller-log", "w") as log:
        process = subprocess.Popen([sys.executable, "-c", CONTROLLER, *arguments], stdout=log, stderr=log)
    try:
        until("a leader", lambda: b"\ntandem_controller_leading 1.0" in _try(port))
        yield
    finally:
        process.terminate()
        process.wait(60)


def pairruns(hands: Hands, folder: Path) -> None:
    """One that has ended, one that runs, one that waits."""
    for name in ("sick", "ill"):
        hands.node(name, cordoned=True)
    hands.node("well")
    hands.create("done")
    hands.start(name="done")
    hands.finish(folder, rows=1, name="done")
    hands.wait_for(names.FINISHED, "True", name="done")
    hands.create("runs")
    hands.start(name="runs")
    hands.create("waits", suspect={"nodeName": "nowhere"})
    hands.wait_for(names.PAIRED, "False", name="waits")


@pytest.mark.parametrize("target", TARGETS)
def test_every_query_returns_data(sources: Sources, target: dict[str, Any]) -> None:
    if "rawSql" in target:
        rows = ask_sql(sources.engine, target["rawSql"])
        assert rows
        assert all(any(value is not None for value in row.values()) for row in rows)
        if target["format"] == "time_series":
            assert set(rows[0]) == {"time", "metric", "value"}
            assert any(row["value"] is not None for row in rows)
        return
    expression = expanded(target["expr"])
    assert "$" not in expression
    until(f"data of {expression}", lambda: numbers(sources.prometheus, expression, instant=bool(target.get("instant"))))


@pytest.mark.parametrize("variable", VARIABLES)
def test_every_variable_has_values(sources: Sources, variable: dict[str, Any]) -> None:
    query = variable["query"]
    if isinstance(query, str):
        assert ask_sql(sources.engine, query)
        return
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", query["query"])
    assert found
    assert sources.prometheus.ask(f"label/{found[2]}/values", **{"match[]": found[1]})


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_label_that_an_alert_looks_at_is_there(sources: Sources, name: str) -> None:
    """As Prometheus stores what it has scraped; `tests/unit/test_alerts.py` says what each alert makes of it."""
    for metric, label, _ in looked_at(rule(name)["expr"]):
        until(f"{label} of {metric}", lambda: sources.prometheus.now(f'{metric}{{{label}!=""}}'))  # noqa: B023
        assert not sources.prometheus.now(f'{metric}{{{label}=""}}'), (metric, label)


@pytest.mark.parametrize("job", ["worker", "controller", "api"])
def test_promtool_has_nothing_against_what_they_tell(sources: Sources, job: str) -> None:
    assert lint(scrape(sources.ports[job])) == ""


def test_the_api_tells_of_its_requests_and_of_the_fleet(sources: Sources) -> None:
    asked = 'tandem_api_requests_total{job="api", route="/v1/nodes/{name}"}'
    until("its requests", lambda: len(sources.prometheus.now(asked)) == 2)
    assert {one["metric"]["status"]: one["value"][1] for one in sources.prometheus.now(asked)} == {
        "200": "1",
        "404": "1",
    }
    until("the fleet", lambda: sources.prometheus.now('sum(tandem_fleet_nodes{job="api"}) >= 5'))
    assert sources.prometheus.now('tandem_api_database_up{job="api"} == 1')


def test_a_pair_is_a_bounded_number_of_series_and_names_no_run(sources: Sources) -> None:
    series = sources.prometheus.now('{job="worker", __name__=~"tandem_.*"}')
    assert 0 < len(series) <= 120
    assert {one["metric"].get("node", "sick") for one in series} == {"sick"}
    assert {one["metric"].get("synthetic", "true") for one in series} == {"true"}


def test_zz_the_series_of_a_pair_end_with_its_reference(sources: Sources) -> None:
    """The last test of this file: it ends the pair."""
    query = '{job="worker", __name__=~"tandem_.*"}'
    assert sources.prometheus.now(query)
    sources.pair.pods[Role.REFERENCE].kill()
    until("the end of the series", lambda: not sources.prometheus.now(query))
    assert sources.prometheus.now("tandem_controller_leading")


def numbers(source: Prometheus, expression: str, *, instant: bool) -> list[float]:
    """The values that a panel would draw: of now, or of the last minute."""
    if instant:
        found = [series["value"][1] for series in source.now(expression)]
    else:
        now = time.time()
        series = source.ask("query_range", query=expression, start=now - 60, end=now, step=1)["result"]
        found = [value for one in series for _, value in one["values"]]
    return [float(value) for value in found if not math.isnan(float(value))]


def expanded(expression: str) -> str:
    """With Grafana's variables: all values, and an interval that fits the scrapes."""
    expression = expression.replace("$__rate_interval", "20s")
    return re.sub(r"\$(node|workload|namespace|synthetic)\b", ".*", expression)


def ask_sql(engine: Engine, sql: str) -> list[dict[str, Any]]:
    """Rows of a query, its macros expanded as Grafana's PostgreSQL data source does."""
    sql = sql.replace("${node:sqlstring}", "'sick'")
    sql = re.sub(r"\$__timeFilter\(([\w.]+)\)", r"\1 BETWEEN now() - interval '90 days' AND now()", sql)
    sql = re.sub(
        r"\$__timeGroup\(([\w.]+), ?'1d'\)", r"floor(extract(epoch from \1)/86400)*86400", sql
    )  # fmt: skip
    assert "$" not in sql
    with engine.connect() as conn:
        return [dict(row) for row in conn.exec_driver_sql(sql).mappings()]
