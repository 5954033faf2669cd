"""What the link tells the engine, and the link's bounds."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

from tandem.errors import LinkError
from tandem_worker.link.frames import Frame

Kind: TypeAlias = Literal["connected", "disconnected", "refused", "invalid", "failed"]


@dataclass(frozen=True, slots=True)
class FrameEvent:
    """A frame of the attached peer; ``payload`` is the array of a `Tensor`, shaped and typed as its frame says."""

    frame: Frame
    payload: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something happened to the link. ``error`` is set when the link is of no more use.

    ``connected``: attached, for the first time or again. ``disconnected``: the connection broke; it may come back.
    ``refused``: somebody was turned away (with ``error``: this side was, or the attached peer for good).
    ``invalid``: a frame was dropped. ``failed``: the link's own fault.
    """

    kind: Kind
    detail: str
    error: LinkError | None = None


Event: TypeAlias = FrameEvent | PeerEvent


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of one channel; seconds and bytes."""

    heartbeat_s: float = 1.0
    peer_timeout_s: float = 20.0
    """Silence after which the watchdog calls the link half-open; a suspect connects anew after half of it."""
    invalid_frames: int = 20
    """Invalid frames after which the attached peer is refused."""
    unacked_frames: int = 4096
    unacked_bytes: int = 64 << 20
    tensor_bytes: int = 4 << 30
    queued_events: int = 4096
    """Events that the engine has not taken yet, above which no more is read."""
    queued_bytes: int = 1 << 30
    """Tensor bytes read since the engine's queue was last empty, above which no more is read."""
    report_s: float = 1.0
    """Of events that turn somebody away or drop a frame, at most one of a sort in this time is reported."""


class Reporter:
    """Puts events into the engine's queue; those that a peer can provoke at will, no faster than ``every_s``."""

    def __init__(self, events: SimpleQueue[Any], every_s: float) -> None:
        self._events, self._every_s = events, every_s
        self._sorts: dict[str, tuple[float, int]] = {}

    @property
    def waiting(self) -> int:
        """Events that the engine has not taken."""
        return self._events.qsize()

    def put(self, event: Event) -> None:
        self._events.put(event)

    def limited(self, kind: Kind, sort: str, detail: str, now: float) -> None:
        """Report unless one of this ``sort`` (of few) was just reported; what was left out is counted in the next."""
        last, left_out = self._sorts.get(sort, (-self._every_s, 0))
        if now - last < self._every_s:
            self._sorts[sort] = last, left_out + 1
            return
        self._sorts[sort] = now, 0
        self.put(PeerEvent(kind, detail + (f" (and {left_out} more like it)" if left_out else "")))
