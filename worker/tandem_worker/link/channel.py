"""The pair link as the engine sees it: frames go in from any thread, events come out of one queue.

A channel attaches the two sides to each other by run, attempt and session, numbers and acknowledges
frames, so that a reconnect of the same two processes loses nothing, sends heartbeats whatever the main thread
does, and turns everybody else away by name. All sockets belong to its one thread (`pump`).
"""

from __future__ import annotations

import secrets
import threading
import time
from queue import SimpleQueue
from typing import Any, Self

import zmq

from tandem.errors import LinkError
from tandem.vocabulary import Role
from tandem_worker.link.ends import ReferenceEnd, SuspectEnd
from tandem_worker.link.events import Event, FrameEvent, LinkLimits, PeerEvent, Reporter
from tandem_worker.link.frames import Bye, Frame, Tensor
from tandem_worker.link.keys import Endpoint, OwnKeys, PairKeys, new_keys
from tandem_worker.link.mailbox import Mailbox
from tandem_worker.link.outbox import Outbox
from tandem_worker.link.pump import Pump
from tandem_worker.link.state import Clock, PeerState, Progress

__all__ = [
    "Channel", "Event", "FrameEvent", "LinkLimits", "OwnKeys", "PairKeys", "PeerEvent", "PeerState", "Progress",
    "new_keys",
]  # fmt: skip


DEFAULT_LIMITS = LinkLimits()


class Channel:
    """One side of the link of one attempt.

    Args:
        role: the reference binds, the suspect connects.
        endpoint: ``tcp://host:port``; port 0 (reference): any free one, see ``endpoint`` after the construction.
        keys: this side's keys and the only public key that it talks to.
        run: the run's UUID in hexadecimal, without dashes.
        attempt: number of the attempt.
        events: gets a `FrameEvent` or `PeerEvent` for all that happens.
        progress: this side's, carried by its heartbeats.
        peer: told what is heard of the peer.
        delay_s: added one-way delay of all that this side sends, in seconds (benchmarks).
        limits: bounds and time limits.
        clock: monotonic seconds.
        session: random name of this process; default: from the operating system.

    Raises:
        SetupError: the port is in use, or the address is none of this machine.
    """

    def __init__(
        self,
        role: Role,
        endpoint: str,
        keys: OwnKeys,
        run: str,
        attempt: int,
        events: SimpleQueue[Any],
        progress: Progress,
        peer: PeerState,
        *,
        delay_s: float = 0.0,
        limits: LinkLimits = DEFAULT_LIMITS,
        clock: Clock = time.monotonic,
        session: str | None = None,
    ) -> None:
        address = Endpoint.parse(endpoint)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            end: ReferenceEnd | SuspectEnd = (ReferenceEnd if role is Role.REFERENCE else SuspectEnd)(
                self._context, address, keys, limits.peer_timeout_s
            )
        except BaseException:
            self._context.destroy(0)
            raise
        self.role = role
        self.endpoint = str(end.endpoint)
        self._peer = peer
        outbox = Outbox(limits.unacked_frames, limits.unacked_bytes)
        self._mail = Mailbox(run, attempt, outbox, progress, delay_s, clock)
        self._pump = Pump(
            end, self._mail, Reporter(events, limits.report_s), progress, peer, limits, delay_s, clock,
            session or secrets.token_hex(16),
        )  # fmt: skip
        self._end = end
        self._thread = threading.Thread(target=self._run, name=f"link-{role}", daemon=True)
        self._shut_once = threading.Lock()

    def start(self) -> Self:
        """Start the thread; a suspect begins to connect and goes on trying until it is closed."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def error(self) -> LinkError | None:
        """Why the link is of no more use."""
        return self._mail.error

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames and tensors handed to the network, those sent again included; TCP's and CURVE's not."""
        return self._pump.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._pump.bytes_received

    @property
    def invalid_frames(self) -> int:
        """Frames of the attached peer that were dropped."""
        return self._pump.invalid_frames

    def send(self, frame: Frame, payload: memoryview | None = None) -> None:
        """Queue one frame; the peer gets it once and in order, also after a reconnect.

        Does not wait, unless the peer has not acknowledged what LinkLimits allows: then it waits, which the
        watchdog sees as waiting for the peer. ``payload`` (from `tensors.pack`, with a `Tensor` frame)
        must stay unchanged until the peer has it.

        Raises:
            LinkError: the link is of no more use.
            FrameError: the frame is too large.
            ValueError: the payload does not fit its frame.
        """
        if isinstance(frame, Tensor) is (payload is None):
            raise ValueError("a tensor frame needs a payload, and no other frame takes one")
        if isinstance(frame, Tensor) and payload is not None and payload.nbytes != frame.nbytes:
            raise ValueError(f"payload of {payload.nbytes} bytes, but the frame says {frame.nbytes}")
        self._mail.send(frame, payload)

    def say_bye(self, reason: str) -> None:
        """Tell the peer, out of turn and without ever waiting, that this side leaves for ``reason``."""
        self._mail.aside(Bye(reason[:256]))

    def drained(self, timeout: float) -> bool:
        """Wait until the peer has acknowledged everything, or never will; at most ``timeout`` seconds."""
        return self._mail.drained(timeout)

    def close(self, linger_s: float = 2.0) -> None:
        """Give what is under way ``linger_s`` seconds to arrive (if the peer is connected), then end the thread and
        close the sockets.
        """
        if self._thread.ident is None:
            self._shut(0)
            return
        if self._peer.look().connected and self._thread.is_alive():
            self.drained(linger_s)
        self._mail.close()
        self._thread.join(linger_s + 1.0)

    def _run(self) -> None:
        try:
            self._pump.run()
        finally:
            self._shut(500)

    def _shut(self, linger_ms: int) -> None:
        with self._shut_once:
            self._end.close(linger_ms)
            self._mail.shut()
            self._context.term()
