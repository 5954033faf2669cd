"""The sink never blocks, loses nothing and doubles nothing, whatever happens to the database or to its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from sqlalchemy import Engine, text

from db_samples import make_run, mismatch, run_row, scalar, some_records, step
from tandem.db import embedded, store
from tandem.db.engine import connect
from tandem.db.replay import replay_spools
from tandem.db.sink import Sink, encoder
from tandem.db.spool import Spool, frame, header
from tandem.errors import DatabaseError
from tandem.ids import new_run_id
from tandem.records import AttemptRow, Record


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never became true"
        time.sleep(0.01)


def stored(engine: Engine, run_id: UUID) -> tuple[int, int, int]:
    """Steps, mismatches, and steps in the attempt's totals (by their elements: 800 each)."""
    with engine.connect() as conn:
        row = conn.execute(
            text(
                "SELECT (SELECT count(*) FROM steps WHERE run_id = :r), "
                "(SELECT count(*) FROM mismatches WHERE run_id = :r), "
                "(SELECT coalesce(sum(elements), 0) / 800 FROM attempt_totals WHERE run_id = :r)"
            ),
            {"r": run_id},
        ).one()
        return int(row[0]), int(row[1]), int(row[2])


def leave_spool(folder: Path, run_id: UUID, records: list[Record]) -> Path:
    spool = Spool(folder, run_id, 1)
    spool.append([encoder.encode(record) for record in records], sync=True)
    (path,) = spool.close()
    return path


