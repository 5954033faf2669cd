"""Kept profiles of nodes, from a real PostgreSQL: made once for all who ask, and never older than the rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from sqlalchemy import Engine, text

from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect
from tandem.db.profiles import clear, load_node
from tandem.nodes.as_json import to_json
from tandem_api.problems import Problem
from tandem_api.reads.nodes import Answer, Nodes
from tandem_api.reads.store import Store

T = TypeVar("T")
FIRST = node_run(hits={3: 5})


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = connect(database_url)
    store_run(engine, FIRST)
    yield engine
    engine.dispose()


async def with_nodes(url: str, ask: Callable[[Nodes], Any], kept_runs: int = 100) -> Any:
    store = Store(url)
    try:
        return await ask(Nodes(store, kept_runs))
    finally:
        await store.close()


def truth(engine: Engine, node: str = "sick") -> Any:
    return json.loads(json.dumps(to_json(load_node(engine, node))))


def test_it_is_made_once_for_all_who_ask(engine: Engine, database_url: str) -> None:
    async def ask(nodes: Nodes) -> list[Answer]:
        many = await asyncio.gather(*(nodes.of("sick") for _ in range(30)))
        return [*many, await nodes.of("sick")]

    first, *others = asyncio.run(with_nodes(database_url, ask))
    assert all(each is first for each in others)
    assert json.loads(first.profile) == truth(engine)


CHANGES: dict[str, Callable[[Engine], object]] = {
    "a run ended": lambda engine: store_run(engine, node_run(hits={4: 6}, reference="other", began=BEGAN + HOUR)),
    "a null run passed": lambda engine: store_run(
        engine, node_run(kind="null", suspect="well-1", reference="well-2", began=BEGAN + HOUR)
    ),
    "it was a reference": lambda engine: store_run(
        engine, node_run(suspect="another", reference="sick", began=BEGAN + HOUR)
    ),
    "a null run with it as reference mismatched": lambda engine: store_run(
        engine, node_run(kind="null", suspect="another", reference="sick", hits={2: 1}, began=BEGAN + HOUR)
    ),
    "a person decided": lambda engine: (
        CHANGES["a null run passed"](engine), CHANGES["a run ended"](engine),
        clear(engine, "sick", "memory replaced", "ada"),
    ),
    "its statistics were made anew": lambda engine: execute(
        engine, "UPDATE run_profiles SET detail = jsonb_set(detail::jsonb, '{nonfinite}', '77')::json, "
        "updated_at = now()",
    ),
    "retention dropped its rows": lambda engine: execute(engine, "UPDATE runs SET records_dropped_at = now()"),
}  # fmt: skip


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as conn:
        conn.execute(text(statement))


@pytest.mark.parametrize("change", CHANGES, ids=[name.replace(" ", "-") for name in CHANGES])
def test_what_changes_is_seen_at_once(engine: Engine, database_url: str, change: str) -> None:
    async def ask(nodes: Nodes) -> tuple[Answer, Answer]:
        before = await nodes.of("sick")
        await asyncio.to_thread(CHANGES[change], engine)
        return before, await nodes.of("sick")

    before, after = asyncio.run(with_nodes(database_url, ask))
    assert after is not before
    assert json.loads(after.profile) == truth(engine)
    lines = [item.line for item in after.history]
    assert sorted(line["run"]["run"] for line in lines if line["what"] == "run") == sorted(
        run["run"] for run in truth(engine)["runs"]
    )
    assert sum(line["what"] == "decision" for line in lines) == len(truth(engine)["decisions"])


def test_kept_ones_are_bounded_and_the_latest_stay(engine: Engine, database_url: str) -> None:
    for number in range(4):
        store_run(engine, node_run(suspect=f"node-{number}", began=BEGAN + number * HOUR))

    async def ask(nodes: Nodes) -> list[bool]:
        first = [await nodes.of(f"node-{number}") for number in range(4)]
        return [await nodes.of(f"node-{number}") is first[number] for number in (3, 2, 0)]

    assert asyncio.run(with_nodes(database_url, ask, kept_runs=2)) == [True, True, False]


def test_a_node_that_no_run_names_is_not_found(engine: Engine, database_url: str) -> None:
    async def ask(nodes: Nodes) -> None:
        with pytest.raises(Problem) as problem:
            await nodes.of("nobody")
        assert problem.value.status == 404

    asyncio.run(with_nodes(database_url, ask))
