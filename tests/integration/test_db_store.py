"""The supervisor's writes and the queries."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine

from db_samples import make_run, mismatch, run_row, scalar, some_records, step
from tandem.db import liveness, queries, store
from tandem.db.sink import Sink
from tandem.errors import DatabaseError
from tandem.ids import new_run_id
from tandem.records import ControlRecord, Record, RunRecords
from tandem.vocabulary import AttemptState, ControlName, Role


def deliver(url: str, folder: Path, run_id: UUID, records: list[Record]) -> None:
    with Sink(url, folder, run_id, 1) as sink:
        for record in records:
            sink.put(record)
        assert sink.flush(20)


def judge(records: RunRecords) -> tuple[str, str, str]:
    return "inconclusive", f"{len(records.steps)} steps", "inconclusive: its supervisor is gone"


def dead_process() -> dict[str, object]:
    """Identity of a process that lived and ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found = liveness.identity(child.pid)
    assert liveness.alive(found) is True
    child.communicate()
    return found


def test_what_was_stored_is_read_back(database_url: str, engine: Engine, tmp_path: Path) -> None:
    run_id = make_run(engine)
    records = some_records(run_id, 5)
    deliver(database_url, tmp_path, run_id, records)
    found = queries.load_run(engine, run_id)
    assert found.run == run_row(run_id)
    assert [*found.steps, *found.mismatches, *found.faults, *found.controls, *found.closings] == [
        *sorted(
            (r for r in records[:-2]),
            key=lambda r: ["StepRecord", "MismatchRecord", "FaultRecord"].index(type(r).__name__),
        ),
        *records[-2:],
    ]
    counts = queries.stored_counts(engine, run_id, 1)
    closing = found.closings[0]
    assert (counts.steps, counts.mismatches, counts.controls, counts.faults) == (
        closing.steps,
        closing.mismatches,
        closing.controls,
        closing.faults,
    )


