"""What is new of runs: one question for all that are watched, and one more for each that has something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql import UUID as PG_UUID

from tandem.db.live import Progress, read_progress
from tandem.records import MismatchRecord
from tandem_api.live.events import AFTER_ROWS, AFTER_STEPS, BEGIN, END, ROWS, Event, Place, event
from tandem_api.reads.records import page
from tandem_api.reads.runs import progress_json

BATCH = 1000
"""Mismatch rows read at once: whole events of `ROWS`."""

_RUNS = text(
    """
SELECT r.run_id, r.state, r.verdict, r.reason, r.sentence, r.finished_at,
       (SELECT s.finished_at FROM steps s
        WHERE s.run_id = r.run_id AND s.attempt = t.attempt AND s.step = t.last_step) AS step_at
FROM runs r
LEFT JOIN LATERAL (
  SELECT attempt, last_step FROM attempt_totals WHERE run_id = r.run_id ORDER BY attempt DESC LIMIT 1
) t ON true
WHERE r.run_id = ANY(:run_ids)
"""
).bindparams(bindparam("run_ids", type_=ARRAY(PG_UUID(as_uuid=True))))
_CONTROLS = text(
    """
SELECT name, role, bool_and(ok) AS ok, min(repeats) AS repeats
FROM controls WHERE run_id = :run_id AND attempt = :attempt GROUP BY name, role ORDER BY name, role
"""
)
_OF_STEP = text("SELECT count(*) FROM mismatches WHERE run_id = :run_id AND attempt = :attempt AND step = :step")
_ATTEMPTS = text(
    """
SELECT a.attempt, a.state, a.reason, a.started_at, a.ended_at, t.last_step
FROM attempts a LEFT JOIN attempt_totals t USING (run_id, attempt)
WHERE a.run_id = :run_id AND a.attempt >= :attempt ORDER BY a.attempt
"""
)
_NEWEST = text(
    """
SELECT a.attempt, a.state, t.last_step FROM attempts a LEFT JOIN attempt_totals t USING (run_id, attempt)
WHERE a.run_id = :run_id ORDER BY a.attempt DESC LIMIT 1
"""
)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands in the database: equal standings have the same events."""

    state: str
    verdict: str | None
    reason: str
    sentence: str
    finished_at: float | None
    step_at: float | None
    progress: Progress | None


