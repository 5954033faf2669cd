"""The list of nodes: computed from all runs, and therefore kept for a moment and made once for all who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.db.nodes import FleetLine, read_fleet
from tandem_api.reads.store import Store


class Fleet:
    """Args:
    store: the database.
    kept_s: how long a list is kept.
    clock: monotonic seconds.
    """

    def __init__(self, store: Store, kept_s: float, clock: Callable[[], float]) -> None:
        self._store, self._kept_s, self._clock = store, kept_s, clock
        self._lines: list[FleetLine] = []
        self._at: float | None = None
        self._making = asyncio.Lock()

    async def lines(self) -> list[FleetLine]:
        """Every node that a real run names, those that need a person first at the top."""
        async with self._making:
            if self._at is None or self._clock() - self._at >= self._kept_s:
                asked = self._clock()
                self._lines = await self._store.ask(read_fleet)
                self._at = asked
            return self._lines

    def forget(self) -> None:
        """Somebody decided about a node: make the list anew."""
        self._at = None
