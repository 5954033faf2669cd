"""Tensors of the suspect's, piece by piece: memory is bounded by ``exchange_mib``, whatever their size.

Small tensors, one behind another, share a piece; a large one has its own, which the suspect sends from where it lies.
Pieces are asked for ahead: the suspect reads one, the network carries others and the reference checks and measures
another at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tandem.errors import LinkError
from tandem_worker.link import frames as f
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.reference import TRIES, Reference
from tandem_worker.lockstep.transfer import piece_digest

PIECE = f.CHUNK
"""Most bytes of a piece: one message of the link, which is taken as it came, without a copy."""
FIRST = 256 << 10
"""Most bytes of the first piece; each may be twice as large as the one before it. Until a first one has been read,
encrypted, carried and decrypted, one behind another, everybody else waits.
"""

APART = 512 << 10
"""Bytes from which on a tensor shares no piece: copying it would cost more than a message does."""

Place = tuple[int, int]
"""(output, rank)."""


class _Piece(msgspec.Struct, frozen=True):
    parts: list[f.Part]
    nbytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Output, rank and first element of its first part: what its answer is known by."""
        return self.parts[0][:3]


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
        self._next = next(self._left, None)
        self._asked: deque[_Piece] = deque()
        self._bytes = 0
        """Of the pieces that were asked for and are not done with yet."""
        self._open: set[tuple[int, int, int]] = set()
        """Keys of those among them that have not come yet."""
        self._early: dict[tuple[int, int, int], tuple[f.Tensor, np.ndarray | None]] = {}
        """Pieces that came before their turn: one before them is sent again."""
        self._parts = self._received()

    def pieces(self, output: int, rank: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The suspect's and the own tensor of one rank, flat, in order; what follows is under way meanwhile.

        Raises:
            LinkError: a piece arrived changed every time, or has another size.
        """
        own = self._side.machine.shard(self._execution.outputs[output], rank).reshape(-1)
        left = own.size
        while left:
            (index, of_rank, start, count), values = next(self._parts)
            if (index, of_rank) != (output, rank):
                raise AssertionError(f"the tensors are taken in another order than was said: {index}, not {output}")
            yield values, own[start : start + count]
            left -= count

    # -- asking ----------------------------------------------------------------------------------

    def _dtype(self, output: int) -> np.dtype[np.generic]:
        return np.dtype(self._execution.op.sites[output].dtype)

    def _cut(self, places: Sequence[Place]) -> Iterator[_Piece]:
        largest = min(PIECE, self._side.settings.exchange_bytes // 2)
        parts: list[f.Part] = []
        limit = room = min(FIRST, largest)

        def cut() -> _Piece:
            nonlocal parts, limit, room
            piece = _Piece(parts, limit - room)
            limit = room = min(2 * limit, largest)
            parts = []
            return piece

        for output, rank in places:
            start, elements, width = 0, self._execution.op.sites[output].elements, self._dtype(output).itemsize
            apart = elements * width >= APART
            if apart and parts:
                yield cut()
            while start < elements:
                count = min(max(room // width, 0 if parts else 1), elements - start)
                if count:
                    parts.append((output, rank, start, count))
                    start, room = start + count, room - count * width
                if start < elements or apart or len(parts) == f.PARTS:
                    yield cut()
        if parts:
            yield cut()

    def _ask(self) -> None:
        """Ask for as much as may be under way."""
        while (piece := self._next) is not None:
            if self._asked and self._bytes + piece.nbytes > self._side.settings.exchange_bytes:
                return
            self._want(piece)
            self._asked.append(piece)
            self._bytes += piece.nbytes
            self._next = next(self._left, None)

    def _want(self, piece: _Piece) -> None:
        self._open.add(piece.key)
        self._side.channel.send(
            f.Want(
                step=self._execution.step, op=self._execution.op.index, generation=self._side.generation,
                parts=piece.parts,
            )
        )  # fmt: skip

    # -- receiving -------------------------------------------------------------------------------

    def _received(self) -> Iterator[tuple[f.Part, np.ndarray]]:
        """Every part with its values, flat."""
        self._ask()
        while self._asked:
            piece = self._asked[0]
            raw, at = self._fetch(piece), 0
            for part in piece.parts:
                dtype = self._dtype(part[0])
                end = at + part[3] * dtype.itemsize
                yield part, raw[at:end].view(dtype)
                at = end
            self._asked.popleft()
            self._bytes -= piece.nbytes
            self._ask()

    def _fetch(self, piece: _Piece) -> np.ndarray:
        """The bytes of a piece, checked on arrival; asked for again when it arrived changed."""
        side, execution = self._side, self._execution
        output, rank, _ = piece.key
        for attempt in range(1, TRIES + 1):
            frame, received = self._await(piece)
            if received is None or received.shape != (piece.nbytes,) or received.dtype != np.uint8:
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
        here = (self._execution.step, self._execution.op.index, self._side.generation, "piece")
        while piece.key not in self._early:
            frame, received = self._side.expect(
                f.Tensor,
                lambda x: (x.step, x.op, x.generation, x.purpose) == here and (x.index, x.rank, x.start) in self._open,
            )
            found = (frame.index, frame.rank, frame.start)
            self._open.discard(found)
            self._early[found] = frame, received
        return self._early.pop(piece.key)
