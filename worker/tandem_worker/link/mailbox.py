"""What engine threads leave for the link's thread: the outbox behind a lock, with back-pressure."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque

from msgspec.structs import replace

from tandem.errors import LinkError
from tandem_worker.link import frames
from tandem_worker.link.frames import CHUNK, Chunk, Frame
from tandem_worker.link.outbox import Item, Outbox, Parts
from tandem_worker.link.state import Clock, Progress
from tandem_worker.link.tensors import split


class Mailbox:
    """Frames on their way out. ``delay_s`` is added to every frame without holding up the next."""

    def __init__(
        self, run: str, attempt: int, outbox: Outbox, progress: Progress, delay_s: float, clock: Clock
    ) -> None:
        self.run, self.attempt = run, attempt
        self.error: LinkError | None = None
        self.closing = False
        self._outbox, self._progress, self._delay_s, self._clock = outbox, progress, delay_s, clock
        self._turn = threading.Lock()  # one sender at a time: a tensor's chunks stay together
        self._changed = threading.Condition()
        self._asides: deque[bytes] = deque()
        self._woken = False
        self.bell, self._rope = socket.socketpair()
        """``bell`` becomes readable when the link's thread has something to do."""
        self.bell.setblocking(False)
        self._rope.setblocking(False)

    # ---- engine threads ----

    def send(self, frame: Frame, payload: memoryview | None) -> None:
        """Queue a frame with its tensor in as many messages as it takes; waits only while the outbox is full."""
        with self._turn:
            if payload is None:
                self._put(frame, None)
                return
            for number, part in enumerate(split(payload)):
                self._put(frame if number == 0 else Chunk(number * CHUNK), part)

    def aside(self, frame: Frame) -> None:
        """Leave an unnumbered frame that overtakes everything; never waits."""
        with self._changed:
            self._asides.append(self.encode(frame))
            self._ring()

    def drained(self, timeout: float) -> bool:
        """Wait until the peer has everything or never will; at most ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.error is not None or (self._outbox.empty and not self._asides), timeout
            )

    def close(self) -> None:
        with self._changed:
            self.closing = True
            self._ring()

    def _put(self, frame: Frame, payload: memoryview | None) -> None:
        with self._changed:
            if self._outbox.full and self.error is None:
                with self._progress.waiting("the link to take more"):
                    self._changed.wait_for(lambda: not self._outbox.full or self.error is not None)
            if self.error is not None:
                raise self.error
            head = self.encode(frame, self._outbox.next_seq)
            parts: Parts = (head,) if payload is None else (head, payload if len(payload) else b"")
            self._outbox.put(parts, self._clock() + self._delay_s if self._delay_s else 0.0)
            self._ring()

    def _ring(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(OSError):  # the thread has ended, or is sure to wake
                self._rope.send(b"\0")

    # ---- the link's thread ----

    def encode(self, frame: Frame, seq: int = 0) -> bytes:
        return frames.encode(replace(frame, run=self.run, attempt=self.attempt, seq=seq))

    def answer_bell(self) -> None:
        with self._changed, contextlib.suppress(BlockingIOError):
            self._woken = False
            self.bell.recv(64)

    def next(self) -> Item | None:
        """The next numbered message to send; maybe not due yet."""
        with self._changed:
            return self._outbox.peek()

    def sent(self) -> None:
        with self._changed:
            self._outbox.sent()

    def take_asides(self) -> list[bytes]:
        with self._changed:
            taken = list(self._asides)
            self._asides.clear()
            self._changed.notify_all()
            return taken

    def ack(self, received: int) -> None:
        """As `Outbox.ack`."""
        with self._changed:
            self._outbox.ack(received)
            self._changed.notify_all()

    def rewind(self, received: int) -> None:
        """As `Outbox.rewind`."""
        with self._changed:
            self._outbox.rewind(received)
            self._changed.notify_all()

    def fail(self, error: LinkError) -> None:
        """Nothing will be sent any more; everybody who waits or sends gets ``error``."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def shut(self) -> None:
        self.bell.close()
        self._rope.close()
