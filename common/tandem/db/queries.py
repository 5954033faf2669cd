"""Reads: runs and their records. Everything is ordered, so that what is computed from it never depends on chance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypedDict, TypeVar, Unpack
from uuid import UUID

import msgspec
from sqlalchemy import (
    BigInteger,
    BindParameter,
    Connection,
    Engine,
    Integer,
    Select,
    and_,
    bindparam,
    func,
    literal_column,
    select,
    union_all,
)
from sqlalchemy.exc import DBAPIError

from tandem.db.engine import unreachable
from tandem.db.models import Attempt, AttemptTotals, Base, Control, Fault, Mismatch, Run, Step
from tandem.db.rows import LAYOUTS
from tandem.errors import DatabaseError, RunNotFoundError
from tandem.records import (
    AttemptRow,
    ClosingRecord,
    ControlRecord,
    DriftRecord,
    EvaluationRecord,
    FaultRecord,
    GradientRecord,
    MismatchRecord,
    RunRecords,
    RunRow,
    StepRecord,
)

T = TypeVar("T")
_MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class StoredCounts:
    """Rows stored of one attempt; what the closing record is checked against."""

    steps: int
    mismatches: int
    controls: int
    faults: int


@dataclass(frozen=True, slots=True)
class RunSummaryRow:
    """A run with its totals over all attempts."""

    run: RunRow
    attempts: int
    steps: int
    """Step rows, step 0 included."""
    sites: int
    elements: int
    mismatched_sites: int
    mismatched_elements: int


def load_run(engine: Engine, run_id: UUID) -> RunRecords:
    """Everything stored of a run, from one snapshot.

    Raises:
        DatabaseError: no such run, or the database failed.
    """
    try:
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
            return load(conn, run_id)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


def has_run(engine: Engine, run_id: UUID) -> bool:
    """Whether the database holds that run.

    Raises:
        DatabaseError: the database failed.
    """
    try:
        with engine.connect() as conn:
            return conn.scalar(select(Run.run_id).where(Run.run_id == run_id)) is not None
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from error


def load(conn: Connection, run_id: UUID) -> RunRecords:
    """As ``load_run``, in the caller's transaction."""
    run = conn.execute(select(*_columns(Run, RunRow)).where(Run.run_id == run_id)).one_or_none()
    if run is None:
        raise DatabaseError(f"there is no run {run_id}: list them with `tandem runs`")
    return RunRecords(
        run=_row(run, RunRow),
        attempts=attempts(conn, run_id),
        steps=_records(conn, run_id, StepRecord),
        mismatches=_records(conn, run_id, MismatchRecord),
        controls=_records(conn, run_id, ControlRecord),
        faults=_records(conn, run_id, FaultRecord),
        closings=closings(conn, run_id),
        gradients=_records(conn, run_id, GradientRecord),
        drifts=_records(conn, run_id, DriftRecord),
        evaluations=_records(conn, run_id, EvaluationRecord),
    )


def attempts(conn: Connection, run_id: UUID) -> list[AttemptRow]:
    """A run's attempts, the first one first."""
    rows = conn.execute(
        select(*_columns(Attempt, AttemptRow)).where(Attempt.run_id == run_id).order_by(Attempt.attempt)
    )
    return [_row(row, AttemptRow) for row in rows]


def closings(conn: Connection, run_id: UUID) -> list[ClosingRecord]:
    """Closing records of a run's attempts."""
    return _records(conn, run_id, ClosingRecord)


def stored_counts(engine: Engine, run_id: UUID, attempt: int) -> StoredCounts:
    """Count the rows of an attempt.

    Raises:
        DatabaseError: the database failed.
    """

    def count(model: Any) -> Any:
        where = and_(model.run_id == run_id, model.attempt == attempt)
        return select(func.count()).select_from(model).where(where).scalar_subquery()

    try:
        with engine.connect() as conn:
            row = conn.execute(select(count(Step), count(Mismatch), count(Control), count(Fault))).one()
            return StoredCounts(*row)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


class RunFilters(TypedDict, total=False):
    """Which runs; None and what is left out: any."""

    node: str | None
    """On either side."""
    verdict: str | None
    """``match``, ``mismatch`` or ``inconclusive``."""
    state: str | None
    """``running`` or ``finished``."""
    workload: str | None
    kind: str | None
    synthetic: bool | None
    """Only synthetic, or only real runs."""
    before: UUID | None
    """Only runs older than this one (the last of the page before)."""
    not_before: UUID | None
    """Only this run and newer ones."""
    run_id: UUID | None
    """Only this one."""


_EQUAL = ("verdict", "state", "workload", "kind", "synthetic", "run_id")


def list_runs(engine: Engine, limit: int = 50, **filters: Unpack[RunFilters]) -> list[RunSummaryRow]:
    """As ``runs_page``, from an engine.

    Raises:
        DatabaseError: the database failed.
    """
    try:
        with engine.connect() as conn:
            return runs_page(conn, limit, **filters)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


