"""Every filter that the API declares on a list: alone, combined, in pages, without a result, and with a wrong value.

What a filter means is said here of the rows as the whole list answers them, and never asked of the database. Filters,
their types and bounds come from the committed OpenAPI document: one that is declared and not described here fails.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from api_server import Served, is_problem, serving
from databases import fresh_database
from db_samples import mismatch, run_row, step
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db import store
from tandem.db.engine import connect
from tandem.db.sink import Sink
from tandem.ids import new_run_id
from tandem.records import AttemptRow, EvaluationRecord, MismatchRecord
from tandem.vocabulary import Arm, Cause, Kind, Module, Phase, ReplayClass, Verdict, Workload

DOCUMENT = json.loads((Path(__file__).parents[2] / "docs/openapi.json").read_text(encoding="utf-8"))
PAGES = ("page_size", "page_token")
RICH = new_run_id(BEGAN, bytes(10))
"""The run whose records are listed."""
Fits = Callable[[dict[str, Any], Any], bool]


@dataclass(frozen=True)
class Filter:
    """What a filter means, of a row as it is answered."""

    fits: Fits
    values: Sequence[Any] = ()
    """To try, the last of which no row has; those of an enumeration and of a boolean come from the document."""


def equal(*values: Any, column: str) -> Filter:
    return Filter(lambda row, value: bool(row[column] == value), values)


def began(row: dict[str, Any]) -> float:
    """Seconds, from the run's id."""
    return (UUID(row["run"]).int >> 80) / 1000


OF_RECORDS = {
    "attempt": equal(1, 2, 3, column="attempt"),
    "first": Filter(lambda row, least: row["step"] >= least, (0, 3, 5, 6)),
    "last": Filter(lambda row, most: row["step"] <= most, (2**63 - 1, 5, 2, 0)),
}
LISTS: dict[str, tuple[str, dict[str, Filter]]] = {
    "/v1/runs": (
        "runs",
        {
            "node": Filter(lambda r, node: node in (r["suspect_node"], r["reference_node"]), ("a", "well-1", "nobody")),
            "since": Filter(lambda r, at: began(r) >= at, (0, BEGAN + 3 * HOUR, BEGAN + 5.5 * HOUR, BEGAN + 1e8)),
            "until": Filter(lambda r, at: began(r) < at, (BEGAN + 1e8, BEGAN + 3 * HOUR, BEGAN + 5.5 * HOUR, BEGAN)),
            "synthetic": equal(column="synthetic"),
            **{name: equal(column=name) for name in ("workload", "verdict", "state", "kind")},
        },
    ),
    "/v1/runs/{run_id}/steps": ("steps", OF_RECORDS),
    "/v1/runs/{run_id}/mismatches": (
        "mismatches",
        {
            **OF_RECORDS,
            "site": equal(0, 3, 99, column="site"),
            "layer": equal(-1, 0, 7, column="layer"),
            "tensor": equal("out", "dw.wq", "dw", column="tensor"),
            "rank": equal(0, 1, 2, column="rank"),
            **{name: equal(column=name) for name in ("phase", "module", "cause", "replay")},
        },
    ),
    "/v1/runs/{run_id}/evaluations": (
        "evaluations",
        {**OF_RECORDS, "task": equal("arc", "piqa", "arc%", column="task"), "arm": equal(column="arm")},
    ),
    "/v1/nodes": (
        "nodes",
        {
            "verdict": equal(column="verdict"),
            "search": Filter(lambda row, part: part in row["node"], ("we", "-1", "a", "%")),
        },
    ),
}
"""Address -> name of the list in its answer, and its filters."""


