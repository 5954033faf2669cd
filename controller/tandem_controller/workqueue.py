"""A queue of keys: each at most once, later if asked, with back-off after failures. As client-go's workqueue."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable

FIRST_BACKOFF_S = 0.05
MOST_BACKOFF_S = 60.0


class WorkQueue:
    """Thread-safe. A key that is added while it is worked on comes again once that is done: never two at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: tuple[deque[str], deque[str]] = (deque(), deque())
        """Keys that somebody may take: those that are new to the world, and the rest."""
        self._turn = 0
        """Which of the two comes first next time: each in its turn, so that neither starves."""
        self._known: set[str] = set()
        """Keys in ``_ready``."""
        self._busy: set[str] = set()
        self._again: set[str] = set()
        """Keys that were added while they were busy."""
        self._later: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}
        """Earliest time of each key in ``_later``; other entries are stale."""
        self._failures: dict[str, int] = {}
        self._closed = False

    def add(self, key: str, *, new: bool = False) -> None:
        """Work on a key as soon as somebody is free; one that is new does not wait behind news of all others."""
        with self._changed:
            self._add(key, new)
            self._changed.notify()

    def add_after(self, key: str, seconds: float) -> None:
        """Work on a key after some seconds; of several such wishes the earliest counts."""
        due = self._clock() + max(seconds, 0.0)
        with self._changed:
            if key not in self._due or due < self._due[key]:
                self._due[key] = due
                heapq.heappush(self._later, (due, key))
                self._changed.notify()

    def failed(self, key: str) -> float:
        """Work on a key again, later each time it fails; returns after how many seconds."""
        with self._changed:
            count = self._failures.get(key, 0)
            self._failures[key] = count + 1
        wait: float = min(FIRST_BACKOFF_S * 2.0 ** min(count, 30), MOST_BACKOFF_S)
        self.add_after(key, wait)
        return wait

    def succeeded(self, key: str) -> None:
        """Forget a key's failures."""
        with self._changed:
            self._failures.pop(key, None)

    def forget(self, key: str) -> None:
        """The object is gone."""
        with self._changed:
            self._failures.pop(key, None)
            self._due.pop(key, None)

    def take(self) -> str | None:
        """The next key, waiting for one; None once the queue is closed."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                wait = self._move_due()
                if self._known:
                    key = (self._ready[self._turn] or self._ready[1 - self._turn]).popleft()
                    self._turn = 1 - self._turn
                    self._known.discard(key)
                    self._busy.add(key)
                    return key
                self._changed.wait(wait)

    def done(self, key: str) -> None:
        """The work on a key has ended."""
        with self._changed:
            self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self._add(key)
            self._changed.notify()

    def close(self) -> None:
        """Wake everybody up: there is no more work."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._known)

    def _add(self, key: str, new: bool = False) -> None:
        if key in self._busy:
            self._again.add(key)
        elif key not in self._known:
            self._known.add(key)
            self._ready[0 if new else 1].append(key)

    def _move_due(self) -> float | None:
        """Make keys ready whose time has come; seconds until the next one, None if there is none."""
        now = self._clock()
        while self._later:
            due, key = self._later[0]
            if self._due.get(key) != due:
                heapq.heappop(self._later)
            elif due <= now:
                heapq.heappop(self._later)
                del self._due[key]
                self._add(key)
            else:
                return due - now
        return None