def runs_page(conn: Connection, limit: int = 50, **filters: Unpack[RunFilters]) -> list[RunSummaryRow]:
    """Runs with their totals, newest first, in the caller's transaction; reads no step and no mismatch."""
    given = {name: value for name, value in filters.items() if value is not None}
    values = {f"_{name}": value for name, value in given.items()} | {"_limit": max(1, min(limit, _MAX_LIMIT))}
    rows = conn.execute(_page_of_runs(frozenset(given)), values).all()
    fields = len(RunRow.__struct_fields__)
    return [RunSummaryRow(_row(row[:fields], RunRow), *row[fields:]) for row in rows]


@cache
def _page_of_runs(given: frozenset[str]) -> Select[Any]:
    """The question of `runs_page` with these filters, whose values are parameters: to put it together takes SQLAlchemy
    longer than PostgreSQL to answer it.
    """
    conditions = [getattr(Run, name) == bindparam(f"_{name}") for name in _EQUAL if name in given]
    if "before" in given:
        conditions.append(Run.run_id < bindparam("_before"))
    if "not_before" in given:
        conditions.append(Run.run_id >= bindparam("_not_before"))
    limit = bindparam("_limit", type_=Integer)

    def newest(*more: Any) -> Select[Any]:
        return select(Run).where(*conditions, *more).order_by(Run.run_id.desc()).limit(limit)

    if "node" not in given:
        page = newest().subquery()
    else:  # each side by its own index: with OR, a page of a rare node would walk through all runs
        node: BindParameter[str] = bindparam("_node")
        sides = (newest(Run.suspect_node == node), newest(Run.reference_node == node, Run.suspect_node != node))
        both = union_all(*(select(side.subquery()) for side in sides)).subquery()
        page = select(both).order_by(both.c.run_id.desc()).limit(limit).subquery()
    attempts = select(func.count()).where(Attempt.run_id == page.c.run_id).scalar_subquery()
    counts = ("steps", "sites", "elements", "mismatched_sites", "mismatched_elements")
    totals = (
        select(*(func.coalesce(func.sum(getattr(AttemptTotals, n)), 0).cast(BigInteger).label(n) for n in counts))
        .where(AttemptTotals.run_id == page.c.run_id)
        .lateral("totals")
    )
    return (
        select(*(page.c[n] for n in RunRow.__struct_fields__), attempts, *(totals.c[n] for n in counts))
        .select_from(page)
        .join(totals, literal_column("true"))
        .order_by(page.c.run_id.desc())
    )


def find_run(engine: Engine, prefix: str) -> UUID:
    """The run whose id begins with ``prefix`` (dashes may be left out), or the newest one for ``last``.

    Raises:
        RunNotFoundError: none begins so.
        DatabaseError: several do, or there is no run at all for ``last``.
    """
    wanted = prefix.strip().lower().replace("-", "")
    try:
        with engine.connect() as conn:
            if wanted == "last":
                newest = conn.scalar(select(Run.run_id).order_by(Run.run_id.desc()).limit(1))
                if newest is None:
                    raise DatabaseError("there is no run yet: start one with `tandem run`")
                return newest
            if not re.fullmatch(r"[0-9a-f]{1,32}", wanted):
                raise RunNotFoundError(f"{prefix!r} is no run id: give its first characters, or `last`")
            low, high = UUID(wanted.ljust(32, "0")), UUID(wanted.ljust(32, "f"))
            found = conn.scalars(
                select(Run.run_id).where(Run.run_id.between(low, high)).order_by(Run.run_id.desc()).limit(4)
            ).all()
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None
    if not found:
        raise RunNotFoundError(f"no run begins with {prefix}: list them with `tandem runs`")
    if len(found) > 1:
        more = " ..." if len(found) > 3 else ""
        raise DatabaseError(
            f"several runs begin with {prefix}: {', '.join(map(str, found[:3]))}{more}: give more of it"
        )
    return found[0]


def _columns(model: type[Base], row: type[Any]) -> list[Any]:
    return [getattr(model, name) for name in row.__struct_fields__]


def _row(values: Any, cls: type[T]) -> T:
    fields = zip(cls.__struct_fields__, values, strict=True)  # type: ignore[attr-defined]
    plain = {name: value.timestamp() if isinstance(value, datetime) else value for name, value in fields}
    return msgspec.convert(plain, cls)


def _records(conn: Connection, run_id: UUID, cls: type[T]) -> list[T]:
    layout = LAYOUTS[cls]
    columns = [layout.table.c[name] for name in layout.columns]
    rows = conn.execute(
        select(*columns).where(layout.table.c.run_id == run_id).order_by(*layout.table.primary_key.columns)
    )
    return [layout.restore(row) for row in rows]
