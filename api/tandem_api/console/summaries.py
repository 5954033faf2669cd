"""Reports inside the console: a whole run is read and drawn, so what was made is kept for all who look at it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tandem.report import run_page
from tandem.runs.summary import summarise
from tandem_api.console import shell
from tandem_api.reads.store import Store
from tandem_api.routes.runs import records_of

KEPT = 16
"""Runs."""
LOCKS = 16
LEAST_S = 2.0
"""A run that goes on is read anew after so long at the earliest,"""
SHARE = 10
"""and after so many times as long as it took to make: watching costs at most a tenth of a thread."""


@dataclass(frozen=True, slots=True)
class _Made:
    html: str
    over: bool
    at: float
    took_s: float


class Reports:
    """Args:
    store: the database.
    clock: monotonic seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._made: OrderedDict[UUID, _Made] = OrderedDict()
        self._locks = [asyncio.Lock() for _ in range(LOCKS)]

    async def of(self, run_id: UUID, *, over: bool) -> str:
        """The report's sections of a run, as a part of a page.

        Args:
            run_id: the run.
            over: whether it has its verdict: then the report is the last one.

        Raises:
            Problem: 404: nothing is stored of it; 503 and 504: the database does not answer.
        """
        async with self._locks[run_id.int % LOCKS]:  # whoever comes meanwhile gets what is being made
            found = self._made.get(run_id)
            if found is None or not (found.over or (not over and self._fresh(found))):
                began = self._clock()
                html, finished = await self._store.whole(_report, run_id)
                found = self._made[run_id] = _Made(html, finished, self._clock(), self._clock() - began)
            self._made.move_to_end(run_id)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
            return found.html

    def _fresh(self, made: _Made) -> bool:
        return self._clock() - made.at <= max(LEAST_S, SHARE * made.took_s)


def _report(conn: Any, run_id: UUID) -> tuple[str, bool]:
    summary = summarise(records_of(conn, run_id))
    html = shell.text(
        "run.html.j2", layout="console/report.html.j2", sections=run_page.sections(summary), **run_page.values(summary)
    )
    return html, summary.run.state == "finished"
