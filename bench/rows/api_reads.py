"""What the API reads at millions of mismatch rows for fifty clients at once, beside its SQL alone.

Both ask the same questions in the same order through a pool of the same kind and size: the SQL alone in this process,
without HTTP, JSON or objects; the API by HTTP on kept connections, each client asking again as soon as it was answered.
What the API keeps (a node's computed profile) it has kept before: the SQL is that of asking again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx2
from sqlalchemy import Connection, Engine, event, text

from bench.api import Api, body, served
from bench.many_rows import fill
from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, quantile, ratios, shuffled_blocks
from bench.telling import tell
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect
from tandem_api.app import create_app
from tandem_api.launch.local import LocalLauncher
from tandem_api.reads.store import Store
from tandem_api.security.local import LocalAuthenticator
from tandem_api.settings import Settings

CLIENTS = 50
ASKED = 600
"""Requests of a block."""
BLOCKS = 8
SAMPLES = 20
"""Runs and nodes that are asked for in turn."""
BOUND = 2.0
TOKEN = "bench-token-of-32-characters-or-so"
ENDPOINTS = {
    "runs": "/v1/runs?node={node}",
    "run": "/v1/runs/{run}",
    "steps": "/v1/runs/{run}/steps",
    "mismatches": "/v1/runs/{run}/mismatches?module=attn",
    "node": "/v1/nodes/{node}",
    "history": "/v1/nodes/{node}/history",
}
"""Name -> address."""
Statements = Sequence[tuple[str, Any]]


def measure(options: Options) -> list[Row]:
    """The 99th percentile by HTTP over that of the SQL alone, block by block, for each kind of question."""
    with embedded_database() as url:
        engine = connect(url)
        nodes, runs = fill(engine, url, options.rows)
        paths = _paths(engine, nodes, options.seed)
        with engine.connect() as conn:
            rows = int(conn.scalar(text("SELECT count(*) FROM mismatches")) or 0)
        engine.dispose()
        with served(url) as api:
            blocks = asyncio.run(_blocks(url, api, paths, options.seed))
    setting = options.setting(mismatch_rows=rows, runs=runs, clients=CLIENTS, requests=ASKED, pool=Settings().pool)
    made = []
    for name, path in ENDPOINTS.items():
        mine = blocks[name]
        made += [
            row(
                f"api_reads.{name}", f"{path}: 99th percentile over that of its SQL alone",
                quantile(ratios(mine, "http", "sql")), setting, bound=BOUND,
            ),
            _ms(f"api_reads.{name}_ms", "its 99th percentile", [block["http"] for block in mine], setting),
        ]  # fmt: skip
    return made


def _ms(name: str, what: str, seconds: Sequence[float], setting: dict[str, Any]) -> Row:
    found = quantile(seconds)
    return row(
        name, what, Estimate(found.value * 1e3, found.low * 1e3, found.high * 1e3, found.runs), setting, unit="ms"
    )


def _paths(engine: Engine, nodes: Sequence[str], seed: int) -> dict[str, list[str]]:
    """Endpoint -> addresses of some nodes and runs."""
    rng = random.Random(seed)
    with engine.connect() as conn:
        runs = [str(each) for each in conn.scalars(text("SELECT run_id FROM runs")).all()]
    some = [{"node": rng.choice(nodes), "run": rng.choice(runs)} for _ in range(SAMPLES)]
    return {name: [path.format(**each) for each in some] for name, path in ENDPOINTS.items()}


async def _blocks(
    url: str, api: Api, paths: Mapping[str, Sequence[str]], seed: int
) -> dict[str, list[dict[str, float]]]:
    """Endpoint -> the 99th percentile of both kinds, in seconds, of each block."""
    settings = Settings()
    store = Store(url, pool=settings.pool, query_s=settings.query_seconds, whole_s=settings.report_seconds)
    questions = {name: [await _statements(url, path) for path in mine] for name, mine in paths.items()}
    out: dict[str, list[dict[str, float]]] = {name: [] for name in paths}
    try:
        for number, order in enumerate(shuffled_blocks(("http", "sql"), BLOCKS + 1, seed)):
            for name in paths:
                tell(f"{name}, block {number}/{BLOCKS}")
                taken = {}
                for kind in order:
                    if kind == "http":
                        taken[kind] = await _by_http(api, paths[name])
                    else:
                        taken[kind] = await _by_sql(store, questions[name])
                if number:  # the first warms both
                    out[name].append(taken)
    finally:
        await store.close()
    tell()
    return out


async def _statements(url: str, path: str) -> Statements:
    """What the API asks the database for an address, once it has answered it."""
    settings = Settings()
    store = Store(url, pool=1, query_s=settings.query_seconds, whole_s=settings.report_seconds)
    app = create_app(settings, store, LocalLauncher(url, url), LocalAuthenticator(TOKEN))
    kept: list[tuple[str, Any]] = []

    def keep(_conn: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        kept.append((statement, values))

    event.listen(Engine, "before_cursor_execute", keep)
    try:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(2):
                kept.clear()
                found = await client.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
                found.raise_for_status()
    finally:
        event.remove(Engine, "before_cursor_execute", keep)
        await store.close()
    if not kept:
        raise RuntimeError(f"{path} asked the database nothing")
    return kept


async def _by_http(api: Api, paths: Sequence[str]) -> float:
    requests = [api.request(path) for path in paths]

    async def client(take: Callable[[], int | None], taken: list[float]) -> None:
        reader, writer = await api.connect()
        while (turn := take()) is not None:
            began = time.perf_counter()
            writer.write(requests[turn % len(requests)])
            await body(reader)
            taken.append(time.perf_counter() - began)
        writer.close()

    return await _crowd(client)


async def _by_sql(store: Store, questions: Sequence[Statements]) -> float:
    def ask(conn: Connection, statements: Statements) -> None:
        for statement, values in statements:
            found = conn.exec_driver_sql(statement, values)
            if found.returns_rows:
                found.fetchall()

    async def client(take: Callable[[], int | None], taken: list[float]) -> None:
        while (turn := take()) is not None:
            began = time.perf_counter()
            await store.ask(ask, questions[turn % len(questions)])
            taken.append(time.perf_counter() - began)

    return await _crowd(client)


async def _crowd(client: Callable[[Callable[[], int | None], list[float]], Awaitable[None]]) -> float:
    """Seconds within which 99 % of the requests of all clients were answered."""
    turns = iter(range(ASKED))
    taken: list[float] = []
    await asyncio.gather(*(client(lambda: next(turns, None), taken) for _ in range(CLIENTS)))
    return quantile(taken, 0.99).value
