"""A tensor of the suspect's, piece by piece: memory is bounded by ``exchange_mib``, whatever the tensor's size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tandem.errors import LinkError
from tandem_worker.link import frames as f
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.reference import TRIES, Reference
from tandem_worker.lockstep.transfer import piece_digest


def fetch_pieces(
    side: Reference, execution: Execution, output: int, rank: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The suspect's and the own tensor of one rank, flat, in order; the next is under way meanwhile.

    Raises:
        LinkError: a piece arrived changed every time, or has another size.
    """
    own = side.machine.shard(execution.outputs[output], rank).reshape(-1)
    size = max(1, side.settings.exchange_bytes // 2 // own.itemsize)
    starts = range(0, own.size, size)
    for start in starts[:2]:
        _want(side, execution, output, rank, start, min(size, own.size - start))
    for number, start in enumerate(starts):
        part = own[start : start + size]
        yield _piece(side, execution, output, rank, start, part), part
        if number + 2 < len(starts):
            following = starts[number + 2]
            _want(side, execution, output, rank, following, min(size, own.size - following))


def _want(side: Reference, execution: Execution, output: int, rank: int, start: int, count: int) -> None:
    side.channel.send(
        f.Want(
            step=execution.step, op=execution.op.index, generation=side.generation,
            index=output, rank=rank, start=start, count=count,
        )
    )  # fmt: skip


def _piece(side: Reference, execution: Execution, output: int, rank: int, start: int, own: np.ndarray) -> np.ndarray:
    """One piece, checked on arrival; asked for again when it arrived changed."""
    wanted = (execution.step, execution.op.index, side.generation, "piece", output, rank, start)
    for attempt in range(1, TRIES + 1):
        frame, received = side.expect(
            f.Tensor, lambda x: (x.step, x.op, x.generation, x.purpose, x.index, x.rank, x.start) == wanted
        )
        if received is None or received.shape != own.shape or received.dtype != own.dtype:
            raise LinkError("protocol", "the suspect sent a piece of another size than was asked for")
        if piece_digest(received) == frame.digest:
            if attempt > 1:
                side.ledger.transport(execution.step, execution.op, "piece", output, rank, repaired=True)
            return received
        _want(side, execution, output, rank, start, own.size)
    side.ledger.transport(execution.step, execution.op, "piece", output, rank, repaired=False)
    raise LinkError("transport", f"a piece arrived changed {TRIES} times at {execution.op.sites[output]}")
