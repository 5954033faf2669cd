"""Why a Job's pod was not made: only the Job's events say, a class that does not exist, a quota, pod security."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tandem.kube.client import Kube
from tandem.kube.errors import KubeError
from tandem.kube.paths import EVENTS

REMEMBERED_S = 10.0
"""How long an answer counts: each Job that lacks its pod is asked about this often."""


class PodRefusals:
    """Asks for the events of Jobs, each now and then. Thread-safe.

    Args:
        kube: the cluster.
        clock: monotonic, seconds.
    """

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._lock = threading.Lock()
        self._told: dict[str, tuple[float, str]] = {}
        """Path of a Job -> when its events were asked for, and what they said."""

    def of(self, namespace: str, job: str) -> str:
        """What the API server said when the Job's pod was to be made; empty if nothing. Never raises `KubeError`."""
        key, now = f"{namespace}/{job}", self._clock()
        with self._lock:
            self._told = {k: told for k, told in self._told.items() if now - told[0] <= REMEMBERED_S}
            if (known := self._told.get(key)) is not None:
                return known[1]
        selector = f"involvedObject.kind=Job,involvedObject.name={job},reason=FailedCreate"
        try:
            said = newest(self._kube.list(EVENTS.path(namespace), field_selector=selector).items)
        except KubeError as error:
            said = f"why cannot be told: {error}"
        with self._lock:
            self._told[key] = (now, said)
        return said


def newest(events: Iterable[Mapping[str, Any]]) -> str:
    """The message of the newest event, in one line; empty if there is none."""
    found = max(events, key=_at, default=None)
    return " ".join(str(found.get("message") or "").removeprefix("Error creating: ").split())[:500] if found else ""


def _at(event: Mapping[str, Any]) -> str:
    """When it was last seen. RFC 3339 in UTC sorts as text."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")
