"""Migrations, the rules that the schema itself keeps, partitions and retention."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import SchemaItem

from db_samples import make_run, run_row, scalar, some_records
from tandem.cli.app import main
from tandem.db import migrate, store
from tandem.db.check import check
from tandem.db.engine import one_line, open_connection
from tandem.db.models import PARTITIONED, Base
from tandem.db.partitions import Month, created, drop_partitions_older_than, ensure_partitions
from tandem.db.sink import Sink
from tandem.errors import DatabaseError
from tandem.ids import new_run_id


def is_ours(item: SchemaItem, name: str | None, kind: str, reflected: bool, compared: SchemaItem | None) -> bool:
    """Months are made at run time, so no migration knows them."""
    return not (kind == "table" and reflected and name is not None and name.rsplit("_", 1)[0] in PARTITIONED)


def test_models_equal_migrations(engine: Engine) -> None:
    with engine.begin() as conn:
        ensure_partitions(conn, datetime.now(UTC))
    with engine.connect() as conn:
        options = {"compare_type": True, "compare_server_default": True, "include_object": is_ours}
        assert compare_metadata(MigrationContext.configure(conn, opts=options), Base.metadata) == []


def test_up_down_and_up_again(database_url: str, engine: Engine) -> None:
    make_run(engine)
    migrate.downgrade(database_url, "base")
    assert migrate.current(database_url) is None
    left = "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
    assert scalar(engine, left) == 1  # alembic_version
    assert scalar(engine, "SELECT count(*) FROM pg_proc WHERE proname LIKE 'tandem%'") == 0
    with pytest.raises(DatabaseError, match=r"no Tandem schema.*tandem db upgrade"):
        check(database_url)
    migrate.upgrade(database_url)
    assert migrate.current(database_url) == migrate.head()
    check(database_url)


def test_upgrades_at_once_wait_for_each_other(database_url: str) -> None:
    """Also within one process: Alembic itself is not safe there."""
    migrate.downgrade(database_url, "base")
    script = "import sys; from tandem.db import migrate; migrate.upgrade(sys.argv[1])"
    others = [
        subprocess.Popen([sys.executable, "-c", script, database_url], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(migrate.upgrade, database_url) for _ in range(2)]:
            done.result()
    assert [other.communicate()[1] for other in others] == ["", ""]
    check(database_url)


def test_a_locked_table_ends_a_migration_in_one_line(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "LOCK_TIMEOUT_S", 1)
    with open_connection(database_url) as conn:
        conn.execute("LOCK TABLE runs")
        with pytest.raises(DatabaseError, match=r"stayed locked .*then try again") as caught:
            migrate.downgrade(database_url, "base")
    assert "\n" not in str(caught.value)
    check(database_url)


def test_a_newer_schema_is_refused(database_url: str, engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseError, match="newer than this Tandem"):
        check(database_url)
    with pytest.raises(DatabaseError, match="upgrade Tandem"):
        migrate.upgrade(database_url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://u:hunter2@127.0.0.1:1/x", r"127\.0\.0\.1:1 cannot be used"),
        ("postgres://u:hunter2@/x?host=/nowhere", "/nowhere cannot be used"),
        ("mysql://u:hunter2@h/x", "mysql database cannot be used"),
        ("hunter2", "cannot be read"),
        ("postgresql://u:hunter2@h:port/x", "cannot be read"),
    ],
)
def test_a_database_out_of_reach_is_one_line_without_the_password(url: str, message: str) -> None:
    with pytest.raises(DatabaseError, match=message) as caught:
        check(url)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_message_that_repeats_the_password_is_cleaned() -> None:
    url = "postgresql://u:p%40ss@h/x"
    assert one_line(RuntimeError("bad p@ss\nor p%40ss\nthird"), url) == "bad ***; or ***"
    assert one_line(RuntimeError("port 1 is no p"), "postgresql://u:p@h/x") == "port 1 is no ***"


def test_an_old_server_is_refused(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.db.check.MINIMUM_SERVER", 99)
    with pytest.raises(DatabaseError, match="Tandem needs 99 or newer"):
        check(database_url)


def test_synthetic_never_changes(engine: Engine) -> None:
    run_id = make_run(engine, synthetic=True)
    with pytest.raises(DBAPIError, match="synthetic or real for ever"), engine.begin() as conn:
        conn.execute(text("UPDATE runs SET synthetic = false WHERE run_id = :r"), {"r": run_id})
    with engine.begin() as conn:
        conn.execute(text("UPDATE runs SET reason = 'x' WHERE run_id = :r"), {"r": run_id})


@pytest.mark.parametrize(
    "change", ["UPDATE node_decisions SET reason = ''", "DELETE FROM node_decisions", "TRUNCATE node_decisions"]
)
def test_decisions_are_only_appended(engine: Engine, change: str) -> None:
    with engine.begin() as conn:
        conn.execute(
            text("INSERT INTO node_decisions (node, decision, reason, decided_by) VALUES ('n', 'cleared', 'r', 'me')")
        )
    with pytest.raises(DBAPIError, match="only appended"), engine.begin() as conn:
        conn.execute(text(change.format("node_decisions")))
    assert scalar(engine, "SELECT count(*) FROM node_decisions") == 1


@given(st.datetimes(datetime(1970, 1, 2), datetime(9990, 1, 1)), st.binary(min_size=10, max_size=10))
def test_a_run_id_lies_in_the_month_in_which_it_was_made(when: datetime, entropy: bytes) -> None:
    when = when.replace(tzinfo=UTC)
    run_id = new_run_id(when.timestamp(), entropy)
    month = Month.of(when)
    assert run_id.version == 7
    assert abs((created(run_id) - when).total_seconds()) < 0.002
    assert month.low <= run_id or created(run_id) < when
    assert run_id < month.following.low


@pytest.mark.parametrize("bad", [UUID(int=0), UUID("ffffffff-ffff-7fff-bfff-ffffffffffff")])
def test_ids_that_hold_no_time_are_refused(bad: UUID) -> None:
    with pytest.raises(DatabaseError, match="run id"):
        created(bad)


def test_months_are_made_once_also_by_many_at_once(engine: Engine) -> None:
    when = datetime(2031, 12, 31, tzinfo=UTC)
    made: list[str] = []

    def make() -> None:
        with engine.begin() as conn:
            made.extend(ensure_partitions(conn, when))

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(f"{table}_y2031m12" for table in PARTITIONED)


def test_retention_drops_months_and_keeps_what_was_summed_up(database_url: str, engine: Engine, tmp_path: Path) -> None:
    """Records of a dropped run that turn up later change nothing, so nothing is counted twice."""
    run_id = make_run(engine)
    with Sink(database_url, tmp_path, run_id, 1) as sink:
        for record in some_records(run_id, 3):
            sink.put(record)
        assert sink.flush(20)
    total = "SELECT sum(elements) FROM attempt_totals"
    assert scalar(engine, total) == 3 * 800
    assert drop_partitions_older_than(engine, datetime.now(UTC)) == []
    month = Month.of(datetime.now(UTC))
    dropped = drop_partitions_older_than(engine, month.following.start)
    assert dropped == sorted(f"{table}_{month.suffix}" for table in PARTITIONED)
    assert scalar(engine, "SELECT count(*) FROM steps") == 0
    assert scalar(engine, total) == 3 * 800
    assert scalar(engine, "SELECT records_dropped_at IS NOT NULL FROM runs")
    assert drop_partitions_older_than(engine, month.following.start) == []


def test_retention_finishes_what_a_kill_left_half_done(engine: Engine) -> None:
    """Between detaching and dropping, a month is an ordinary table."""
    with engine.begin() as conn:
        ensure_partitions(conn, datetime(2020, 3, 1, tzinfo=UTC))
        conn.execute(text("ALTER TABLE steps DETACH PARTITION steps_y2020m03"))
    dropped = drop_partitions_older_than(engine, datetime(2021, 1, 1, tzinfo=UTC))
    assert len(dropped) == len(PARTITIONED)
    with engine.begin() as conn:
        assert len(ensure_partitions(conn, datetime(2020, 3, 1, tzinfo=UTC))) == len(PARTITIONED)


def test_prune_drops_whole_months_and_says_which(
    database_url: str, engine: Engine, tandem_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run tells the same and drops nothing; what may still be needed stays."""

    def prune(*arguments: str) -> list[str]:
        with pytest.raises(SystemExit) as end:
            main(["db", "prune", "--db", database_url, *arguments])
        assert end.value.code == 0
        return capsys.readouterr().out.splitlines()

    def tables() -> int:
        return int(scalar(engine, "SELECT count(*) FROM pg_class WHERE relname ~ '_y[0-9]{4}m[0-9]{2}$'"))

    new = make_run(engine)
    for when in (datetime(2024, 3, 31, 23, tzinfo=UTC), datetime(2024, 4, 1, 1, tzinfo=UTC)):
        store.create_run(engine, run_row(new_run_id(when.timestamp(), b"0123456789")))
    assert tables() == 3 * len(PARTITIONED)
    days = (datetime.now(UTC) - datetime(2024, 4, 15, tzinfo=UTC)).days
    march = sorted(f"{table}_y2024m03" for table in PARTITIONED)
    told = prune("--older-than", str(days), "--dry-run")
    assert told == [*(f"would drop {name}" for name in march), f"{len(PARTITIONED)} tables, with the rows of 1 run"]
    assert tables() == 3 * len(PARTITIONED)
    told = prune("--older-than", str(days))
    assert told == [*(f"dropped {name}" for name in march), f"{len(PARTITIONED)} tables, with the rows of 1 run"]
    assert tables() == 2 * len(PARTITIONED)
    assert prune("--older-than", str(days)) == ["0 tables, with the rows of 0 runs"]
    assert len(prune("--older-than", "0")) == len(PARTITIONED) + 1
    assert scalar(engine, "SELECT count(*) FROM runs") == 3
    kept = "SELECT count(*) FROM runs WHERE records_dropped_at IS NULL"
    assert scalar(engine, kept) == scalar(engine, f"{kept} AND run_id = '{new}'") == 1


@pytest.mark.parametrize("days", ["-1", "soon", "1e9"])
def test_prune_wants_a_number_of_days(days: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--older-than", days], []):
        with pytest.raises(SystemExit) as end:
            main(["db", "prune", *arguments])
        assert end.value.code == 64
        assert "--older-than" in capsys.readouterr().err
