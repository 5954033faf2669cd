"""Moving one rank's tensor over the link, digested before it is sent and after it arrived."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from tandem_worker.link import frames as f
from tandem_worker.link.tensors import pack
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.side import Side


def lanes_bytes(lanes: np.ndarray) -> bytes:
    """Little-endian bytes of u32 digest lanes."""
    return lanes.astype("<u4").tobytes()


def slot_of(execution: Execution, purpose: str, index: int) -> str:
    """The slot that an index of a frame names: an input for purpose ``input``, else an output."""
    return execution.op.inputs[index] if purpose == "input" else execution.op.outputs[index]


def send_tensor(
    side: Side, execution: Execution, purpose: f.Purpose, index: int, rank: int, lanes: np.ndarray | None = None
) -> None:
    """Send one rank's input or output with the digest that the stand-alone program gives it now.

    ``lanes`` (u32 [R, 2]): that digest, where the caller has it already.
    """
    array = (execution.inputs if purpose == "input" else execution.outputs)[index]
    if lanes is None:
        lanes = side.machine.digest(slot_of(execution, purpose, index), array)
    send_value(side, execution, purpose, index, rank, side.machine.shard(array, rank), lanes_bytes(lanes[rank]))


def send_outputs(side: Side, execution: Execution) -> None:
    """Send every rank's every output, as full exchange does at every site."""
    for output, array in enumerate(execution.outputs):
        lanes = side.machine.digest(execution.op.outputs[output], array)
        for rank in range(side.plan.tp):
            send_tensor(side, execution, "full", output, rank, lanes)


def send_piece(side: Side, execution: Execution, wanted: f.Want) -> None:
    """Send a part of one rank's output."""
    flat = side.machine.shard(execution.outputs[wanted.index], wanted.rank).reshape(-1)
    value = flat[wanted.start : wanted.start + wanted.count]
    digest = piece_digest(value)
    send_value(side, execution, "piece", wanted.index, wanted.rank, value, digest, wanted.start)


def piece_digest(value: np.ndarray) -> bytes:
    """Of a part of a tensor on the host: CRC-32 of its bytes, and how many these are. For the transport alone; what is
    equal is decided by the tensor's own digest.
    """
    return struct.pack("<II", zlib.crc32(pack(value)), value.nbytes & 0xFFFFFFFF)


def send_value(
    side: Side,
    execution: Execution,
    purpose: f.Purpose,
    index: int,
    rank: int,
    value: np.ndarray,
    digest: bytes,
    start: int = 0,
) -> None:
    """Send a tensor as it is, with the digest that it claims."""
    frame = f.Tensor(
        step=execution.step,
        op=execution.op.index,
        generation=side.generation,
        purpose=purpose,
        index=index,
        rank=rank,
        dtype=str(value.dtype),
        shape=list(value.shape),
        digest=digest,
        start=start,
    )
    side.channel.send(frame, pack(value))
