"""Writes a batch of records in one transaction: COPY into a staging table, then INSERT ... ON CONFLICT DO NOTHING.

COPY itself knows no ON CONFLICT; the temporary staging table gives its speed to writes that may be repeated. The
roll-ups of the node profile change in the same statement that inserts the steps, and only by what
its RETURNING gives: a repeated step adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy.dialects.postgresql.base import PGDialect

from tandem.db.rows import LAYOUTS, Layout
from tandem.records import Record, StepRecord

_ROLLUP = """
, counted AS (
  SELECT f.run_id, f.attempt, f.step, r.suspect_node AS node, r.workload, r.kind, c.key AS site_class,
         (c.value->>0)::bigint AS sites, (c.value->>1)::bigint AS elements,
         (c.value->>2)::bigint AS mismatched_sites, (c.value->>3)::bigint AS mismatched_elements,
         CASE WHEN f.step > 0 THEN 1 ELSE 0 END AS trained,  -- step 0 compares the initial parameters
         CASE WHEN f.step > 0 THEN f.duration_s * a.devices ELSE 0 END AS device_seconds
  FROM fresh f JOIN runs r USING (run_id) JOIN attempts a USING (run_id, attempt), jsonb_each(f.classes) c
  WHERE NOT r.synthetic
    AND a.reference_host <> '' AND a.suspect_host <> '' AND a.reference_host <> a.suspect_host
), rolled AS (
  INSERT INTO node_rollups AS n (node, workload, kind, site_class, steps, sites, elements,
                                 mismatched_sites, mismatched_elements, device_seconds)
  SELECT node, workload, kind, site_class, sum(trained), sum(sites), sum(elements),
         sum(mismatched_sites), sum(mismatched_elements), sum(device_seconds)
  FROM counted GROUP BY node, workload, kind, site_class
  ORDER BY node, workload, kind, site_class  -- one order everywhere: no deadlock between sinks
  ON CONFLICT (node, workload, kind, site_class) DO UPDATE SET
    steps = n.steps + EXCLUDED.steps, sites = n.sites + EXCLUDED.sites, elements = n.elements + EXCLUDED.elements,
    mismatched_sites = n.mismatched_sites + EXCLUDED.mismatched_sites,
    mismatched_elements = n.mismatched_elements + EXCLUDED.mismatched_elements,
    device_seconds = n.device_seconds + EXCLUDED.device_seconds
), per_step AS (
  SELECT run_id, attempt, node, max(trained) AS trained, max(device_seconds) AS device_seconds, sum(sites) AS sites,
         sum(elements) AS elements, sum(mismatched_sites) AS mismatched_sites,
         sum(mismatched_elements) AS mismatched_elements
  FROM counted GROUP BY run_id, attempt, node, step
), booked AS (
  INSERT INTO rollup_ledger AS l (run_id, attempt, node, steps, sites, elements,
                                  mismatched_sites, mismatched_elements, device_seconds)
  SELECT run_id, attempt, node, sum(trained), sum(sites), sum(elements),
         sum(mismatched_sites), sum(mismatched_elements), sum(device_seconds)
  FROM per_step GROUP BY run_id, attempt, node ORDER BY run_id, attempt
  ON CONFLICT (run_id, attempt) DO UPDATE SET
    steps = l.steps + EXCLUDED.steps, sites = l.sites + EXCLUDED.sites, elements = l.elements + EXCLUDED.elements,
    mismatched_sites = l.mismatched_sites + EXCLUDED.mismatched_sites,
    mismatched_elements = l.mismatched_elements + EXCLUDED.mismatched_elements,
    device_seconds = l.device_seconds + EXCLUDED.device_seconds, updated_at = now()
)
"""


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
    if layout.record is not StepRecord:
        return insert
    fresh = f"WITH fresh AS ({insert} RETURNING run_id, attempt, step, classes, duration_s)"
    return f"{fresh}{_ROLLUP} SELECT count(*) FROM fresh"  # noqa: S608


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
    text: str


def line(record: Record) -> Line:
    """The line of a record.

    Raises:
        TypeError, ValueError: a field holds what its column cannot.
    """
    return Line(type(record), LAYOUTS[type(record)].line(record))


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
            if cls is StepRecord:
                row = cursor.fetchone()
                new += int(row[0]) if row else 0
            else:
                new += cursor.rowcount
    return new
