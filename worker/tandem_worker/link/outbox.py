"""Frames that the peer may not have yet: numbered, kept until acknowledged, sent again after a reconnect. Pure.

TCP and ZeroMQ lose what was under way when a connection breaks; with this, a reconnect of the same two processes
neither loses nor doubles a frame. The caller locks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

Parts: TypeAlias = tuple[bytes | memoryview, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One message on its way."""

    seq: int
    parts: Parts
    due: float
    """Not sent before this time (the added delay of a benchmark)."""

    @property
    def size(self) -> int:
        return sum(len(part) for part in self.parts)


class Outbox:
    """Bounded by messages and bytes that are not acknowledged; one message always fits an empty outbox."""

    def __init__(self, limit_frames: int, limit_bytes: int) -> None:
        self._limit_frames, self._limit_bytes = limit_frames, limit_bytes
        self._unsent: deque[Item] = deque()
        self._unacked: deque[Item] = deque()
        self._bytes = 0
        self._sent = 0
        self.next_seq = 1

    @property
    def full(self) -> bool:
        return len(self._unsent) + len(self._unacked) >= self._limit_frames or self._bytes >= self._limit_bytes

    @property
    def empty(self) -> bool:
        """Whether the peer has everything."""
        return not self._unsent and not self._unacked

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def put(self, parts: Parts, due: float) -> None:
        """Append one message, whose frame carries ``next_seq``."""
        item = Item(self.next_seq, parts, due)
        self._unsent.append(item)
        self._bytes += item.size
        self.next_seq += 1

    def peek(self) -> Item | None:
        """The next message to send."""
        return self._unsent[0] if self._unsent else None

    def sent(self) -> None:
        """The message that `peek` gave was handed to the socket."""
        item = self._unsent.popleft()
        self._unacked.append(item)
        self._sent = max(self._sent, item.seq)

    def ack(self, received: int) -> None:
        """The peer has everything up to ``received``.

        Raises:
            ValueError: it claims what was never sent.
        """
        if received > self._sent:
            raise ValueError(f"acknowledges frame {received}, but {self._sent} is the last one sent")
        for queue in (self._unacked, self._unsent):
            while queue and queue[0].seq <= received:
                self._bytes -= queue.popleft().size

    def rewind(self, received: int) -> None:
        """After a reconnect: forget what the peer has, send everything else again.

        Raises:
            ValueError: the peer claims what was never sent, or lacks what was acknowledged before.
        """
        self.ack(received)
        self._unsent.extendleft(reversed(self._unacked))
        self._unacked.clear()
        first = self._unsent[0].seq if self._unsent else self.next_seq
        if first != received + 1:
            raise ValueError(f"lacks frame {received + 1}, which it had acknowledged")