def test_writing_twice_changes_nothing(database_url: str, engine: Engine, tmp_path: Path) -> None:
    run_id = make_run(engine)
    totals = []
    for _ in range(2):
        with Sink(database_url, tmp_path, run_id, 1) as sink:
            for record in some_records(run_id, 7):
                sink.put(record)
            assert sink.flush(20)
            stats = sink.stats
            assert (stats.acknowledged, stats.waiting, stats.spooled) == (stats.put, 0, 0)
        with engine.connect() as conn:
            totals.append(conn.execute(text("SELECT steps, sites, elements, first_step FROM attempt_totals")).all())
    assert stored(engine, run_id) == (7, 7, 7)
    assert totals[0] == totals[1]
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_postgres_refuses_is_named_and_the_others_are_stored(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    """One wrong row must not stop a run's records for ever, nor let the run pass for complete."""
    run_id = make_run(engine)
    errors: list[str] = []
    with Sink(database_url, tmp_path, run_id, 1, on_error=errors.append) as sink:
        for number in range(20):
            sink.put(mismatch(run_id, number, site=2**40 if number == 11 else number))
        assert not sink.flush(20)
        assert (sink.stats.acknowledged, sink.stats.refused) == (19, 1)
    assert stored(engine, run_id)[1] == 19
    assert len(errors) == 1
    assert "out of range" in errors[0]


def test_an_outage_neither_blocks_nor_loses_nor_doubles(tandem_home: Path, tmp_path: Path) -> None:
    """The server is killed and started again three times under a stream of records."""
    with embedded.embedded_database() as url:
        engine = connect(url)
        run_id = make_run(engine)
        sink = Sink(url, tmp_path, run_id, 1)
        longest, number = 0.0, 0
        for _ in range(3):
            for _ in range(300):
                begin = time.monotonic()
                sink.put(step(run_id, number))
                sink.put(mismatch(run_id, number))
                longest = max(longest, time.monotonic() - begin)
                number += 1
            pid = embedded.status().pid
            assert pid is not None
            psutil.Process(pid).kill()
            psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], 10)
            for _ in range(100):
                sink.put(step(run_id, number))
                number += 1
            wait_until(lambda: sink.stats.last_error is not None)
            assert not sink.flush(0.05)
            assert sink.stats.spooled > 0
            with embedded.embedded_database():
                assert sink.flush(60)
        assert sink.stats.last_error is None
        assert sink.close()
        assert stored(engine, run_id) == (number, 900, number)
        assert longest < 1.0
        engine.dispose()
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_delivered_waits_for_the_next_process(database_url: str, engine: Engine, tmp_path: Path) -> None:
    run_id = make_run(engine)
    sink = Sink("postgresql://nobody@/x?host=/nowhere", tmp_path, run_id, 1)
    for number in range(50):
        sink.put(step(run_id, number))
    assert not sink.close(timeout=0.2)
    report = replay_spools(database_url, tmp_path)
    assert (report.records, report.rows, len(report.replayed)) == (50, 50, 1)
    assert stored(engine, run_id) == (50, 0, 50)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_and_what_exceeds_it_comes_back_from_the_spool(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    run_id = make_run(engine)
    with engine.connect() as lock:
        lock.execute(text("LOCK TABLE steps IN ACCESS EXCLUSIVE MODE"))
        sink = Sink(database_url, tmp_path, run_id, 1, memory_records=100)
        for number in range(3000):
            sink.put(step(run_id, number))
        wait_until(lambda: sink.stats.spooled == 3000)
        assert sink._held <= 100 + 5000
        assert sum(len(batch.items or ()) for batch in sink._batches) <= 100
        lock.rollback()
    assert sink.close(60)
    assert stored(engine, run_id) == (3000, 0, 3000)


def test_without_spool_the_database_still_gets_everything(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """A full disk is a named condition, not a lost record, for as long as the database answers."""
    run_id = make_run(engine)
    folder = tmp_path / "file"
    folder.write_text("in the way")
    sink = Sink(database_url, folder, run_id, 1)
    for number in range(200):
        sink.put(step(run_id, number))
    assert sink.flush(30)
    assert "spool_unwritable" in (sink.stats.last_error or "")
    assert sink.close()
    assert stored(engine, run_id) == (200, 0, 200)


def test_without_spool_and_database_the_loss_is_counted(tmp_path: Path) -> None:
    sink = Sink(
        "postgresql://nobody@/x?host=/nowhere", tmp_path, UUID(int=7), 1, memory_records=50, spool_limit_bytes=40
    )
    for number in range(500):
        sink.put(step(UUID(int=7), number))
    wait_until(lambda: sink.stats.lost > 0)
    assert not sink.flush(0.01)
    assert not sink.close(0.1)
    assert "spool_full" in (sink.stats.last_error or "") or "nowhere" in (sink.stats.last_error or "")


def test_a_hanging_server_is_cut_off(
    database_url: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped backend answers nothing and closes nothing; the sink leaves it and goes on."""
    monkeypatch.setattr("tandem.db.sink.STALL_S", 1.0)
    run_id = make_run(engine)
    with Sink(database_url, tmp_path, run_id, 1) as sink:
        sink.put(step(run_id, 0))
        assert sink.flush(20)
        connection = sink._connection
        assert connection is not None
        backend = connection.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        try:
            sink.put(step(run_id, 1))
            assert sink.flush(30)
        finally:
            os.kill(backend, signal.SIGCONT)
    assert stored(engine, run_id) == (2, 0, 2)


WRITER = """
import sys
from pathlib import Path
from uuid import UUID
sys.path.insert(0, sys.argv[4])
from db_samples import mismatch, step
from tandem.db.sink import Sink
run_id = UUID(sys.argv[3])
sink = Sink(sys.argv[1], Path(sys.argv[2]), run_id, 1)
number = 0
while True:
    sink.put(step(run_id, number))
    sink.put(mismatch(run_id, number))
    number += 1
    if number % 10 == 0:
        stats = sink.stats
        print(number, stats.acknowledged + stats.spooled, flush=True)
"""


def test_a_killed_process_loses_nothing_that_was_spooled_or_acknowledged(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    """The kill falls at moments spread over the writer's life; what it claimed to be safe is there, once."""
    tests = str(Path(__file__).parent.parent)
    for moment in (1, 40, 150):
        run_id = make_run(engine)
        command = [sys.executable, "-c", WRITER, database_url, str(tmp_path), str(run_id), tests]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        lines: list[str] = []
        for line in child.stdout:
            lines.append(line)
            if len(lines) >= moment and int(line.split()[1]) > 0:
                break
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        safe = int([line for line in lines if line.endswith("\n")][-1].split()[1])
        replay_spools(database_url, tmp_path)
        steps, mismatches, booked = stored(engine, run_id)
        assert steps + mismatches >= safe
        assert booked == steps
        assert scalar(engine, "SELECT max(step) + 1 FROM steps WHERE run_id = :r", r=run_id) == steps
        assert replay_spools(database_url, tmp_path).records == 0
    assert not list(tmp_path.glob("*.spool"))


def test_replay_does_not_double(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """The process may have died between the commit and giving the space back."""
    run_id = make_run(engine)
    for _ in range(2):
        leave_spool(tmp_path, run_id, some_records(run_id, 4))
    report = replay_spools(database_url, tmp_path)
    assert (report.records, report.rows) == (28, 14)
    assert stored(engine, run_id) == (4, 4, 4)


def test_two_replays_at_once_store_everything_once(database_url: str, engine: Engine, tmp_path: Path) -> None:
    runs = [make_run(engine) for _ in range(6)]
    for run_id in runs:
        leave_spool(tmp_path, run_id, some_records(run_id, 20))
    threads = [threading.Thread(target=replay_spools, args=(database_url, tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replay_spools(database_url, tmp_path)
    assert [stored(engine, run_id) for run_id in runs] == [(20, 20, 20)] * 6


def test_a_damaged_segment_is_set_aside_after_its_good_part_was_stored(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    run_id = make_run(engine)
    frames = [frame(encoder.encode(step(run_id, number))) for number in range(5)]
    frames[3] = frames[3][:20] + b"?" + frames[3][21:]
    (tmp_path / "a.spool").write_bytes(header(run_id, 1) + b"".join(frames))
    (tmp_path / "b.spool").write_bytes(header(run_id, 1) + frame(b"\xc1 no message"))
    (tmp_path / "c.spool").write_bytes(b"not a spool, but long enough to hold a header")
    (tmp_path / "d.spool").write_bytes(b"TAN")
    report = replay_spools(database_url, tmp_path)
    assert stored(engine, run_id) == (3, 0, 3)
    assert len(report.quarantined) == 3
    assert len(report.replayed) == 1
    assert all(path.exists() for path in report.quarantined)
    assert replay_spools(database_url, tmp_path).quarantined == []


def test_a_spool_of_another_database_waits_for_it(database_url: str, engine: Engine, tmp_path: Path) -> None:
    path = leave_spool(tmp_path, UUID(int=9), [step(UUID(int=9), 0)])
    assert replay_spools(database_url, tmp_path).foreign == [path]
    assert path.exists()


def test_a_living_sink_is_left_alone(database_url: str, engine: Engine, tmp_path: Path) -> None:
    run_id = make_run(engine)
    sink = Sink("postgresql://nobody@/x?host=/nowhere", tmp_path, run_id, 1)
    sink.put(step(run_id, 0))
    wait_until(lambda: sink.stats.spooled == 1)
    assert len(replay_spools(database_url, tmp_path).busy) == 1
    sink.close(0.1)
    assert replay_spools(database_url, tmp_path).rows == 1


def test_a_replay_without_database_keeps_the_spool(tmp_path: Path) -> None:
    path = leave_spool(tmp_path, UUID(int=9), [step(UUID(int=9), 0)])
    with pytest.raises(DatabaseError, match="cannot be used"):
        replay_spools("postgresql://nobody@/x?host=/nowhere", tmp_path)
    assert path.exists()


def test_a_late_spool_of_a_dropped_month_is_not_counted_again(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    run_id = make_run(engine)
    leave_spool(tmp_path, run_id, [step(run_id, 0)])
    with engine.begin() as conn:
        conn.execute(text("UPDATE runs SET records_dropped_at = now()"))
    report = replay_spools(database_url, tmp_path)
    assert len(report.expired) == 1
    assert stored(engine, run_id) == (0, 0, 0)


def test_a_record_is_visible_within_a_second(database_url: str, engine: Engine, tmp_path: Path) -> None:
    run_id = make_run(engine)
    with Sink(database_url, tmp_path, run_id, 1) as sink:
        sink.put(step(run_id, 0))
        assert sink.flush(20)  # connected
        delays = []
        for number in range(1, 21):
            begin = time.monotonic()
            sink.put(step(run_id, number))
            assert sink.flush(20)
            delays.append(time.monotonic() - begin)
    assert sorted(delays)[-2] < 1.0


def test_the_sink_needs_the_run_no_more_than_the_store_does(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """A run that was finished meanwhile (closed as an orphan) still gets its late records."""
    run_id = make_run(engine)
    store.finish_run(engine, run_id, verdict="inconclusive", reason="r", sentence="s", finished_at=1.8e9)
    leave_spool(tmp_path, run_id, [step(run_id, 0)])
    assert replay_spools(database_url, tmp_path).rows == 1


def test_nothing_is_stored_before_the_attempt_itself_is(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """Its controller may have found the database away while the pair ran: without the run's row the month's partition
    may be missing. The records wait, and then all count.
    """
    run_id = new_run_id(time.time(), os.urandom(10))
    errors: list[str] = []
    with Sink(database_url, tmp_path, run_id, 1, on_error=errors.append) as sink:
        for record in some_records(run_id, 6):
            sink.put(record)
        wait_until(lambda: sink.stats.last_error is not None)
        assert "is not stored there yet" in errors[0]
        assert (sink.stats.acknowledged, sink.stats.refused, sink.stats.spooled) == (0, 0, sink.stats.put)
        store.create_run(engine, run_row(run_id))
        assert not sink.flush(0.3)
        assert stored(engine, run_id) == (0, 0, 0)
        store.start_attempt(
            engine,
            AttemptRow(
                run_id=run_id,
                attempt=1,
                state="running",
                started_at=1.0,
                reference_host="a",
                suspect_host="b",
                devices=2,
            ),
        )
        assert sink.flush(30)
        assert sink.stats.last_error is None
    assert stored(engine, run_id) == (6, 6, 6)


def test_a_spool_whose_attempt_is_not_stored_waits_for_it(database_url: str, engine: Engine, tmp_path: Path) -> None:
    run_id = new_run_id(time.time(), os.urandom(10))
    path = leave_spool(tmp_path, run_id, some_records(run_id, 3))
    store.create_run(engine, run_row(run_id))
    assert replay_spools(database_url, tmp_path).foreign == [path]
    assert stored(engine, run_id) == (0, 0, 0)
    store.start_attempt(
        engine,
        AttemptRow(run_id=run_id, attempt=1, state="running", started_at=1.0, reference_host="a", suspect_host="b"),
    )
    assert replay_spools(database_url, tmp_path).replayed == [path]
    assert stored(engine, run_id) == (3, 3, 3)
