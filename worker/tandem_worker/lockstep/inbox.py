"""The one event queue of a worker's main thread: link frames, read digests, requests to stop, trips.

The main thread is the only consumer, so that the lock-step needs no locks.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from tandem.errors import PairError
from tandem_worker.link.channel import FrameEvent, PeerEvent
from tandem_worker.lockstep.machine import Execution


@dataclass(frozen=True, slots=True)
class DigestReady:
    execution: Execution


@dataclass(frozen=True, slots=True)
class ReaderFailed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Drain, run the end controls and close normally."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tripped:
    """The watchdog gave the pair up."""

    reason: str
    detail: str


Event = FrameEvent | PeerEvent | DigestReady | ReaderFailed | StopRequested | Tripped


class Inbox:
    """A queue whose reader also learns of failures."""

    def __init__(self, told: Callable[[PeerEvent], None] = lambda _: None) -> None:
        self.queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.stop_reason: str | None = None
        self.told = told
        """Gets what happened to the link without ending it: for the log."""

    def next(self, timeout: float | None) -> FrameEvent | DigestReady | None:
        """The next frame or digest; None if none came within ``timeout`` seconds (0: do not wait).

        Raises:
            PairError: the link is of no more use, an execution failed, or the watchdog tripped.
        """
        try:
            event = self.queue.get(timeout=timeout) if timeout != 0 else self.queue.get_nowait()
        except queue.Empty:
            return None
        match event:
            case FrameEvent() | DigestReady():
                return event
            case StopRequested(reason):
                self.stop_reason = self.stop_reason or reason
            case ReaderFailed(error):
                raise PairError("execution_failed", f"a program failed on this side: {error}") from error
            case Tripped(reason, detail):
                raise PairError(reason, detail)
            case PeerEvent(error=error) if error is not None:
                raise error
            case PeerEvent():
                self.told(event)
        return None
