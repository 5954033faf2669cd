"""One run at a glance: from its own row, its attempts and their totals, never from its records."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from tandem.db.live import Progress, read_progress, steps_per_s
from tandem.db.queries import attempts, runs_page
from tandem.lists_json import run_json


def detail(conn: Connection, run_id: UUID) -> dict[str, Any] | None:
    """As in the list of runs, with its spec, its attempts and where it first differed; None if there is none."""
    found = runs_page(conn, 1, run_id=run_id)
    if not found:
        return None
    progress = read_progress(conn, [run_id]).get(run_id)
    live = progress if found[0].run.verdict is None else None
    rate = None if live is None else steps_per_s(conn, run_id, live.attempt)
    rows = [msgspec.to_builtins(row) for row in attempts(conn, run_id)]
    return {
        **run_json(found[0]),
        "sentence": found[0].run.sentence,
        "spec": found[0].run.spec,
        "records_dropped_at": found[0].run.records_dropped_at,
        "attempt_list": [{name: row[name] for name in ATTEMPT} for row in rows],
        "progress": None if progress is None else {**progress_json(progress), "steps_per_s": rate},
    }


ATTEMPT = (
    "attempt", "state", "reason", "started_at", "ended_at", "fingerprint", "parity", "reference_host", "suspect_host",
    "devices",
)  # fmt: skip


def progress_json(p: Progress) -> dict[str, Any]:
    """How a run stands: counts of all attempts together, the step of the newest."""
    return {
        "attempt": p.attempt,
        "step": p.step,
        "sites_compared": p.sites,
        "elements_compared": p.elements,
        "mismatched_sites": p.mismatched_sites,
        "mismatched_elements": p.mismatched_elements,
        "other_findings": p.other_findings,
        "first_mismatch": None
        if p.first is None
        else {
            "attempt": p.first.attempt,
            "step": p.first.step,
            "site": p.first.site,
            "rank": p.first.rank,
            "mismatched": p.first.mismatched,
        },
    }
