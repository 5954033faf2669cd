"""The profile of a node and a page of the run list with millions of mismatch rows, beside the same without roll-ups."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from uuid import UUID

from sqlalchemy import Engine, text

from bench.options import Options
from bench.results import Row, row
from bench.stats import quantile
from tandem.db import store, writer
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect, open_connection
from tandem.db.profiles import load_fleet, load_node
from tandem.db.queries import list_runs
from tandem.ids import new_run_id
from tandem.records import AttemptRow, ClassCounts, ClosingRecord, MismatchRecord, Record, RunRow, StepRecord
from tandem.vocabulary import AttemptState, Cause, Extent, Module, Phase, ReplayClass

RUN_ROWS = 10_000
STEPS = 200
LAYERS = 16
TP = 8
NODE_RUNS = 20
"""Runs of each node."""
MANY_RUNS, MANY = 200, "node-tested-often"
"""Of one node more."""
PAGE = 50
ASKED = 500
"""Measurements of each fast question: the 99th percentile has a bound from about 300 on."""
ASKED_SLOW = 5
BOUND_MS = 50.0
CLASSES = ("fwd/attn/out", "fwd/ffn/out", "bwd/attn/dx", "bwd/ffn/dx", "bwd/attn/dw", "bwd/ffn/dw", "fwd/attn/reduced",
           "fwd/ffn/reduced", "fwd/embed/out", "fwd/head/out", "bwd/head/dx", "bwd/embed/dw", "update/attn/param",
           "update/ffn/param", "update/attn/moment", "update/ffn/moment", "update/optimizer/grad_norm")  # fmt: skip
HIT = CLASSES[:4]
"""Classes that mismatch."""

WITHOUT = """
WITH mine AS (
  SELECT r.run_id FROM runs r WHERE r.suspect_node = :node AND NOT r.synthetic AND r.verdict IN ('match', 'mismatch')
), counts AS (
  SELECT c.key, sum((c.value->>0)::bigint) AS sites, sum((c.value->>1)::bigint) AS elements,
         sum((c.value->>2)::bigint) AS bad_sites, sum((c.value->>3)::bigint) AS bad,
         count(*) FILTER (WHERE (c.value->>2)::bigint > 0) AS steps, sum((c.value->>3)::numeric ^ 2) AS squares
  FROM steps s JOIN mine USING (run_id), jsonb_each(s.classes) c GROUP BY c.key
), damage AS (
  SELECT m.phase, m.module, m.layer, m.rank, m.replay, m.extent, count(*) AS sites, sum(m.mismatched) AS elements,
         sum(m.severity_mean * m.mismatched) AS severity, max(m.severity_max) AS largest, sum(m.nullified) AS nullified,
         sum(m.nonfinite) AS nonfinite
  FROM mismatches m JOIN mine USING (run_id) GROUP BY GROUPING SETS ((m.phase, m.module, m.layer), (m.rank),
         (m.phase, m.module, m.rank), (m.replay), (m.extent))
), severities AS (
  SELECT m.phase, m.module, percentile_cont(0.5) WITHIN GROUP (ORDER BY m.severity_median) AS middle
  FROM mismatches m JOIN mine USING (run_id) GROUP BY m.phase, m.module
), bits AS (
  SELECT b.place, sum(b.n) AS n FROM mismatches m JOIN mine USING (run_id), unnest(m.bits) WITH ORDINALITY b(n, place)
  GROUP BY b.place
)
SELECT (SELECT json_agg(c) FROM counts c), (SELECT json_agg(d) FROM damage d), (SELECT json_agg(s) FROM severities s),
       (SELECT json_agg(b) FROM bits b)
