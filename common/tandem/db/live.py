"""How live runs stand: one cheap question for all of them, however long they have run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, Engine, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import UUID as PG_UUID
from sqlalchemy.exc import DBAPIError

from tandem.db.engine import unreachable

_PROGRESS = text(
    """
SELECT r.run_id, a.attempt, a.state, a.reason, c.reason AS closing, t.last_step,
       s.sites, s.elements, s.mismatched_sites, s.mismatched_elements, s.other_findings,
       f.attempt AS first_attempt, f.first_step, f.first_place, f.first_rank, f.first_mismatched
FROM unnest(:run_ids) AS r(run_id)
JOIN LATERAL (
  SELECT attempt, state, reason FROM attempts WHERE run_id = r.run_id ORDER BY attempt DESC LIMIT 1
) a ON true
LEFT JOIN attempt_totals t ON t.run_id = r.run_id AND t.attempt = a.attempt
LEFT JOIN closings c ON c.run_id = r.run_id AND c.attempt = a.attempt
LEFT JOIN LATERAL (
  SELECT sum(sites)::bigint AS sites, sum(elements)::bigint AS elements,
         sum(mismatched_sites)::bigint AS mismatched_sites, sum(mismatched_elements)::bigint AS mismatched_elements,
         sum(other_findings)::bigint AS other_findings
  FROM attempt_totals WHERE run_id = r.run_id
) s ON true
LEFT JOIN LATERAL (
  SELECT * FROM attempt_totals WHERE run_id = r.run_id AND first_step IS NOT NULL ORDER BY attempt LIMIT 1
) f ON true
"""
).bindparams(bindparam("run_ids", type_=ARRAY(PG_UUID(as_uuid=True))))


_RATE = text(
    """
SELECT count(*) - 1 AS steps, extract(epoch FROM max(finished_at) - min(finished_at)) AS seconds
FROM (
  SELECT finished_at FROM steps WHERE run_id = :run_id AND attempt = :attempt AND step > 0 ORDER BY step DESC LIMIT 100
) newest
"""
)


@dataclass(frozen=True, slots=True)
class First:
    """Where a pair first differed: the least step, site and rank of the first attempt that has any."""

    attempt: int
    step: int
    site: str
    """For people: ``fwd/attn layer 3 out``."""
    rank: int
    mismatched: int | None
    """Elements; None if the suspect's tensor was never received."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How a run stands in the database."""

    attempt: int
    """The newest."""
    state: str
    """Of that attempt: running, closed or orphaned."""
    reason: str
    """How that attempt ended, as stored with it; empty while it runs."""
    closing: str | None
    """Reason of that attempt's closing record; None while it is not stored."""
    step: int | None
    """Last stored step of that attempt; None before the first, which is 0."""
    sites: int
    """Here and below: of all attempts together."""
    elements: int
    mismatched_sites: int
    mismatched_elements: int
    other_findings: int
    """Rows with another cause than ``compute``."""
    first: First | None


def progress(engine: Engine, run_ids: Sequence[UUID]) -> dict[UUID, Progress]:
    """As ``read_progress``, from an engine.

    Raises:
        DatabaseError: the database failed.
    """
    if not run_ids:
        return {}
    try:
        with engine.connect() as conn:
            return read_progress(conn, run_ids)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


def read_progress(conn: Connection, run_ids: Sequence[UUID]) -> dict[UUID, Progress]:
    """How runs stand, in one query that reads no step and no mismatch.

    Args:
        conn: in the caller's transaction.
        run_ids: of the runs; those without any stored attempt are left out of the answer.
    """
    rows = conn.execute(_PROGRESS, {"run_ids": list(run_ids)}).all()
    return {
        row.run_id: Progress(
            attempt=row.attempt, state=row.state, reason=row.reason, closing=row.closing, step=row.last_step,
            sites=row.sites or 0, elements=row.elements or 0, mismatched_sites=row.mismatched_sites or 0,
            mismatched_elements=row.mismatched_elements or 0, other_findings=row.other_findings or 0,
            first=None if row.first_step is None else First(
                row.first_attempt, row.first_step, row.first_place, row.first_rank, row.first_mismatched
            ),
        )
        for row in rows
    }  # fmt: skip


def steps_per_s(conn: Connection, run_id: UUID, attempt: int) -> float | None:
    """How fast the newest hundred stored steps of an attempt came; None before there are two."""
    found = conn.execute(_RATE, {"run_id": run_id, "attempt": attempt}).one()
    return found.steps / float(found.seconds) if found.steps > 0 and found.seconds else None
