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
    """Send parts of outputs, one behind another."""
    raw = []
    for output, rank, start, count in wanted.parts:
        flat = side.machine.shard(execution.outputs[output], rank).reshape(-1)
        raw.append(np.frombuffer(pack(flat[start : start + count]), np.uint8))
    value = raw[0] if len(raw) == 1 else np.concatenate(raw)
    index, rank, start, _ = wanted.parts[0]
    send_value(side, execution, "piece", index, rank, value, piece_digest(value), start)


WORDS = 512
"""Columns of the table whose sums `piece_digest` takes."""


def piece_digest(value: np.ndarray) -> bytes:
    """Of a part of a tensor on the host, for the transport alone; what is equal is decided by the tensor's own digest.

    CRC-32 of the sums, modulo 2**64, of the columns of a table of 64-bit words that is `WORDS` wide, and of the bytes
    behind it; and how many bytes these are. Several times as fast as a CRC of all, and misses as little of what may
    happen to messages that are authenticated under way: a change within 4 KiB on end changes sums.
    """
    raw = pack(value)
    whole = len(raw) // (8 * WORDS) * 8 * WORDS
    sums = np.frombuffer(raw[:whole], np.uint64).reshape(-1, WORDS).sum(axis=0, dtype=np.uint64)
    return struct.pack("<II", zlib.crc32(raw[whole:], zlib.crc32(pack(sums))), value.nbytes & 0xFFFFFFFF)


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