def test_hostile_text_and_numbers_do_not_break_a_row(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """Strings of the suspect end up in controls. PostgreSQL cannot hold NUL, JSON cannot hold NaN."""
    run_id = make_run(engine)
    subject = 'tab\t back\\slash \\N \\. new\nline "quote" {} é \ud83d\ude00'.encode("utf-16", "surrogatepass").decode(
        "utf-16"
    )
    detail = {"nul": "a\x00b", "written": "\\u0000", "nan": float("nan"), "deep": {"x": [1, "\t\\"]}}
    control = ControlRecord(
        run_id=run_id,
        attempt=1,
        name=ControlName.PARITY,
        role=Role.SUSPECT,
        step=0,
        subject=subject,
        ok=False,
        detail=detail,
    )
    odd_step = step(run_id, 0).__class__(
        run_id=run_id, attempt=1, step=0, classes={}, rows=0, loss_reference=float("inf"), loss_suspect=float("nan")
    )
    deliver(database_url, tmp_path, run_id, [control, odd_step])
    found = queries.load_run(engine, run_id)
    assert found.controls[0].subject == subject
    assert found.controls[0].detail == detail | {"nul": "a\ufffdb", "nan": None}
    assert found.steps[0].loss_reference == float("inf")
    assert found.steps[0].loss_suspect != found.steps[0].loss_suspect


def test_a_second_run_of_one_id_is_refused_in_one_line(engine: Engine) -> None:
    run_id = make_run(engine)
    with pytest.raises(DatabaseError, match=f"run {run_id} exists already") as caught:
        store.create_run(engine, run_row(run_id))
    assert "\n" not in str(caught.value)


def test_a_verdict_is_given_once(engine: Engine) -> None:
    run_id = make_run(engine)
    verdict = {"reason": "r", "sentence": "s", "finished_at": 1_790_000_200.0}
    assert store.finish_run(engine, run_id, verdict="mismatch", **verdict)
    assert not store.finish_run(engine, run_id, verdict="match", **verdict)
    assert queries.load_run(engine, run_id).run.verdict == "mismatch"


def test_an_attempt_is_closed_once(engine: Engine) -> None:
    run_id = make_run(engine)
    close = {"reason": "completed", "ended_at": 1_790_000_200.0, "fingerprint": "f", "parity": {"jaxlib": "0.10"}}
    assert store.finish_attempt(engine, run_id, 1, state=AttemptState.CLOSED, **close)
    assert not store.finish_attempt(engine, run_id, 1, state=AttemptState.ORPHANED, **close)
    (attempt,) = queries.load_run(engine, run_id).attempts
    assert (attempt.state, attempt.fingerprint, attempt.parity) == ("closed", "f", {"jaxlib": "0.10"})


def test_orphans_are_closed_and_the_living_left_alone(database_url: str, engine: Engine, tmp_path: Path) -> None:
    living = make_run(engine)
    elsewhere = make_run(engine, supervisor=liveness.identity() | {"host": "another"})
    rebooted = make_run(engine, supervisor=liveness.identity() | {"boot": "before"})
    killed = make_run(engine, supervisor=dead_process())
    closed = make_run(engine, supervisor=dead_process())
    deliver(database_url, tmp_path, killed, some_records(killed, 2)[:-1])
    deliver(database_url, tmp_path, closed, some_records(closed, 2))
    never_started = new_run_id(1_790_000_000.0, os.urandom(10))
    store.create_run(engine, run_row(never_started), supervisor=dead_process())

    finished = store.close_orphans(engine, judge, 1_790_000_300.0)
    assert set(finished) == {rebooted, killed, closed, never_started}
    assert {queries.load_run(engine, run).run.state for run in (living, elsewhere)} == {"running"}
    states = {run: queries.load_run(engine, run).attempts[0].state for run in (rebooted, killed, closed)}
    assert states == {rebooted: "orphaned", killed: "orphaned", closed: "closed"}
    assert queries.load_run(engine, killed).run.reason == "2 steps"
    assert store.close_orphans(engine, judge, 1_790_000_300.0) == []


def test_orphans_closed_by_two_commands_at_once_are_finished_once(engine: Engine) -> None:
    gone = dead_process()
    runs = {make_run(engine, supervisor=gone) for _ in range(4)}
    finished: list[UUID] = []
    threads = [
        threading.Thread(target=lambda: finished.extend(store.close_orphans(engine, judge, 1_790_000_300.0)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == sorted(runs)


def test_runs_are_listed_newest_first_with_their_totals(database_url: str, engine: Engine, tmp_path: Path) -> None:
    old, new = make_run(engine), make_run(engine, synthetic=True)
    deliver(database_url, tmp_path, old, [step(old, 1), step(old, 2), mismatch(old, 1)])
    rows = queries.list_runs(engine)
    assert [row.run.run_id for row in rows] == sorted([old, new], reverse=True)
    totals = {row.run.run_id: row for row in rows}
    assert (totals[old].steps, totals[old].sites, totals[old].elements) == (2, 16, 1600)
    assert (totals[old].mismatched_sites, totals[old].mismatched_elements, totals[old].attempts) == (2, 6, 1)
    assert (totals[new].steps, totals[new].elements) == (0, 0)
    assert [row.run.run_id for row in queries.list_runs(engine, synthetic=True)] == [new]
    assert [row.run.run_id for row in queries.list_runs(engine, 1)] == [max(old, new)]
    assert [row.run.run_id for row in queries.list_runs(engine, before=max(old, new))] == [min(old, new)]
    assert queries.list_runs(engine, node="nobody") == []


def test_a_run_is_found_by_a_unique_prefix(engine: Engine) -> None:
    with pytest.raises(DatabaseError, match="no run yet"):
        queries.find_run(engine, "last")
    first, second = UUID("01a22926-561b-72b1-aca5-96239d3c4608"), UUID("01a22926-561c-72b1-aca5-96239d3c4608")
    for run_id in (first, second):
        store.create_run(engine, run_row(run_id))
    assert queries.find_run(engine, "01a22926-561b") == first
    assert queries.find_run(engine, "01A22926561C") == second
    assert queries.find_run(engine, "last") == second
    for wrong, message in {"01a2": "several runs", "ff": "no run begins", "x%": "no run id", "": "no run id"}.items():
        with pytest.raises(DatabaseError, match=message):
            queries.find_run(engine, wrong)


def test_a_run_that_is_not_there(engine: Engine) -> None:
    with pytest.raises(DatabaseError, match="there is no run"):
        queries.load_run(engine, UUID(int=1))
    assert scalar(engine, "SELECT count(*) FROM runs") == 0
