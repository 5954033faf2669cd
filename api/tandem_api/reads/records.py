"""Pages of a run's records, in the order of their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Integer, Select, bindparam, select, tuple_
from sqlalchemy import exists as sql_exists

from tandem.db.models import Run
from tandem.db.rows import LAYOUTS
from tandem.records import EvaluationRecord, MismatchRecord, StepRecord

Kind = type[StepRecord] | type[MismatchRecord] | type[EvaluationRecord]
KEYS: dict[Any, tuple[tuple[str, ...], tuple[type, ...]]] = {
    StepRecord: (("attempt", "step"), (int, int)),
    MismatchRecord: (("attempt", "step", "site", "rank", "tensor"), (int, int, int, int, str)),
    EvaluationRecord: (("attempt", "step", "task", "question", "arm"), (int, int, str, str, str)),
}
"""Record -> the rest of its natural key beside the run, and the types of its parts."""


def exists(conn: Connection, run_id: UUID) -> bool:
    """Whether there is such a run."""
    return bool(conn.scalar(select(sql_exists().where(Run.run_id == run_id))))


def stored(conn: Connection, run_ids: Sequence[UUID]) -> set[UUID]:
    """Which of these runs there are."""
    return set(conn.scalars(select(Run.run_id).where(Run.run_id.in_(run_ids))))


def page(
    conn: Connection,
    kind: Kind,
    run_id: UUID,
    limit: int,
    after: Sequence[Any] | None = None,
    equal: Mapping[str, Any] | None = None,
    least: Mapping[str, Any] | None = None,
    most: Mapping[str, Any] | None = None,
    skip: int = 0,
) -> list[dict[str, Any]] | None:
    """Rows of a run by the names of exports; None if there is no such run.

    Args:
        conn: in the caller's transaction.
        kind: of record.
        run_id: the run.
        limit: most rows.
        after: key of the last row of the page before.
        equal: column -> value.
        least: column -> least value.
        most: column -> largest value.
        skip: so many of the first rows.
    """
    equal, least, most = equal or {}, least or {}, most or {}
    values: dict[str, Any] = {"_run": run_id, "_limit": limit, "_skip": skip}
    for words, given in (("is", equal), ("least", least), ("most", most)):
        values |= {f"_{words}_{name}": value for name, value in given.items()}
    if after is not None:
        values |= {f"_after_{name}": value for name, value in zip(KEYS[kind][0], after, strict=True)}
    rows = conn.execute(
        _page(kind, frozenset(equal), frozenset(least), frozenset(most), after is not None), values
    ).all()
    if not rows and after is None and not exists(conn, run_id):
        return None
    restore = LAYOUTS[kind].restore
    return [plain(restore(row)) for row in rows]


@cache
def _page(kind: Kind, equal: frozenset[str], least: frozenset[str], most: frozenset[str], further: bool) -> Select[Any]:
    """The question of `page` with these filters, whose values are parameters; see `tandem.db.queries`."""
    layout = LAYOUTS[kind]
    columns = layout.table.c
    key = [columns[name] for name in KEYS[kind][0]]
    query = select(*(columns[name] for name in layout.columns)).where(columns.run_id == bindparam("_run"))
    query = query.where(*(columns[name] == bindparam(f"_is_{name}") for name in sorted(equal)))
    query = query.where(*(columns[name] >= bindparam(f"_least_{name}") for name in sorted(least)))
    query = query.where(*(columns[name] <= bindparam(f"_most_{name}") for name in sorted(most)))
    if further:
        last = (bindparam(f"_after_{column.name}", type_=column.type) for column in key)
        query = query.where(tuple_(*key) > tuple_(*last))
    skip, limit = (bindparam(name, type_=Integer) for name in ("_skip", "_limit"))
    return query.order_by(*key).limit(limit).offset(skip)


def plain(record: Any) -> dict[str, Any]:
    """A record without its tag; the run is named once, by the page. What lies in its fields is left to the encoder of
    JSON: to make plain objects of it first took longer than all the rest of an answer.
    """
    values = msgspec.structs.asdict(record)
    values.pop("run_id")
    return values
