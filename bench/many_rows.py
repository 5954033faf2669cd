"""A database with millions of mismatch rows: one run is written and summarised as any, then cloned by SQL."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Engine

from tandem.db import store, writer
from tandem.db.engine import open_connection
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
CLASSES = ("fwd/attn/out", "fwd/ffn/out", "bwd/attn/dx", "bwd/ffn/dx", "bwd/attn/dw", "bwd/ffn/dw", "fwd/attn/reduced",
           "fwd/ffn/reduced", "fwd/embed/out", "fwd/head/out", "bwd/head/dx", "bwd/embed/dw", "update/attn/param",
           "update/ffn/param", "update/attn/moment", "update/ffn/moment", "update/optimizer/grad_norm")  # fmt: skip
HIT = CLASSES[:4]
"""Classes that mismatch."""

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


def fill(engine: Engine, url: str, rows: int) -> tuple[list[str], int]:
    """Write at least that many mismatch rows: all runs have as many, and their own node.

    Returns:
        The nodes with `NODE_RUNS` runs each (`MANY` is one more), and how many runs there are.
    """
    runs = max(NODE_RUNS + MANY_RUNS, rows // RUN_ROWS)
    return _clone(url, ended_run(engine, url), runs), runs


def begin_run(engine: Engine, node: str) -> UUID:
    """A run of a node that has begun."""
    now = time.time()
    run_id = new_run_id(now, os.urandom(10))
    store.create_run(
        engine,
        RunRow(
            run_id=run_id, created_at=now, workload="submodule", kind="suspect", model="small", synthetic=False,
            reference_node="healthy", suspect_node=node, spec={"tp": TP}, state="running",
        ),
    )  # fmt: skip
    store.start_attempt(
        engine,
        AttemptRow(
            run_id=run_id, attempt=1, state=AttemptState.RUNNING, started_at=now, reference_host="healthy",
            suspect_host=node, devices=TP,
        ),
    )  # fmt: skip
    return run_id


def ended_run(engine: Engine, url: str, node: str = "node-0", mismatches: int = RUN_ROWS) -> UUID:
    """A run with its verdict, written as any."""
    run_id = begin_run(engine, node)
    with open_connection(url) as conn:
        writer.prepare(conn)
        writer.write(conn, [writer.line(record) for record in records(run_id, STEPS, mismatches)])
    now = time.time()
    store.finish_attempt(engine, run_id, 1, state=AttemptState.CLOSED, reason="completed", ended_at=now)
    verdict = "mismatch" if mismatches else "match"
    store.finish_run(
        engine, run_id, verdict=verdict, reason="completed", sentence=f"{verdict}: made by the bench", finished_at=now
    )
    return run_id


def records(run_id: UUID, steps: int, mismatches: int) -> list[Record]:
    """Records of a run that ends in order: so many steps, and mismatches spread evenly over them."""
    rng = random.Random(0)
    rows: list[MismatchRecord] = []
    each = mismatches // steps
    for step in range(1, steps + 1):
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
    made = [_step(run_id, step, [m for m in rows if m.step == step]) for step in range(steps + 1)]
    closing = ClosingRecord(
        run_id=run_id, attempt=1, steps=len(made), mismatches=len(rows), mismatches_total=len(rows), controls=0,
        faults=0, capped=False, reason="completed", device_seconds=3600.0, devices=[f"cuda:{i}" for i in range(TP)],
        finished_at=time.time(),
    )  # fmt: skip
    return [*made, *rows, closing]


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
