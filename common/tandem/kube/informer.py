"""A cache of one kind of objects that follows the API server, and says when it last heard of it.

`kubernetes.informer.SharedInformer` (37.0) was read and tried for this and does not hold up: it lists through generated
models only (a list as a dict ends in an error) and follows the resource version of no event but theirs; it sets no time
limit on the client's side, so that a half-open connection hangs it for ever; and after a refused watch (403, 429) it
asks again at once, more than a thousand times a second. This one lists, watches with limits on both sides, lists again
after 410, backs off with jitter after errors, and re-reads everything every ``resync_s``.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tandem.errors import TandemError
from tandem.kube.client import WATCH_S, Event, Kube, Listing, Object, interrupt
from tandem.kube.errors import Forbidden, Gone, NotFound

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 10.0
Changed = Callable[[str, Object | None, Object | None], None]
"""Told the key, the object before and the object now (None: not there); in the informer's thread."""
Slim = Callable[[Object], Object]


def key_of(obj: Object) -> str:
    """``namespace/name``, or ``name`` for what has no namespace."""
    meta = obj.get("metadata") or {}
    namespace, name = meta.get("namespace"), str(meta.get("name", ""))
    return f"{namespace}/{name}" if namespace else name


def without_managed_fields(obj: Object) -> Object:
    """Drops what only the API server needs: often the larger half of an object."""
    (obj.get("metadata") or {}).pop("managedFields", None)
    return obj


class Informer:
    """Follows one collection.

    Args:
        kube: the cluster.
        path: of the collection.
        on_change: told of every change, of everything at the first listing, and again at every resync.
        label_selector: as kubectl takes it.
        field_selector: the same.
        slim: what is kept of an object; it may change its argument.
        resync_s: everything is listed, and told, again this often; None: only when it must be.
        watch_s: how long one watch lasts.
        on_error: told of every error in one line, in the informer's thread.
        clock: monotonic seconds.
        jitter: 0 to 1, for the back-off.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        on_change: Changed,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        slim: Slim = without_managed_fields,
        resync_s: float | None = None,
        watch_s: int = WATCH_S,
        on_error: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._kube, self.path, self._on_change = kube, path, on_change
        self._labels, self._fields = label_selector, field_selector
        self._slim, self._resync_s, self._watch_s = slim, resync_s, watch_s
        self._on_error, self._clock, self._jitter = on_error, clock, jitter
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}
        self._stopping = threading.Event()
        self._synced = threading.Event()
        self._raw: Any = None
        self._version: str | None = None
        """Up to which everything was seen; None: list again."""
        self._due = math.inf
        """When to list again in any case."""
        self._last_heard = clock()
        self._error: str | None = None
        self._refused = False
        self._thread = threading.Thread(target=self._run, name=f"informer {path}", daemon=True)

    # -- for its users -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to follow; returns at once."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End, also in the middle of a watch."""
        self._stopping.set()
        with self._lock:
            raw = self._raw
        if raw is not None:
            interrupt(raw)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def wait_synced(self, timeout_s: float) -> bool:
        """Wait for the first listing."""
        return self._synced.wait(timeout_s)

    @property
    def synced(self) -> bool:
        """Whether everything was listed once."""
        return self._synced.is_set()

    @property
    def last_heard(self) -> float:
        """When the API server last said anything: a listing, an event, a bookmark, the end of a quiet watch, or no."""
        return self._last_heard

    @property
    def refused(self) -> str | None:
        """What the API server refuses to list or to watch now, in one sentence: a right or a kind that is missing."""
        return self._error if self._refused else None

    @property
    def error(self) -> str | None:
        """What is wrong now; None while all is well."""
        return self._error

    def get(self, key: str) -> Object | None:
        """The object with this key; not to be changed."""
        with self._lock:
            return self._objects.get(key)

    def list(self) -> tuple[Object, ...]:
        """All objects; not to be changed."""
        with self._lock:
            return tuple(self._objects.values())

    def __iter__(self) -> Iterator[Object]:
        return iter(self.list())

    # -- its thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began, listed = self._clock(), self._version is None
            try:
                if self._version is None or began >= self._due:
                    self._relist(self._kube.list(self.path, label_selector=self._labels, field_selector=self._fields))
                self._follow()
                # A server that ends every watch at once is not asked in a hot loop.
                failures = failures + 1 if self._clock() - began < 1.0 else 0
            except Gone:
                self._version = None
                failures = failures + 1 if listed else 0
            except TandemError as error:
                if self._stopping.is_set():
                    return
                self._fail(str(error), refused=isinstance(error, (Forbidden, NotFound)))
                failures += 1
            except Exception as error:  # whatever the server, or a handler, made of it: never end silently
                self._fail(f"{type(error).__name__}: {error}")
                self._version = None
                failures += 1
            if failures:
                backoff = min(FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 10), LAST_BACKOFF_S)
                self._stopping.wait(backoff * (0.5 + 0.5 * self._jitter()))

    def _follow(self) -> None:
        """Watch once. A stream that breaks is taken up behind its last event."""
        assert self._version is not None
        left = self._due - self._clock()
        seconds = self._watch_s if left > self._watch_s else max(1, int(left))
        events = self._kube.watch(
            self.path, self._version, seconds=seconds, opened=self._opened,
            label_selector=self._labels, field_selector=self._fields,
        )  # fmt: skip
        try:
            for event in events:
                self._heard()
                self._take(event)
                if self._stopping.is_set():
                    return
            self._heard()
        finally:
            with self._lock:
                self._raw = None
            events.close()

    def _opened(self, raw: Any) -> None:
        self._heard()
        with self._lock:
            self._raw = raw
        if self._stopping.is_set():
            interrupt(raw)

    def _take(self, event: Event) -> None:
        if event.kind in ("ADDED", "MODIFIED"):
            self._put(self._slim(event.object))
        elif event.kind == "DELETED":
            self._remove(key_of(event.object))
        if version := (event.object.get("metadata") or {}).get("resourceVersion"):
            self._version = str(version)

    def _relist(self, listing: Listing) -> None:
        self._heard()
        objects = [self._slim(item) for item in listing.items]
        there = {key_of(obj) for obj in objects}
        with self._lock:
            gone = [key for key in self._objects if key not in there]
        for key in gone:
            self._remove(key)
        for obj in objects:
            self._put(obj)
        self._version = listing.resource_version
        self._due = self._clock() + self._resync_s if self._resync_s is not None else math.inf
        self._synced.set()

    def _put(self, obj: Object) -> None:
        key = key_of(obj)
        with self._lock:
            before = self._objects.get(key)
            self._objects[key] = obj
        self._on_change(key, before, obj)

    def _remove(self, key: str) -> None:
        with self._lock:
            before = self._objects.pop(key, None)
        if before is not None:
            self._on_change(key, before, None)

    def _heard(self) -> None:
        self._last_heard, self._error, self._refused = self._clock(), None, False

    def _fail(self, line: str, refused: bool = False) -> None:
        self._error, self._refused = line, refused
        if refused:  # it answers: whoever starts this process again gets the same answer
            self._last_heard = self._clock()
        self._on_error(line)
