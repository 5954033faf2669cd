"""The supervisor's writes: runs, attempts, verdicts. One writer: the supervisor (or the controller)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from tandem.db import liveness, profiles, queries
from tandem.db.engine import one_line
from tandem.db.fence import Fence
from tandem.db.models import Attempt, Run
from tandem.db.partitions import created, ensure_partitions
from tandem.errors import DatabaseError
from tandem.records import AttemptRow, RunRecords, RunRow
from tandem.vocabulary import AttemptState

Judge = Callable[[RunRecords], tuple[str, str, str]]
"""The verdict of what is stored: verdict, reason, sentence."""
Alive = Callable[[Mapping[str, Any]], bool | None]
"""Whether the supervisor of an attempt lives; None: cannot be told from here (another host)."""


def create_run(
    engine: Engine,
    row: RunRow,
    supervisor: Mapping[str, Any] | None = None,
    *,
    exists_ok: bool = False,
    fence: Fence | None = None,
) -> None:
    """Insert a run, and the partitions of its month where they are missing.

    Args:
        engine: the database.
        row: the run; ``synthetic`` can never change afterwards.
        supervisor: identity of what supervises it; None: this process.
        exists_ok: the same run (id, workload, kind, synthetic or not) may be there already; it stays as it is.
        fence: checked in the same transaction.

    Raises:
        DatabaseError: the id exists, is no UUIDv7, or the database failed; as `Fenced` if a newer leader has written.
    """
    when = created(row.run_id)
    supervisor = liveness.identity() if supervisor is None else supervisor
    with _transaction(engine, f"run {row.run_id} could not be created", fence) as conn:
        try:
            with conn.begin_nested():
                conn.execute(insert(Run).values(**_columns(row), supervisor=dict(supervisor)))
        except IntegrityError as error:
            if getattr(error.orig, "sqlstate", None) != "23505":
                raise
            if not exists_ok:
                raise DatabaseError(f"run {row.run_id} exists already: leave the id out to get a new one") from None
            there = conn.execute(select(Run.workload, Run.kind, Run.synthetic).where(Run.run_id == row.run_id)).one()
            if tuple(there) != (row.workload, row.kind, row.synthetic):
                raise DatabaseError(f"run {row.run_id} exists already, and is another: make a new one") from None
        ensure_partitions(conn, when)


def start_attempt(engine: Engine, row: AttemptRow, *, exists_ok: bool = False, fence: Fence | None = None) -> None:
    """Insert an attempt of a run.

    Args:
        engine: the database.
        row: the attempt; its hosts decide whether it says anything about a node, so they must be known by now.
        exists_ok: the same attempt (on the same hosts) may be there already; it stays as it is.
        fence: checked in the same transaction.

    Raises:
        DatabaseError: the attempt exists, the run does not, or the database failed; as `Fenced` if a newer leader has
            written.
    """
    what = f"attempt {row.attempt} of run {row.run_id}"
    with _transaction(engine, f"{what} could not be started", fence) as conn:
        try:
            with conn.begin_nested():
                conn.execute(insert(Attempt).values(**_columns(row)))
        except IntegrityError as error:
            if getattr(error.orig, "sqlstate", None) != "23505" or not exists_ok:
                raise
            key = (Attempt.run_id == row.run_id, Attempt.attempt == row.attempt)
            there = conn.execute(select(Attempt.reference_host, Attempt.suspect_host).where(*key)).one()
            if tuple(there) != (row.reference_host, row.suspect_host):
                raise DatabaseError(f"{what} exists already, on other hosts: make a new one") from None


def set_images(
    engine: Engine, run_id: UUID, attempt: int, images: Mapping[str, str], fence: Fence | None = None
) -> None:
    """Write down which image each side's pod runs, as its node says; an attempt that has ended keeps what it had.

    Raises:
        DatabaseError: the database failed; as `Fenced` if a newer leader has written.
    """
    with _transaction(engine, f"the images of attempt {attempt} of run {run_id} could not be stored", fence) as conn:
        conn.execute(
            update(Attempt)
            .where(Attempt.run_id == run_id, Attempt.attempt == attempt, Attempt.state == AttemptState.RUNNING)
            .values(images=dict(images))
        )


def finish_attempt(
    engine: Engine,
    run_id: UUID,
    attempt: int,
    *,
    state: AttemptState,
    reason: str,
    ended_at: float,
    fingerprint: str | None = None,
    parity: Mapping[str, str] | None = None,
    images: Mapping[str, str] | None = None,
    fence: Fence | None = None,
) -> bool:
    """Close an attempt that runs.

    Returns:
        False if it was closed already; nothing changed then.

    Raises:
        DatabaseError: the database failed; as `Fenced` if a newer leader has written.
    """
    values: dict[str, Any] = {"state": str(state), "reason": reason, "ended_at": _time(ended_at)}
    if fingerprint is not None:
        values["fingerprint"] = fingerprint
    if parity is not None:
        values["parity"] = dict(parity)
    if images is not None:
        values["images"] = dict(images)
    with _transaction(engine, f"attempt {attempt} of run {run_id} could not be closed", fence) as conn:
        found = conn.execute(
            update(Attempt)
            .where(Attempt.run_id == run_id, Attempt.attempt == attempt, Attempt.state == AttemptState.RUNNING)
            .values(**values)
        )
        return found.rowcount == 1


def finish_run(
    engine: Engine,
    run_id: UUID,
    *,
    verdict: str,
    reason: str,
    sentence: str,
    finished_at: float,
    fence: Fence | None = None,
) -> bool:
    """Give a running run its verdict, and its node's profile what it adds, in one transaction.

    Returns:
        False if it had one already; a verdict is given once.

    Raises:
        DatabaseError: the database failed; as `Fenced` if a newer leader has written.
    """
    with _transaction(engine, f"run {run_id} could not be finished", fence) as conn:
        return _finish(conn, run_id, verdict, reason, sentence, finished_at)


def close_orphans(engine: Engine, judge: Judge, now: float, alive: Alive = liveness.alive) -> list[UUID]:
    """Close the attempts of runs whose supervisor is gone, and give these runs a verdict.

    Replay the spools first: what lies there belongs to these attempts. An attempt whose closing record is stored
    becomes ``closed``, any other ``orphaned``. Two commands that do this at once do not meet: a run
    that another holds is skipped.

    Args:
        engine: the database.
        judge: the verdict of what is stored.
        now: UTC seconds.
        alive: whether a supervisor lives; runs of which this cannot be told stay.

    Returns:
        Runs that were finished.
    """
    with _transaction(engine, "orphaned runs could not be closed") as conn:
        running = conn.execute(select(Run.run_id, Run.supervisor).where(Run.state == "running")).all()
    orphans = sorted(row.run_id for row in running if alive(row.supervisor) is False)
    return [run_id for run_id in orphans if _close_orphan(engine, run_id, judge, now)]


def _close_orphan(engine: Engine, run_id: UUID, judge: Judge, now: float) -> bool:
    with _transaction(engine, f"the orphaned run {run_id} could not be closed") as conn:
        mine = select(Run.run_id).where(Run.run_id == run_id, Run.state == "running").with_for_update(skip_locked=True)
        if conn.scalar(mine) is None:
            return False
        closings = {closing.attempt: closing for closing in queries.closings(conn, run_id)}
        open_attempts = select(Attempt.attempt).where(Attempt.run_id == run_id, Attempt.state == AttemptState.RUNNING)
        for attempt in conn.scalars(open_attempts).all():
            closing = closings.get(attempt)
            conn.execute(
                update(Attempt)
                .where(Attempt.run_id == run_id, Attempt.attempt == attempt)
                .values(
                    state=str(AttemptState.ORPHANED if closing is None else AttemptState.CLOSED),
                    reason="supervisor_gone" if closing is None else closing.reason,
                    ended_at=_time(now if closing is None else closing.finished_at),
                )
            )
        verdict, reason, sentence = judge(queries.load(conn, run_id))
        return _finish(conn, run_id, verdict, reason, sentence, now)


def _finish(conn: Connection, run_id: UUID, verdict: str, reason: str, sentence: str, now: float) -> bool:
    found = conn.execute(
        update(Run)
        .where(Run.run_id == run_id, Run.state == "running")
        .values(state="finished", verdict=verdict, reason=reason, sentence=sentence, finished_at=_time(now))
    )
    if found.rowcount == 1:
        profiles.store_profile(conn, run_id)
    return found.rowcount == 1


def _time(value: float) -> datetime:
    return datetime.fromtimestamp(value, UTC)


def _columns(row: RunRow | AttemptRow) -> dict[str, Any]:
    """Column values of a row; every field named ``*_at`` is a time."""
    return {
        name: _time(value) if name.endswith("_at") and value is not None else value
        for name in row.__struct_fields__
        for value in [getattr(row, name)]
    }


@contextmanager
def _transaction(engine: Engine, failed: str, fence: Fence | None = None) -> Iterator[Connection]:
    """One transaction whose driver errors become a DatabaseError."""
    try:
        with engine.begin() as conn:
            if fence is not None:
                fence.check(conn)
            yield conn
    except DBAPIError as error:
        message = one_line(error, engine.url.render_as_string(hide_password=False))
        raise DatabaseError(f"{failed} ({message}): check the database with `tandem db status`") from None
