"""What the API reads, from a real PostgreSQL through a real server: equal to the command line and to exports."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from api_server import Served, is_problem, serving
from databases import fresh_database
from node_runs import BEGAN, HOUR, drift, gradient, node_run, store_run
from sample_runs import sample_run
from tandem.cli.app import main
from tandem.db import store
from tandem.db.engine import connect, open_connection
from tandem.db.sink import Sink
from tandem.export import TABLES, export_run
from tandem.ids import new_run_id
from tandem.records import EvaluationRecord, RunRecords
from tandem_api.answers import catalogue, nodes, runs, summary
from tandem_api.reads import store as store_module

EVIL = "<i>&\u202e'\"; DROP TABLE runs; --"
BAD = sample_run(seed=2, rows=60, steps=20)
SYNTHETIC = sample_run(seed=3, rows=25, synthetic=True, evil=EVIL)


def keep(engine: Engine, records: RunRecords, spool: Path) -> UUID:
    """Store a made-up run as it is, verdict included."""
    run, (attempt,) = records.run, records.attempts
    bare = msgspec.structs.replace(run, state="running", verdict=None, reason="", sentence="", finished_at=None)
    store.create_run(engine, bare)
    store.start_attempt(engine, msgspec.structs.replace(attempt, state="running", ended_at=None, reason=""))
    groups = (records.steps, records.mismatches, records.controls, records.faults, records.evaluations)
    with Sink(engine.url.render_as_string(hide_password=False), spool, run.run_id, 1) as sink:
        for group in (*groups, records.closings):
            for record in group:
                sink.put(record)
        assert sink.flush(30)
    store.finish_attempt(
        engine, run.run_id, 1, state=attempt.state, reason=attempt.reason, ended_at=attempt.ended_at or 0.0,  # type: ignore[arg-type]
        fingerprint=attempt.fingerprint, parity=attempt.parity,
    )  # fmt: skip
    store.finish_run(
        engine, run.run_id, verdict=run.verdict or "", reason=run.reason, sentence=run.sentence,
        finished_at=run.finished_at or 0.0,
    )  # fmt: skip
    return run.run_id


FLEET = [
    node_run(kind="null", suspect="well-1", reference="well-2"),
    node_run(hits={3: 5}, began=BEGAN + HOUR),
    node_run(hits={4: 6, 7: 1}, reference="other", kind="swap", began=BEGAN + 2 * HOUR),
    node_run(suspect="quiet", reference="well-1", began=BEGAN + 3 * HOUR),
    node_run(suspect="quiet", workload="gradient", reference="well-1", began=BEGAN + 4 * HOUR,
             gradients=[gradient(2, 0.1, 1.0), gradient(2, 0.1, 1.0, leaf="attn.0.wq")]),
    node_run(suspect="drifter", workload="training", reference="well-1", began=BEGAN + 5 * HOUR, hits={3: 9},
             drifts=[drift(s, 0.1 * s) for s in range(1, 9)]),
]  # fmt: skip


@pytest.fixture(scope="module")
def database(database_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database of the module's own that holds all runs; nothing here writes."""
    with fresh_database(database_server) as url:
        engine = connect(url)
        spool = tmp_path_factory.mktemp("spool")
        for records in (BAD, SYNTHETIC):
            records.evaluations = [
                EvaluationRecord(
                    run_id=records.run.run_id, attempt=1, step=step, task=task, question=f"q{n}", arm=arm,
                    scores=[-1.0, -2.0], chosen=0, answer=1,
                )
                for step in (5, 10) for task in ("arc", "piqa") for n in range(4) for arm in ("reference", "suspect")
            ]  # fmt: skip
            keep(engine, records, spool)
        for records in FLEET:
            store_run(engine, records)
        engine.dispose()
        yield url


@pytest.fixture(scope="module")
def api(database: str) -> Iterator[Served]:
    with serving(database) as served:
        yield served


