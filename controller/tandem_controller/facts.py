"""What PostgreSQL says of the live runs, asked once for all of them every few seconds.

A database that does not answer is a fact too: decisions then wait, and pods go on.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, select
from sqlalchemy.exc import DBAPIError

from tandem.db.engine import unreachable
from tandem.db.live import Progress, progress
from tandem.db.models import Attempt, Run
from tandem.errors import DatabaseError
from tandem_controller.observed import Facts, Judgement, Live


class FactStore:
    """The last answer for each live run. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._facts: dict[UUID, Facts] = {}
        self._error: str | None = "PostgreSQL was not asked yet"

    @property
    def error(self) -> str | None:
        """Why the database did not answer last time; None if it did."""
        with self._lock:
            return self._error

    def of(self, run_id: UUID) -> Facts:
        """What is known of a run; asks the database for one that it has not asked about yet."""
        with self._lock:
            known, error = self._facts.get(run_id), self._error
        if known is None and error is None:
            return self.refresh([run_id]).get(run_id, Facts(reachable=self.error is None, error=self.error or ""))
        if error is not None:
            return replace(known or Facts(), reachable=False, error=error)
        return known or Facts(reachable=True)

    def known(self, run_id: UUID) -> Facts | None:
        """The last answer, as it was."""
        with self._lock:
            return self._facts.get(run_id)

    def refresh(self, run_ids: Iterable[UUID]) -> dict[UUID, Facts]:
        """Ask about some runs; returns those whose facts changed. A failure marks the database as away."""
        asked = list(run_ids)
        try:
            found = ask(self.engine, asked)
        except DatabaseError as error:
            with self._lock:
                self._error = str(error)
            return {}
        with self._lock:
            self._error = None
            changed = {run_id: facts for run_id, facts in found.items() if self._facts.get(run_id) != facts}
            self._facts.update(found)
        return changed

    def forget(self, run_id: UUID) -> None:
        """The run's object is gone."""
        with self._lock:
            self._facts.pop(run_id, None)


def ask(engine: Engine, run_ids: list[UUID]) -> dict[UUID, Facts]:
    """What PostgreSQL says of runs, in three queries however many they are.

    Raises:
        DatabaseError: the database failed.
    """
    try:
        with engine.connect() as conn:
            columns = (Run.run_id, Run.verdict, Run.reason, Run.sentence)
            runs = {row.run_id: row for row in conn.execute(select(*columns).where(Run.run_id.in_(run_ids)))}
            states: dict[UUID, dict[int, str]] = defaultdict(dict)
            attempts = select(Attempt.run_id, Attempt.attempt, Attempt.state).where(Attempt.run_id.in_(run_ids))
            for row in conn.execute(attempts):
                states[row.run_id][row.attempt] = row.state
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None
    live = progress(engine, list(runs))
    return {run_id: _facts(runs.get(run_id), states.get(run_id, {}), live.get(run_id)) for run_id in run_ids}


def _facts(run: Any, states: Mapping[int, str], found: Progress | None) -> Facts:
    judged = Judgement(run.verdict, run.reason, run.sentence) if run is not None and run.verdict is not None else None
    live = Live()
    if found is not None:
        first = found.first
        live = Live(
            attempt=found.attempt, step=found.step or 0, sites=found.sites, elements=found.elements,
            mismatched_sites=found.mismatched_sites, mismatched_elements=found.mismatched_elements,
            other_findings=found.other_findings, closing=found.closing,
            first=None if first is None else {
                "step": first.step, "site": first.site, "rank": first.rank, "mismatched": first.mismatched,
            },
        )  # fmt: skip
    return Facts(
        reachable=True,
        run_stored=run is not None,
        attempts=dict(states),
        live=live,
        judgement=judged,
    )
