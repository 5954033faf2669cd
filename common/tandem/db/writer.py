"""Writes a batch of records in one transaction: COPY into a staging table, then INSERT ... ON CONFLICT DO NOTHING.

COPY itself knows no ON CONFLICT; the temporary staging table gives its speed to writes that may be repeated. The
attempt's totals change in the same statement that inserts the steps or answers, and only by what its RETURNING gives: a
repeated row adds nothing. What a run adds to its node's profile is made when it gets its verdict, since only conclusive
runs count (``tandem.db.profiles``); rows that come after it have the profile made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy.dialects.postgresql.base import PGDialect

from tandem.db.rows import LAYOUTS, Layout
from tandem.records import EvaluationRecord, MismatchRecord, Record, StepRecord
from tandem.vocabulary import Arm

_TOTALS = """
, compared AS (
  SELECT f.run_id, f.attempt, f.step, f.rows,
         coalesce(sum((c.value->>0)::bigint), 0) AS sites, coalesce(sum((c.value->>1)::bigint), 0) AS elements,
         coalesce(sum((c.value->>2)::bigint), 0) AS mismatched_sites,
         coalesce(sum((c.value->>3)::bigint), 0) AS mismatched_elements
  FROM fresh f LEFT JOIN LATERAL jsonb_each(f.classes) c ON true GROUP BY f.run_id, f.attempt, f.step, f.rows
), totalled AS (
  INSERT INTO attempt_totals AS t (run_id, attempt, last_step, steps, sites, elements,
                                   mismatched_sites, mismatched_elements, other_findings)
  SELECT run_id, attempt, max(step), count(*), sum(sites), sum(elements),
         sum(mismatched_sites), sum(mismatched_elements), sum(rows - mismatched_sites)
  FROM compared GROUP BY run_id, attempt ORDER BY run_id, attempt
  ON CONFLICT (run_id, attempt) DO UPDATE SET
    last_step = greatest(t.last_step, EXCLUDED.last_step), steps = t.steps + EXCLUDED.steps,
    sites = t.sites + EXCLUDED.sites, elements = t.elements + EXCLUDED.elements,
    mismatched_sites = t.mismatched_sites + EXCLUDED.mismatched_sites,
    mismatched_elements = t.mismatched_elements + EXCLUDED.mismatched_elements,
    other_findings = t.other_findings + EXCLUDED.other_findings, updated_at = now()
)
"""

_UNEQUAL = f"""
, answers AS (
  SELECT * FROM fresh UNION ALL
  SELECT e.run_id, e.attempt, e.step, e.task, e.question, e.arm, e.scores FROM evaluations e
  WHERE (e.run_id, e.attempt, e.step, e.task, e.question) IN
    (SELECT run_id, attempt, step, task, question FROM fresh)
), unequal AS (
  SELECT s.run_id, s.attempt, count(*) AS answers
  FROM answers s JOIN answers r USING (run_id, attempt, step, task, question)
  WHERE s.arm = '{Arm.SUSPECT}' AND r.arm = '{Arm.REFERENCE}' AND s.scores::text <> r.scores::text
  GROUP BY s.run_id, s.attempt ORDER BY s.run_id, s.attempt
), totalled AS (
  INSERT INTO attempt_totals AS t (run_id, attempt, other_findings) SELECT * FROM unequal
  ON CONFLICT (run_id, attempt) DO UPDATE SET
    other_findings = t.other_findings + EXCLUDED.other_findings, updated_at = now()
)
"""  # noqa: S608 - words of the vocabulary
"""A pair counts once, when the second of its two answers is new: the statement sees no row of its own in the table. As
text, zeros of unlike sign differ and NaNs do not, as for the verdict."""

_FIRST = """
INSERT INTO attempt_totals AS t (run_id, attempt, first_step, first_site, first_rank, first_place, first_mismatched)
SELECT DISTINCT ON (run_id, attempt) run_id, attempt, step, site, rank,
       phase || '/' || module || CASE WHEN layer < 0 THEN '' ELSE ' layer ' || layer END || ' ' || tensor, mismatched
FROM stage_mismatches ORDER BY run_id, attempt, step, site, rank, tensor
ON CONFLICT (run_id, attempt) DO UPDATE SET
  first_step = EXCLUDED.first_step, first_site = EXCLUDED.first_site, first_rank = EXCLUDED.first_rank,
  first_place = EXCLUDED.first_place, first_mismatched = EXCLUDED.first_mismatched, updated_at = now()