@pytest.fixture
def said(database: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """What a command prints with --json."""

    def run(*arguments: str) -> Any:
        monkeypatch.setenv("TANDEM_DB", database)
        capfd.readouterr()
        with pytest.raises(SystemExit):
            main([*arguments, "--json"])
        return json.loads(capfd.readouterr().out)

    return run


EVERY = [BAD, SYNTHETIC, *FLEET]
NAMES = [f"{r.run.kind}-{r.run.workload}-{r.run.suspect_node[:5]}-{n}" for n, r in enumerate(EVERY)]


@pytest.mark.parametrize("records", EVERY, ids=NAMES)
def test_a_run_is_that_of_the_command_line(api: Served, said: Any, records: RunRecords) -> None:
    run = str(records.run.run_id)
    got = api.get(f"/v1/runs/{run}/summary")
    assert got == said("show", run)
    summary.SummaryAnswer.model_validate(got)
    detail = api.get(f"/v1/runs/{run}")
    runs.RunAnswer.model_validate(detail)
    assert detail["stored"]["sentence"] == got["sentence"]
    assert detail["stored"]["progress"]["mismatched_elements"] == got["mismatched_elements"]
    assert detail["launch"] is None


def test_the_list_of_runs_is_that_of_the_command_line(api: Served, said: Any) -> None:
    page = api.get("/v1/runs")
    runs.RunPage.model_validate(page)
    assert page["runs"] == said("runs")["runs"]
    assert len(page["runs"]) == len(EVERY)
    assert page["pending"] == []


@pytest.mark.parametrize("node", ["sick", "healthy", "well-1", "quiet", "drifter"])
def test_a_node_is_that_of_the_command_line(api: Served, said: Any, node: str) -> None:
    got = api.get(f"/v1/nodes/{node}")
    assert got == said("node", node)
    nodes.NodeAnswer.model_validate(got)


def test_the_fleet_is_that_of_the_command_line(api: Served, said: Any) -> None:
    page = api.get("/v1/nodes")
    nodes.NodePage.model_validate(page)
    told = said("nodes")
    assert (page["counts"], page["nodes"]) == (told["counts"], told["nodes"])
    assert page["nodes"][0]["node"] == "sick"
    assert page["counts"]["corrupting"] == 1


@pytest.mark.parametrize("records", [BAD, SYNTHETIC], ids=["bad", "synthetic"])
def test_files_are_those_of_the_command_line(api: Served, database: str, tmp_path: Path, records: RunRecords) -> None:
    """Byte for byte in CSV, row for row in Parquet."""
    engine = connect(database)
    for format in ("csv", "parquet"):
        export_run(engine, records.run.run_id, tmp_path / format, format)  # type: ignore[arg-type]
    engine.dispose()
    for table in TABLES:
        path = f"/v1/runs/{records.run.run_id}/export/{table.name}"
        answer = api.client.get(path)
        assert answer.content == (tmp_path / "csv" / f"{table.name}.csv").read_bytes(), table.name
        assert f'filename="tandem-{records.run.run_id}-{table.name}.csv"' in answer.headers["content-disposition"]
        got = pq.read_table(io.BytesIO(api.client.get(path, params={"format": "parquet"}).content))
        assert got.equals(pq.read_table(tmp_path / "parquet" / f"{table.name}.parquet"))


@pytest.mark.parametrize("name", ["steps", "mismatches", "evaluations"])
@pytest.mark.parametrize("size", [3, 7, 1000])
def test_pages_together_are_the_export(api: Served, name: str, size: int) -> None:
    """Whatever the size of a page: every row once, in the order of its key, with the same numbers as in the file."""
    got = api.pages(f"/v1/runs/{BAD.run.run_id}/{name}", name, page_size=size)
    file = api.client.get(f"/v1/runs/{BAD.run.run_id}/export/{name}").text
    rows = list(csv.DictReader(io.StringIO(file)))
    assert len(got) == len(rows) > 10
    for mine, row in zip(got, rows, strict=True):
        for column, text in row.items():
            if column == "run_id" or column.endswith("_at"):
                continue
            value = mine[column]
            if value is None:
                assert text == ""
            elif isinstance(value, list):
                assert json.loads(text) == value
            else:
                assert str(value) == text or float(text) == value, column
    model = {"steps": runs.StepAnswer, "mismatches": runs.MismatchAnswer, "evaluations": runs.EvaluationAnswer}[name]
    for mine in got:
        model.model_validate(mine)


@pytest.mark.parametrize(
    "filters",
    [
        {"phase": "fwd"}, {"phase": "bwd", "module": "attn"}, {"rank": 1}, {"layer": -1}, {"tensor": "out"},
        {"cause": "state"}, {"first": 5, "last": 9}, {"replay": "persistent", "rank": 0}, {"attempt": 2}, {"site": 101},
    ],
    ids=str,
)  # fmt: skip
def test_mismatches_are_filtered_by_site(api: Served, filters: dict[str, Any]) -> None:
    got = api.pages(f"/v1/runs/{BAD.run.run_id}/mismatches", "mismatches", page_size=5, **filters)
    wanted = [
        m for m in BAD.mismatches
        if all(
            m.step >= v if k == "first" else m.step <= v if k == "last" else getattr(m, k) == v
            for k, v in filters.items()
        )
    ]  # fmt: skip
    assert [(m["step"], m["site"], m["rank"]) for m in got] == [(m.step, m.site, m.rank) for m in wanted]


@pytest.mark.parametrize(
    "filters",
    [
        {"node": "sick"}, {"node": "well-1"}, {"workload": "gradient"}, {"verdict": "mismatch"}, {"kind": "null"},
        {"state": "running"}, {"state": "finished", "synthetic": True}, {"since": BEGAN + 2 * HOUR},
        {"until": BEGAN + 2 * HOUR}, {"node": "well-1", "since": BEGAN + 3.5 * HOUR, "verdict": "match"},
    ],
    ids=str,
)  # fmt: skip
def test_runs_are_filtered(api: Served, filters: dict[str, Any]) -> None:
    got = api.pages("/v1/runs", "runs", page_size=2, **filters)

    def fits(records: RunRecords) -> bool:
        run = records.run
        if "node" in filters and filters["node"] not in (run.suspect_node, run.reference_node):
            return False
        began = (run.run_id.int >> 80) / 1000
        if not filters.get("since", 0) <= began < filters.get("until", 1e12):
            return False
        return all(getattr(run, k) == v for k, v in filters.items() if k not in ("node", "since", "until"))

    wanted = sorted((str(r.run.run_id) for r in EVERY if fits(r)), reverse=True)
    assert [r["run"] for r in got] == wanted


def test_the_fleet_is_searched_and_paged(api: Served) -> None:
    everything = api.get("/v1/nodes")["nodes"]
    assert api.pages("/v1/nodes", "nodes", page_size=2) == everything
    assert [n["node"] for n in api.get("/v1/nodes", params={"search": "well"})["nodes"]] == [
        n["node"] for n in everything if "well" in n["node"]
    ]
    suspected = api.get("/v1/nodes", params={"verdict": "corrupting"})["nodes"]
    assert [n["node"] for n in suspected] == ["sick"]


def test_the_history_of_a_node_is_its_runs_and_decisions(api: Served) -> None:
    whole = api.get("/v1/nodes/well-1/history")
    nodes.HistoryPage.model_validate(whole)
    profile = api.get("/v1/nodes/well-1")
    assert {h["run"]["run"] for h in whole["history"]} == {r["run"] for r in profile["runs"]}
    assert [h["at"] for h in whole["history"]] == sorted((h["at"] for h in whole["history"]), reverse=True)
    assert api.pages("/v1/nodes/sick/history", "history", page_size=1) == api.get("/v1/nodes/sick/history")["history"]


def test_reports_are_html_that_runs_no_script(api: Served) -> None:
    """Also with markup in every stored text."""
    for path in (f"/v1/runs/{SYNTHETIC.run.run_id}/report", "/v1/nodes/sick/report", "/docs"):
        answer = api.client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        assert "<i>&\u202e" not in answer.text
        assert "<script" not in answer.text


def test_the_catalogue_has_what_ships(api: Served) -> None:
    from tandem.faults.files import shipped_names
    from tandem.spec import preset_names

    presets, profiles = api.get("/v1/presets"), api.get("/v1/fault-profiles")
    catalogue.PresetsAnswer.model_validate(presets)
    catalogue.FaultProfilesAnswer.model_validate(profiles)
    assert [p["name"] for p in presets["presets"]] == preset_names()
    assert [p["name"] for p in profiles["fault_profiles"]] == list(shipped_names())


def test_this_machine_is_the_only_candidate(api: Served) -> None:
    found = api.get("/v1/candidates")
    catalogue.CandidatesAnswer.model_validate(found)
    (only,) = found["candidates"]
    assert only["node"] == only["reference"]


def test_health_needs_no_token(api: Served) -> None:
    for path in ("/healthz", "/readyz"):
        catalogue.Alive.model_validate(api.get(path, headers={"Authorization": ""}))
    text = api.client.get("/metrics", headers={"Authorization": ""}).text
    assert 'route="/v1/runs/{run_id}"' in text
    assert str(BAD.run.run_id) not in text
    assert "\ntandem_api_database_up 1.0\n" in text
    assert 'tandem_fleet_nodes{verdict="' in text


def test_no_question_waits_longer_than_its_time(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small or whole, behind a lock that somebody holds: the database gives it up. Who finds every connection in use is
    told so, and whoever has one gets the answer."""
    monkeypatch.setattr(store_module, "WAIT_S", 0.2)
    began, run = time.monotonic(), BAD.run.run_id
    with open_connection(database) as other:  # a transaction, which ends with the lock
        other.execute("LOCK TABLE runs")
        with serving(database, pool=1, query_seconds=0.3, report_seconds=1) as api:
            for path in ("/v1/runs", f"/v1/runs/{run}", f"/v1/runs/{run}/report"):
                is_problem(api.client.get(path), 504, "too-slow")
        with serving(database, pool=1) as api, ThreadPoolExecutor(1) as beside:
            first = beside.submit(api.client.get, "/v1/runs")
            engine = api.app.state.parts.store._engine
            while not engine.pool.checkedout():
                assert time.monotonic() - began < 60
                time.sleep(0.01)
            answer = api.client.get("/v1/runs")
            is_problem(answer, 503, "busy")
            assert int(answer.headers["retry-after"]) > 0
            other.rollback()
            assert first.result(60).status_code == 200


def test_unknown_things_are_not_found(api: Served) -> None:
    run = new_run_id(1.0, bytes(10))
    for path in ("", "/summary", "/report", "/steps", "/mismatches", "/evaluations", "/events", "/export/steps"):
        is_problem(api.client.get(f"/v1/runs/{run}{path}"), 404, "not-found")
    for path in ("", "/report", "/history"):
        is_problem(api.client.get(f"/v1/nodes/nobody{path}"), 404, "not-found")