"""
"""The counts of a profile from the rows themselves."""

PAGE_WITHOUT = """
SELECT r.*, t.* FROM (SELECT * FROM runs ORDER BY run_id DESC LIMIT :page) r
LEFT JOIN LATERAL (
  SELECT sum((c.value->>0)::bigint), sum((c.value->>1)::bigint), sum((c.value->>2)::bigint), sum((c.value->>3)::bigint)
  FROM steps s, jsonb_each(s.classes) c WHERE s.run_id = r.run_id
) t ON true
LEFT JOIN LATERAL (SELECT count(*) FROM mismatches m WHERE m.run_id = r.run_id) m ON true
ORDER BY r.run_id DESC
"""

CLONE = {
    "runs": "run_id, suspect_node, reference_node",
    "attempts": "run_id, reference_host, suspect_host",
    "steps": "run_id",
    "mismatches": "run_id",
    "closings": "run_id",
    "attempt_totals": "run_id",
    "run_profiles": "run_id",
}
"""Table -> columns that differ between the clones of a run."""


def measure(options: Options) -> list[Row]:
    """One run is written and summarised as any, then cloned by SQL: all runs have as many rows, and their own node."""
    runs = max(NODE_RUNS + MANY_RUNS, options.rows // RUN_ROWS)
    with embedded_database() as url:
        engine = connect(url)
        first = _first_run(engine, url)
        nodes = _clone(url, first, runs)
        rng = random.Random(options.seed)
        profile = _timed(lambda: load_node(engine, rng.choice(nodes)), ASKED)
        many = _timed(lambda: load_node(engine, MANY), ASKED // 10)
        page = _timed(lambda: list_runs(engine, PAGE), ASKED)
        of_node = _timed(lambda: list_runs(engine, PAGE, node=rng.choice(nodes)), ASKED)
        fleet = _timed(lambda: load_fleet(engine), ASKED // 10)
        plain = _timed(lambda: _ask(engine, WITHOUT, node=rng.choice(nodes)), ASKED_SLOW)
        plain_page = _timed(lambda: _ask(engine, PAGE_WITHOUT, page=PAGE), ASKED_SLOW)
        with engine.connect() as conn:
            rows = int(conn.scalar(text("SELECT count(*) FROM mismatches")) or 0)
        _check(engine, nodes[0])
        engine.dispose()
    setting = options.setting(mismatch_rows=rows, runs=runs, nodes=len(nodes), runs_of_a_node=NODE_RUNS, page=PAGE)

    def ms(name: str, what: str, taken: Sequence[float], q: float = 0.5, bound: float | None = None) -> Row:
        return row(f"profile.{name}", what, quantile(taken, q), setting, unit="ms", bound=bound)

    return [
        ms("node", "profile of a node, 99th percentile", profile, 0.99, BOUND_MS),
        ms("node_median", "the same, median", profile),
        ms("node_many", f"profile of a node with {MANY_RUNS} runs, median", many),
        ms("node_without", "its counts from the rows, without roll-ups, median", plain),
        ms("page", "page of the run list, 99th percentile", page, 0.99, BOUND_MS),
        ms("page_node", "the same of one node", of_node, 0.99, BOUND_MS),
        ms("page_without", "a page from the rows, without totals, median", plain_page),
        ms("fleet", "verdicts of all nodes, median", fleet),
    ]


def _timed(ask: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each; the first warms connections and caches."""
    ask()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        ask()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def _ask(engine: Engine, query: str, **values: object) -> object:
    with engine.connect() as conn:
        return conn.execute(text(query), values).all()


def _check(engine: Engine, node: str) -> None:
    """Both ways count the same."""
    profile = load_node(engine, node)
    with engine.connect() as conn:
        counts = conn.execute(text(WITHOUT), {"node": node}).one()[0]
    told = {f"{c.phase}/{c.module}/{c.family}": c.mismatched_elements for c in profile.classes}
    counts = json.loads(counts) if isinstance(counts, str) else counts
    if told != {c["key"]: int(c["bad"]) for c in counts}:
        raise RuntimeError("the profile and the rows do not count the same")


def _first_run(engine: Engine, url: str) -> UUID:
    now = time.time()
    run_id = new_run_id(now, os.urandom(10))
    store.create_run(
        engine,
        RunRow(
            run_id=run_id, created_at=now, workload="submodule", kind="suspect", model="small", synthetic=False,
            reference_node="healthy", suspect_node="node-0", spec={"tp": TP}, state="running",
        ),
    )  # fmt: skip
    store.start_attempt(
        engine,
        AttemptRow(
            run_id=run_id, attempt=1, state=AttemptState.RUNNING, started_at=now, reference_host="healthy",
            suspect_host="node-0", devices=TP,
        ),
    )  # fmt: skip
    with open_connection(url) as conn:
        writer.prepare(conn)
        writer.write(conn, [writer.line(record) for record in _records(run_id)])
    store.finish_attempt(engine, run_id, 1, state=AttemptState.CLOSED, reason="completed", ended_at=now)
    store.finish_run(
        engine, run_id, verdict="mismatch", reason="completed", sentence="mismatch: made by the bench", finished_at=now
    )
    return run_id