WHERE t.first_step IS NULL
   OR (EXCLUDED.first_step, EXCLUDED.first_site, EXCLUDED.first_rank) < (t.first_step, t.first_site, t.first_rank)
"""
"""The least of what is staged: repeated rows change nothing, so nothing has to be known of which were new."""


_OUTDATED = "UPDATE run_profiles SET version = 0 WHERE run_id = ANY(%s) AND version <> 0"
"""A finished run's summary was made of less than is stored now, perhaps without what makes a finding count: whoever
next asks for its node makes it again. Of a run that is running there is none."""

_TOTALLED: dict[type[Any], tuple[str, str]] = {
    StepRecord: ("run_id, attempt, step, classes, rows", _TOTALS),
    EvaluationRecord: ("run_id, attempt, step, task, question, arm, scores", _UNEQUAL),
}
"""Type of record -> what its INSERT returns, and what that adds to the attempt's totals."""


def _create(layout: Layout) -> str:
    """The staging table: no constraint and no default; the INSERT behind it checks."""
    dialect = PGDialect()
    kinds = {
        name: "double precision" if name in layout.times else layout.table.columns[name].type.compile(dialect)
        for name in layout.columns
    }
    columns = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    return f"CREATE TEMP TABLE IF NOT EXISTS stage_{layout.table.name} ({columns}) ON COMMIT DELETE ROWS"


def _insert(layout: Layout) -> str:
    name, columns = layout.table.name, ", ".join(layout.columns)
    values = ", ".join(f"to_timestamp({c})" if c in layout.times else c for c in layout.columns)
    insert = f"INSERT INTO {name} ({columns}) SELECT {values} FROM stage_{name} ON CONFLICT DO NOTHING"  # noqa: S608
    if layout.record not in _TOTALLED:
        return insert
    returned, totals = _TOTALLED[layout.record]
    return f"WITH fresh AS ({insert} RETURNING {returned}){totals} SELECT count(*) FROM fresh"  # noqa: S608


_STATEMENTS = {
    record: (
        f"COPY stage_{layout.table.name} ({', '.join(layout.columns)}) FROM STDIN",
        _insert(layout),
    )
    for record, layout in LAYOUTS.items()
}
"""By type of record: COPY and INSERT."""


@dataclass(frozen=True, slots=True)
class Line:
    """A record as a line of COPY's text format."""

    record: type[Any]
    run_id: UUID
    text: str


def line(record: Record) -> Line:
    """The line of a record.

    Raises:
        TypeError, ValueError: a field holds what its column cannot.
    """
    return Line(type(record), record.run_id, LAYOUTS[type(record)].line(record))


def prepare(conn: psycopg.Connection[Any]) -> None:
    """Make the staging tables of a new connection."""
    for layout in LAYOUTS.values():
        conn.execute(_create(layout))
    conn.commit()


def write(conn: psycopg.Connection[Any], lines: Sequence[Line]) -> int:
    """Store records, all or none, and commit. Those whose natural key is stored already change nothing.

    Args:
        conn: connection on which ``prepare`` was called, outside a transaction.
        lines: any mix of types.

    Returns:
        How many rows were new.

    Raises:
        psycopg.Error: nothing was stored, or (connection lost during the commit) perhaps all; writing again is safe.
    """
    new = 0
    with conn.transaction(), conn.cursor() as cursor:
        for cls, (copy_in, insert) in _STATEMENTS.items():
            chosen = [item.text for item in lines if item.record is cls]
            if not chosen:
                continue
            with cursor.copy(copy_in) as copy:
                copy.write("".join(chosen))
            cursor.execute(insert)
            if cls in _TOTALLED:
                row = cursor.fetchone()
                new += int(row[0]) if row else 0
            else:
                new += cursor.rowcount
            if cls is MismatchRecord:
                cursor.execute(_FIRST)
        if new:
            cursor.execute(_OUTDATED, [sorted({item.run_id for item in lines})])
    return new


def attempt_stored(conn: psycopg.Connection[Any], run_id: UUID, attempt: int) -> bool:
    """Whether the attempt's own row is there. Before it is, no record of the attempt may be stored: the partitions of
    its month may be missing.
    """
    with conn.transaction():
        found = conn.execute("SELECT 1 FROM attempts WHERE run_id = %s AND attempt = %s", [run_id, attempt])
        return found.fetchone() is not None
