"""How live runs stand, from totals that are kept as the rows come, and equal to the rows."""

from __future__ import annotations

import os
import random
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Engine, event, text

from db_samples import make_run, mismatch, run_row, some_records, step
from tandem.db import store
from tandem.db.engine import connect
from tandem.db.live import First, progress, steps_per_s
from tandem.db.sink import Sink
from tandem.errors import DatabaseError
from tandem.ids import new_run_id
from tandem.records import AttemptRow, Record
from tandem.vocabulary import AttemptState, Cause


def deliver(url: str, folder: Path, run_id: UUID, attempt: int, records: list[Record]) -> None:
    with Sink(url, folder, run_id, attempt) as sink:
        for record in records:
            sink.put(msgspec.structs.replace(record, attempt=attempt))
        assert sink.flush(20)


def second_attempt(engine: Engine, run_id: UUID) -> None:
    store.start_attempt(engine, AttemptRow(run_id=run_id, attempt=2, state="running", started_at=1_790_000_000.0))


def test_totals_are_those_of_the_rows_however_often_they_come(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    """In any order, in any batches, twice over."""
    run_id = make_run(engine)
    rows: list[Record] = [step(run_id, n) for n in range(20)]
    rows += [mismatch(run_id, n, site=site, rank=1) for n in range(5, 20) for site in (4, 3)]
    # A step says how many rows belong to it, those beyond the cap included: 1 here, and 1 is of cause compute.
    rows[7] = msgspec.structs.replace(rows[7], rows=6)
    rows.append(
        msgspec.structs.replace(mismatch(run_id, 5, site=3, rank=0, tensor="input.x"), cause=Cause.STATE, layer=-1)
    )
    for seed in (1, 2):
        random.Random(seed).shuffle(rows)
        half = len(rows) // 2
        for part in (rows[:half], rows[half:], rows):
            deliver(database_url, tmp_path, run_id, 1, part)
    found = progress(engine, [run_id])[run_id]
    assert (found.attempt, found.state, found.closing, found.step) == (1, "running", None, 19)
    assert (found.sites, found.elements) == (20 * 8, 20 * 800)
    assert (found.mismatched_sites, found.mismatched_elements, found.other_findings) == (20, 60, 5)
    assert found.first == First(1, 5, "fwd/attn input.x", 0, 3)


def test_the_newest_attempt_stands_for_the_run_and_counts_are_of_all(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    run_id = make_run(engine)
    deliver(database_url, tmp_path, run_id, 1, some_records(run_id, 4))
    one = progress(engine, [run_id])[run_id]
    assert (one.attempt, one.closing, one.step, one.mismatched_sites) == (1, "completed", 3, 4)
    assert one.first == First(1, 0, "fwd/attn layer 3 out", 0, 3)
    store.finish_attempt(engine, run_id, 1, state=AttemptState.CLOSED, reason="completed", ended_at=1_790_000_000.0)
    assert progress(engine, [run_id])[run_id].state == "closed"
    second_attempt(engine, run_id)
    two = progress(engine, [run_id])[run_id]
    assert (two.attempt, two.state, two.closing, two.step, two.elements) == (2, "running", None, None, 4 * 800)
    deliver(database_url, tmp_path, run_id, 2, [step(run_id, 0), mismatch(run_id, 0, site=9)])
    three = progress(engine, [run_id])[run_id]
    assert (three.step, three.elements, three.first) == (0, 5 * 800, one.first)


def test_one_query_for_all_that_reads_no_step_and_no_mismatch(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    """So that two hundred runs, however long, cost the same every few seconds."""
    runs = [make_run(engine) for _ in range(30)]
    for run_id in runs:
        deliver(database_url, tmp_path, run_id, 1, some_records(run_id, 2))
    never_stored = new_run_id(1_790_000_000.0, os.urandom(10))
    without_attempt = new_run_id(1_790_000_000.0, os.urandom(10))
    store.create_run(engine, run_row(without_attempt))
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    found = progress(engine, [*runs, never_stored, without_attempt])
    assert set(found) == set(runs)
    (asked,) = [s for s in statements if "attempt_totals" in s]
    assert "FROM steps" not in asked
    assert "FROM mismatches" not in asked
    assert progress(engine, []) == {}


def test_the_rate_is_of_the_newest_hundred_steps(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """Of the one attempt; what took long to begin counts no more later, and the initial parameters never."""
    run_id = make_run(engine)
    at = [*(1_790_000_000.0 + 10 * n for n in range(31)), *(1_790_001_000.0 + 0.25 * n for n in range(100))]
    rows = [msgspec.structs.replace(step(run_id, n), finished_at=then) for n, then in enumerate(at)]
    rates = []
    for part in (rows[:2], rows[2:31], rows[31:]):
        deliver(database_url, tmp_path, run_id, 1, [*part])
        with engine.connect() as conn:
            rates.append(steps_per_s(conn, run_id, 1))
            assert steps_per_s(conn, run_id, 2) is None
    assert rates == [None, 0.1, 4.0]


def test_a_database_that_is_away_is_one_line() -> None:
    engine = connect("postgresql://nobody:hunter2@/x?host=/nowhere")
    with pytest.raises(DatabaseError) as caught:
        progress(engine, [new_run_id(1.0, os.urandom(10))])
    assert "hunter2" not in str(caught.value)
    engine.dispose()


def test_totals_come_and_go_with_their_rows(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """In one transaction: a batch that fails leaves no trace in them."""
    run_id = make_run(engine)
    with engine.begin() as conn:
        conn.execute(text("ALTER TABLE closings ADD CONSTRAINT never CHECK (steps < 0)"))
    with Sink(database_url, tmp_path, run_id, 1) as sink:
        for record in some_records(run_id, 3):
            sink.put(record)
        assert not sink.flush(20)
        assert sink.stats.refused == 1
    found = progress(engine, [run_id])[run_id]
    assert (found.step, found.elements, found.closing) == (2, 3 * 800, None)