def declared(path: str) -> dict[str, dict[str, Any]]:
    """Filters of a list, with the schema of a value."""
    found = {p["name"]: p["schema"] for p in DOCUMENT["paths"][path]["get"].get("parameters", ()) if p["in"] == "query"}
    return {name: _schema(schema) for name, schema in found.items() if name not in PAGES}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Without what says that it may be left out."""
    for part in schema.get("anyOf", ()):
        if part.get("type") != "null":
            schema = part
    return DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


ALL = [(path, name) for path in LISTS for name in declared(path)]


def values_of(path: str, name: str) -> Sequence[Any]:
    schema = declared(path)[name]
    return schema.get("enum") or ([True, False] if schema["type"] == "boolean" else LISTS[path][1][name].values)


def wrong_of(schema: dict[str, Any]) -> Iterator[str]:
    """Values that the document does not allow."""
    yield ""
    if "enum" in schema:
        yield from ("nonsense", schema["enum"][0].upper(), ",".join(schema["enum"][:2]))
    elif schema["type"] == "string":
        yield "x" * (schema["maxLength"] + 1)
    else:
        yield from ("perhaps", "1,2", "'", "null", "1 OR 1=1")
    if schema["type"] == "integer":
        yield from ("1.5", str(schema["minimum"] - 1), str(schema["exclusiveMaximum"]))
    elif schema["type"] == "number":
        yield from ("nan", "inf", "-inf", str(schema["minimum"] - 1), str(schema["maximum"] + 1))


# -- what is stored --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api(database_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with fresh_database(database_server) as url:
        engine = connect(url)
        for run in (RICH, new_run_id(BEGAN + 1, bytes(10))):  # the other one has the same records
            keep_records(engine, run, tmp_path_factory.mktemp("spool"))
        keep_runs(engine)
        for records in (
            node_run(kind="null", suspect="well-1", reference="well-2"), node_run(hits={3: 5}, began=BEGAN + HOUR),
            node_run(hits={4: 6}, reference="other", kind="swap", began=BEGAN + 2 * HOUR),
            node_run(suspect="doubtful", hits={4: 6}, began=BEGAN + 3 * HOUR),
        ):  # fmt: skip
            store_run(engine, records)
        engine.dispose()
        with serving(url) as served:
            yield served


def keep_runs(engine: Engine) -> None:
    """Of all kinds, running and finished."""
    rng = random.Random(6)
    for hour, (verdict, synthetic, workload) in enumerate(product([None, *Verdict], (False, True), Workload)):
        run = msgspec.structs.replace(
            run_row(new_run_id(BEGAN + hour * HOUR, rng.randbytes(10)), synthetic=synthetic),
            workload=str(workload), kind=str(rng.choice([Kind.SUSPECT, Kind.SWAP])),
            suspect_node=rng.choice("abc"), reference_node=rng.choice("abc"),
        )  # fmt: skip
        store.create_run(engine, run)
        if verdict is not None:
            store.finish_run(
                engine, run.run_id, verdict=str(verdict), reason="x", sentence="y", finished_at=BEGAN + 100 * HOUR
            )


def keep_records(engine: Engine, run: UUID, spool: Path) -> None:
    """Two attempts, with the same records."""
    store.create_run(engine, run_row(run))
    for attempt in (1, 2):
        store.start_attempt(
            engine,
            AttemptRow(
                run_id=run, attempt=attempt, state="running", started_at=BEGAN, reference_host="x", suspect_host="y"
            ),
        )  # fmt: skip
        with Sink(engine.url.render_as_string(hide_password=False), spool, run, attempt) as sink:
            for number in range(1, 6 if attempt == 1 else 5):
                for record in (step(run, number), *mismatches(run, number), *evaluations(run, number)):
                    sink.put(msgspec.structs.replace(record, attempt=attempt))
            assert sink.flush(30)


def mismatches(run: UUID, number: int) -> Iterator[MismatchRecord]:
    places = [
        (Phase.FWD, Module.EMBED, -1, "out"), (Phase.FWD, Module.ATTN, 0, "out"), (Phase.FWD, Module.ATTN, 1, "out"),
        (Phase.BWD, Module.ATTN, 0, "dw.wq"), (Phase.BWD, Module.FFN, 1, "dx"),
    ]  # fmt: skip
    causes, replays = cycle([Cause.COMPUTE, Cause.STATE, Cause.DIGEST]), cycle(list(ReplayClass)[:4])
    for (site, (phase, module, layer, tensor)), rank in product(enumerate(places), (0, 1)):
        yield msgspec.structs.replace(
            mismatch(run, number, site, rank, tensor), phase=phase, module=module, layer=layer, cause=next(causes),
            replay=next(replays),
        )  # fmt: skip


def evaluations(run: UUID, number: int) -> Iterator[EvaluationRecord]:
    for task, question, arm in product(("arc", "piqa"), ("q1", "q2"), Arm):
        yield EvaluationRecord(
            run_id=run, attempt=1, step=number, task=task, question=question, arm=arm, scores=[-1.0, -2.0], chosen=0,
            answer=1,
        )  # fmt: skip


# -- what is asked ---------------------------------------------------------------------------------------


def rows(api: Served, path: str, **params: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.pages(path.format(run_id=RICH), LISTS[path][0], **params)
    return found


def fitting(path: str, everything: list[dict[str, Any]], chosen: dict[str, Any]) -> list[dict[str, Any]]:
    filters = LISTS[path][1]
    return [row for row in everything if all(filters[name].fits(row, value) for name, value in chosen.items())]


def test_every_filter_that_is_declared_is_described_here() -> None:
    """Of every list that comes in pages; the history of a node has none."""
    lists = {
        path
        for path, item in DOCUMENT["paths"].items()
        if any(p["name"] == "page_token" for p in item.get("get", {}).get("parameters", ()))
    }
    assert {path: set(declared(path)) for path in lists if declared(path)} == {
        path: set(filters) for path, (_, filters) in LISTS.items()
    }


@pytest.mark.parametrize(("path", "name"), ALL)
def test_a_filter_alone(api: Served, path: str, name: str) -> None:
    """Each of its values gives the rows that fit, in their order and in pages; none where none fits."""
    everything, found = rows(api, path), []
    for value in values_of(path, name):
        wanted = fitting(path, everything, {name: value})
        assert rows(api, path, **{name: value}) == wanted, value
        assert rows(api, path, page_size=max(1, len(wanted) // 3), **{name: value}) == wanted, value
        found.append(len(wanted))
    assert any(0 < n < len(everything) for n in found), "it leaves rows out, and not all"
    assert min(found) == 0 or not LISTS[path][1][name].values, "one of its values is that of no row"


@pytest.mark.parametrize("path", LISTS)
def test_filters_together(api: Served, path: str) -> None:
    """Any of them, with any of their values: the rows that fit all, whatever the size of a page."""
    everything = rows(api, path)
    values = {name: st.sampled_from(values_of(path, name)) for name in declared(path)}

    @given(chosen=st.fixed_dictionaries({}, optional=values), page_size=st.sampled_from([7, 20, 1000]))
    @settings(max_examples=40)
    def ask(chosen: dict[str, Any], page_size: int) -> None:
        assert rows(api, path, page_size=page_size, **chosen) == fitting(path, everything, chosen)

    ask()


@pytest.mark.parametrize("path", LISTS)
def test_all_filters_of_a_row_find_it(api: Served, path: str) -> None:
    """For each row: of every filter a value that it fits, all at once."""
    everything = rows(api, path)
    asked = [
        {
            name: fit[-1]
            for name in declared(path)
            if (fit := [v for v in values_of(path, name) if LISTS[path][1][name].fits(row, v)])
        }
        for row in everything
    ]
    for chosen in msgspec.json.decode(msgspec.json.encode(list({str(one): one for one in asked}.values()))):
        wanted = fitting(path, everything, chosen)
        assert 0 < len(wanted) < len(everything), chosen
        assert rows(api, path, page_size=2, **chosen) == wanted, chosen


@pytest.mark.parametrize(("path", "name"), ALL)
def test_a_page_token_is_of_its_filter(api: Served, path: str, name: str) -> None:
    """With another value of it, or without it, it names no place in the list."""
    address = path.format(run_id=RICH)
    several = [v for v in values_of(path, name) if len(rows(api, path, **{name: v})) > 1]
    page = api.get(address, params={name: several[0], "page_size": 1})
    token = page["next_page_token"]
    assert api.get(address, params={name: several[0], "page_token": token})[LISTS[path][0]]
    for other in ({}, *({name: v} for v in values_of(path, name) if v != several[0])):
        is_problem(api.client.get(address, params={**other, "page_token": token}), 400, "page-token")


@pytest.mark.parametrize(("path", "name"), ALL)
def test_a_wrong_value_of_a_filter_is_named(api: Served, path: str, name: str) -> None:
    for wrong in wrong_of(declared(path)[name]):
        values = is_problem(api.client.get(path.format(run_id=RICH), params={name: wrong}), 422, "validation")
        assert [error["where"] for error in values["errors"]] == [f"query.{name}"], wrong
        assert f"query.{name}: " in values["detail"]
