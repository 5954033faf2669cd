"""The whole way of mismatch rows into PostgreSQL against a bare COPY."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import psycopg
from sqlalchemy import Engine

from bench.options import Options
from bench.results import Row, row
from bench.stats import quantile, ratios, shuffled_blocks
from tandem.db import store
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect, open_connection
from tandem.db.rows import LAYOUTS
from tandem.db.sink import Sink
from tandem.ids import new_run_id
from tandem.records import AttemptRow, MismatchRecord, RunRow
from tandem.vocabulary import AttemptState, Cause, Extent, Module, Phase, ReplayClass

ROWS = 20_000
"""Rows of one measurement: the sink's full memory, some seconds of a suspect that corrupts every site."""
WARMUP = 1
FLUSH_S = 120.0
CHUNK = 500
LAYOUT = LAYOUTS[MismatchRecord]
COPY = f"COPY mismatches ({', '.join(LAYOUT.columns)}) FROM STDIN"
TIME = LAYOUT.columns.index("detected_at")


def measure(options: Options) -> list[Row]:
    """All into the same table of the same server, interleaved; every measurement is a run of its own."""
    seconds: list[dict[str, float]] = []
    with embedded_database() as url, tempfile.TemporaryDirectory() as spool:
        engine = connect(url)
        with open_connection(url) as conn:
            conn.autocommit = True
            for number, block in enumerate(shuffled_blocks(("sink", *COPIES), WARMUP + options.blocks, options.seed)):
                seconds.append({})
                for kind in block:
                    run_id = new_run(engine)
                    rows = mismatches(run_id, ROWS, number)
                    conn.execute("CHECKPOINT")  # what earlier measurements left dirty is not this one's to write
                    taken = through_sink(url, Path(spool), rows) if kind == "sink" else COPIES[kind](conn, rows)
                    stored = conn.execute("SELECT count(*) FROM mismatches WHERE run_id = %s", [run_id]).fetchone()
                    if stored != (ROWS,):
                        raise RuntimeError(f"{kind} stored {stored} of {ROWS} rows")
                    seconds[-1][kind] = taken
        engine.dispose()
    del seconds[:WARMUP]
    setting = options.setting(rows=ROWS)
    return [
        row(
            "records.sink", "rows a second through the whole sink / by a bare COPY of the same records",
            quantile(ratios(seconds, "copy", "sink")), setting, bound=0.5, sense="at least",
        ),
        row(
            "records.ready", "the same / by a bare COPY of lines that were made before",
            quantile(ratios(seconds, "ready", "sink")), setting,
        ),
        row(
            "records.rate", "through the whole sink", quantile([ROWS / block["sink"] for block in seconds]), setting,
            unit="rows/s",
        ),
    ]  # fmt: skip


def through_sink(url: str, spool: Path, rows: Sequence[MismatchRecord]) -> float:
    """Seconds from the first ``put`` until everything is acknowledged."""
    sink = Sink(url, spool, rows[0].run_id, 1)
    try:
        began = time.monotonic()
        for record in rows:
            sink.put(record)
        if not sink.flush(FLUSH_S):
            raise RuntimeError(f"the sink did not deliver: {sink.stats}")
        return time.monotonic() - began
    finally:
        sink.close()


def bare_copy(conn: psycopg.Connection[object], rows: Sequence[MismatchRecord]) -> float:
    """Seconds of one COPY that makes its lines as it goes, while the server takes them; commit included."""
    began = time.monotonic()
    with conn.cursor() as cursor, cursor.copy(COPY) as copy:
        for first in range(0, len(rows), CHUNK):
            copy.write("".join(map(_line, rows[first : first + CHUNK])))
    return time.monotonic() - began


def ready_copy(conn: psycopg.Connection[object], rows: Sequence[MismatchRecord]) -> float:
    """Seconds of one COPY whose lines are there already; commit included."""
    text = "".join(map(_line, rows))
    began = time.monotonic()
    with conn.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.write(text)
    return time.monotonic() - began


def _line(record: MismatchRecord) -> str:
    """A line for the table itself, whose times are no seconds since the epoch; by the sink's own, fast encoders."""
    fields = LAYOUT.line(record)[:-1].split("\t")
    fields[TIME] = f"{datetime.fromtimestamp(record.detected_at, UTC)}"
    return "\t".join(fields) + "\n"


def new_run(engine: Engine) -> UUID:
    """A stored run with one attempt, to which rows can belong."""
    now = time.time()
    run_id = new_run_id(now, os.urandom(10))
    store.create_run(
        engine,
        RunRow(
            run_id=run_id, created_at=now, workload="submodule", kind="null", model="small", synthetic=True,
            reference_node="bench", suspect_node="bench", spec={}, state="running",
        ),
    )  # fmt: skip
    store.start_attempt(
        engine,
        AttemptRow(
            run_id=run_id, attempt=1, state=AttemptState.RUNNING, started_at=now, reference_host="bench",
            suspect_host="bench",
        ),
    )  # fmt: skip
    return run_id


def mismatches(run_id: UUID, count: int, seed: int) -> list[MismatchRecord]:
    """Rows like those of a suspect that corrupts every site: many distinct numbers, all columns filled."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        step, place = divmod(number, 200)
        found.append(
            MismatchRecord(
                run_id=run_id, attempt=1, step=step + 1, site=place // 2, rank=place % 2, phase=Phase.BWD,
                module=Module.ATTN, layer=place % 4, tensor="dx", cause=Cause.COMPUTE, elements=524_288,
                mismatched=rng.randrange(1, 20_000), severity_mean=rng.random(), severity_median=rng.random(),
                severity_max=rng.expovariate(1e-3), zero_reference=rng.randrange(9), nonfinite=0, nullified=0,
                bits=[rng.randrange(2_000) for _ in range(16)], first_index=rng.randrange(524_288),
                extent=Extent.SCATTERED, box=[[0, 3], [0, 255], [rng.randrange(9), 511]],
                replay=ReplayClass.TRANSIENT, replays=3, replays_right=3, generation=number,
                detected_at=time.time(),
            )
        )  # fmt: skip
    return found


COPIES = {"copy": bare_copy, "ready": ready_copy}