def _records(run_id: UUID) -> list[Record]:
    rng = random.Random(0)
    rows: list[MismatchRecord] = []
    each = RUN_ROWS // STEPS
    for step in range(1, STEPS + 1):
        for place in rng.sample(range(len(HIT) * LAYERS * TP), each):
            phase, module, tensor = HIT[place % len(HIT)].split("/")
            rows.append(
                MismatchRecord(
                    run_id=run_id, attempt=1, step=step, site=place // TP, rank=place % TP, phase=Phase(phase),
                    module=Module(module), layer=place % LAYERS, tensor=tensor, cause=Cause.COMPUTE, elements=524_288,
                    mismatched=rng.randrange(1, 20_000), severity_mean=rng.random(), severity_median=rng.random(),
                    severity_max=rng.expovariate(1e-3), zero_reference=0, nonfinite=rng.randrange(2),
                    nullified=rng.randrange(5), bits=[rng.randrange(2_000) for _ in range(16)],
                    first_index=rng.randrange(524_288), extent=rng.choice(list(Extent)),
                    box=[[0, 3], [0, 255], [rng.randrange(9), 511]], replay=rng.choice(list(ReplayClass)), replays=3,
                    replays_right=1, detected_at=time.time(),
                )
            )  # fmt: skip
    steps = [_step(run_id, step, [m for m in rows if m.step == step]) for step in range(STEPS + 1)]
    closing = ClosingRecord(
        run_id=run_id, attempt=1, steps=len(steps), mismatches=len(rows), mismatches_total=len(rows), controls=0,
        faults=0, capped=False, reason="completed", device_seconds=3600.0, devices=[f"cuda:{i}" for i in range(TP)],
        finished_at=time.time(),
    )  # fmt: skip
    return [*steps, *rows, closing]


def _step(run_id: UUID, step: int, rows: Sequence[MismatchRecord]) -> StepRecord:
    classes = {}
    for name in CLASSES:
        mine = [m for m in rows if f"{m.phase}/{m.module}/{m.tensor}" == name]
        sites = LAYERS * TP
        classes[name] = ClassCounts(sites, sites * 524_288, len(mine), sum(m.mismatched or 0 for m in mine))
    return StepRecord(
        run_id=run_id, attempt=1, step=step, classes=classes, rows=len(rows), duration_s=2.25, sync="optimistic",
        finished_at=time.time(),
    )  # fmt: skip


def _clone(url: str, first: UUID, runs: int) -> list[str]:
    """``runs`` runs in all, the ids in random order over the nodes."""
    nodes = [f"node-{i}" for i in range((runs - MANY_RUNS) // NODE_RUNS)]
    others = [node for node in nodes for _ in range(NODE_RUNS)][1:] + [MANY] * MANY_RUNS
    random.Random(1).shuffle(others)
    now = time.time()
    with open_connection(url, statement_timeout_s=3600) as conn:
        conn.execute("CREATE TEMP TABLE clones (run_id uuid, suspect_node text, reference_node text)")
        with conn.cursor() as cursor, cursor.copy("COPY clones FROM STDIN") as copy:
            for number, node in enumerate(others):
                run_id = new_run_id(now + number * 1e-3, os.urandom(10))
                copy.write_row((str(run_id), node, f"healthy-{number % 7}"))
        conn.execute("ANALYZE clones")
        for table, changed in CLONE.items():
            found = conn.execute(
                "SELECT column_name FROM information_schema.columns WHERE table_name = %s ORDER BY ordinal_position",
                [table],
            )
            columns = [str(name) for (name,) in found]
            names = {"reference_host": "c.reference_node", "suspect_host": "c.suspect_node"}
            values = [
                names.get(c, f"c.{c}") if c in changed.split(", ") else f"t.{c}"
                for c in columns
            ]  # fmt: skip
            conn.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(values)} "
                f"FROM clones c, {table} t WHERE t.run_id = %s",
                [first],
            )
            conn.commit()
        conn.autocommit = True
        conn.execute("VACUUM ANALYZE")
        conn.execute("CHECKPOINT")
    return nodes
