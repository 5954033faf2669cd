"""Tensors of the suspect's, piece by piece: memory is bounded by ``exchange_mib``, whatever their size.

Pieces are asked for ahead, over the borders of tensors, so that the suspect reads one, the network carries others and
the reference checks and measures another at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.errors import LinkError
from tandem_worker.link import frames as f
from tandem_worker.link.frames import CHUNK
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.reference import TRIES, Reference
from tandem_worker.lockstep.transfer import piece_digest

PIECE = CHUNK
"""Most bytes of a piece: one message of the link, which is taken as it came, without a copy."""

Place = tuple[int, int]
"""(output, rank)."""


@dataclass(frozen=True, slots=True)
class _Piece:
    place: Place
    start: int
    """Flat index of its first element."""
    count: int


class Exchange:
    """The differing tensors of one execution on the suspect.

    Args:
        side: the reference.
        execution: whose outputs differ.
        places: the tensors, each at most once, in the order in which `pieces` will be called for them; all of them
            must be taken to their end.
    """

    def __init__(self, side: Reference, execution: Execution, places: Sequence[Place]) -> None:
        self._side, self._execution = side, execution
        self._left = self._cut(places)
        self._asked: deque[_Piece] = deque()
        self._bytes = 0
        """Of the pieces that were asked for and are not done with yet."""
        self._open: set[tuple[Place, int]] = set()
        """Of them, those that have not come yet, by place and start."""
        self._early: dict[tuple[Place, int], tuple[f.Tensor, np.ndarray | None]] = {}
        """Pieces that came before their turn: one before them is sent again."""
        self._next = next(self._left, None)

    def pieces(self, output: int, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The suspect's and the own tensor of one rank, flat, in order; what follows is under way meanwhile.

        Raises:
            LinkError: a piece arrived changed every time, or has another size.
        """
        own = self._own((output, rank))
        self._ask()
        while self._asked and self._asked[0].place == (output, rank):
            piece = self._asked[0]
            part = own[piece.start : piece.start + piece.count]
            yield self._receive(piece, part), part
            self._asked.popleft()
            self._bytes -= part.nbytes
            self._ask()

    def _own(self, place: Place) -> np.ndarray:
        output, rank = place
        return self._side.machine.shard(self._execution.outputs[output], rank).reshape(-1)

    def _cut(self, places: Sequence[Place]) -> Iterator[_Piece]:
        for place in places:
            site = self._execution.op.sites[place[0]]
            size = max(1, self._largest // np.dtype(site.dtype).itemsize)
            for start in range(0, site.elements, size):
                yield _Piece(place, start, min(size, site.elements - start))

    @property
    def _largest(self) -> int:
        return min(PIECE, self._side.settings.exchange_bytes // 2)

    def _nbytes(self, piece: _Piece) -> int:
        return piece.count * np.dtype(self._execution.op.sites[piece.place[0]].dtype).itemsize

    def _ask(self) -> None:
        """Ask for as much as may be under way."""
        while (piece := self._next) is not None:
            if self._asked and self._bytes + self._nbytes(piece) > self._side.settings.exchange_bytes:
                return
            self._want(piece)
            self._asked.append(piece)
            self._bytes += self._nbytes(piece)
            self._next = next(self._left, None)

    def _want(self, piece: _Piece) -> None:
        self._open.add((piece.place, piece.start))
        output, rank = piece.place
        self._side.channel.send(
            f.Want(
                step=self._execution.step, op=self._execution.op.index, generation=self._side.generation,
                index=output, rank=rank, start=piece.start, count=piece.count,
            )
        )  # fmt: skip

    def _receive(self, piece: _Piece, own: np.ndarray) -> np.ndarray:
        """One piece, checked on arrival; asked for again when it arrived changed."""
        side, execution = self._side, self._execution
        output, rank = piece.place
        for attempt in range(1, TRIES + 1):
            frame, received = self._await(piece)
            if received is None or received.shape != own.shape or received.dtype != own.dtype:
                raise LinkError("protocol", "the suspect sent a piece of another size than was asked for")
            if piece_digest(received) == frame.digest:
                if attempt > 1:
                    side.ledger.transport(execution.step, execution.op, "piece", output, rank, repaired=True)
                return received
            if attempt < TRIES:
                self._want(piece)
        side.ledger.transport(execution.step, execution.op, "piece", output, rank, repaired=False)
        raise LinkError("transport", f"a piece arrived changed {TRIES} times at {execution.op.sites[output]}")

    def _await(self, piece: _Piece) -> tuple[f.Tensor, np.ndarray | None]:
        """The next answer that holds this piece; others that were asked for are kept until it is their turn."""
        key = (piece.place, piece.start)
        here = (self._execution.step, self._execution.op.index, self._side.generation, "piece")
        while key not in self._early:
            frame, received = self._side.expect(
                f.Tensor,
                lambda x: (
                    (x.step, x.op, x.generation, x.purpose) == here and ((x.index, x.rank), x.start) in self._open
                ),
            )
            found = ((frame.index, frame.rank), frame.start)
            self._open.discard(found)
            self._early[found] = frame, received
        return self._early.pop(key)