def standings(conn: Connection, run_ids: Sequence[UUID]) -> dict[UUID, Standing]:
    """How runs stand; those that are not stored are left out."""
    if not run_ids:
        return {}
    progress = read_progress(conn, run_ids)
    return {
        row.run_id: Standing(
            row.state, row.verdict, row.reason, row.sentence,
            None if row.finished_at is None else row.finished_at.timestamp(),
            None if row.step_at is None else row.step_at.timestamp(), progress.get(row.run_id),
        )
        for row in conn.execute(_RUNS, {"run_ids": list(run_ids)})
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class News:
    """What one question found behind a place."""

    events: list[Event]
    """In their order."""
    more: bool
    """Whether there are more."""
    tip: Place
    """No event that the run has yet stands behind it; by what is stored, never by what was asked."""


def after(conn: Connection, run_id: UUID, start: Place = BEGIN) -> News:
    """The events of a run behind a place.

    Mismatches of the steps that are stored; behind them the progress up to the last step; of an attempt that has ended
    also what its last, unfinished step left, and how it ended; and at last the verdict.
    """
    standing = standings(conn, [run_id]).get(run_id)
    tip = BEGIN if standing is None else _tip(conn, run_id, standing)
    if standing is None or start >= tip:
        return News([], False, tip)
    out: list[Event] = []
    for row in conn.execute(_ATTEMPTS, {"run_id": run_id, "attempt": start.attempt}).all():
        begin = start if row.attempt == start.attempt else Place(row.attempt)
        if begin == Place(row.attempt):
            at = Place(row.attempt, -1, 1)
            out.append(event("attempt", _attempt(row, "running", ""), at))
            begin = at
        over = row.state != "running"
        upto = AFTER_STEPS - 1 if over else row.last_step if row.last_step is not None else -1
        found, more = _mismatches(conn, run_id, begin, upto)
        out += found
        if more:
            return News(out, True, tip)
        last = row.last_step
        if last is not None and (at := Place(row.attempt, last, AFTER_ROWS)) > begin:
            newest = standing.progress is not None and standing.progress.attempt == row.attempt
            if newest:
                # Of the last place only: what came before is contained in it.
                out.append(event("progress", progress_event(conn, run_id, standing), at))
        if over and (at := Place(row.attempt, AFTER_STEPS, 0)) > begin:
            out.append(event("attempt", _attempt(row, row.state, row.reason), at))
    if standing.state == "finished":
        verdict = {
            "run": str(run_id), "verdict": standing.verdict, "reason": standing.reason, "sentence": standing.sentence,
            "finished_at": standing.finished_at,
        }  # fmt: skip
        out.append(event("verdict", verdict, END))
    # Rows of an unfinished step, told after its attempt ended, stand before that end: keep the order of places.
    return News(sorted(out, key=lambda e: e.place or BEGIN), False, tip)


def _tip(conn: Connection, run_id: UUID, standing: Standing) -> Place:
    if standing.state == "finished":
        return END
    row = conn.execute(_NEWEST, {"run_id": run_id}).one_or_none()
    if row is None:
        return BEGIN
    if row.state != "running":
        return Place(row.attempt, AFTER_STEPS, 0)
    return Place(row.attempt, -1, 1) if row.last_step is None else Place(row.attempt, row.last_step, AFTER_ROWS)


def progress_event(conn: Connection, run_id: UUID, standing: Standing) -> dict[str, Any]:
    """Counts of the whole run so far, and the controls of the newest attempt."""
    progress = standing.progress
    assert progress is not None
    rows = conn.execute(_CONTROLS, {"run_id": run_id, "attempt": progress.attempt})
    return {
        "run": str(run_id),
        **progress_json(progress),
        "step_at": standing.step_at,
        "controls": [
            {"name": row.name, "role": row.role, "ok": row.ok, "repeats": row.repeats} for row in rows
        ],
    }  # fmt: skip


def _attempt(row: Any, state: str, reason: str) -> dict[str, Any]:
    over = state != "running"
    return {
        "attempt": row.attempt,
        "state": state,
        "reason": reason,
        "started_at": row.started_at.timestamp(),
        "ended_at": row.ended_at.timestamp() if over and row.ended_at is not None else None,
    }


def _mismatches(conn: Connection, run_id: UUID, begin: Place, upto: int) -> tuple[list[Event], bool]:
    """Mismatches of one attempt behind a place up to a step, `ROWS` an event, each of one step."""
    inside = begin.number < AFTER_ROWS and begin.step >= 0
    first = begin.step if inside else max(begin.step + 1, 0)
    if upto < first:
        return [], False
    told = 0
    if inside and begin.number:
        values = {"run_id": run_id, "attempt": begin.attempt, "step": first}
        told = min(int(conn.scalar(_OF_STEP, values) or 0), begin.number * ROWS)
    rows = page(
        conn, MismatchRecord, run_id, BATCH + 1, equal={"attempt": begin.attempt}, least={"step": first},
        most={"step": upto}, skip=told,
    ) or []  # fmt: skip
    more = len(rows) > BATCH
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in rows[:BATCH]:
        steps.setdefault(row["step"], []).append(row)
    if more and (last := steps.get(rows[BATCH]["step"])):
        # The step goes on behind the batch: only its whole chunks are told now.
        del last[len(last) // ROWS * ROWS :]
    out = []
    for step, mine in steps.items():
        before = -(-told // ROWS) if step == first else 0
        for chunk, number in enumerate(range(0, len(mine), ROWS)):
            at = Place(begin.attempt, step, before + chunk + 1)
            out.append(event("mismatches", {"step": step, "mismatches": mine[number : number + ROWS]}, at))
    return out, more
