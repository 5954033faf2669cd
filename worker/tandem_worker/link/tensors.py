"""Tensors to and from the parts of messages; without a copy by the sender, nor by the receiver of one that comes in one
part. Pure.

Hosts are little-endian; every platform that jax runs on is.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
import numpy as np
from numpy.typing import NDArray

from tandem_worker.link.frames import CHUNK, Chunk, FrameError, Tensor

Bytes = memoryview | bytes


def pack(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, C order; a view where the array is contiguous. The array must not be changed until
    the peer has it.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def split(payload: memoryview) -> list[memoryview]:
    """Second parts of the messages of one tensor: at least one, all but the last CHUNK bytes long."""
    return [payload[i : i + CHUNK] for i in range(0, len(payload), CHUNK)] or [payload]


class Assembler:
    """Puts a tensor together from its `Tensor` frame and the `Chunk` frames that follow it directly."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._frame: Tensor | None = None
        self._buffer: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._filled = 0

    @property
    def busy(self) -> bool:
        """Whether a tensor is incomplete; no other sequenced frame may come meanwhile."""
        return self._frame is not None

    def start(self, frame: Tensor, part: Bytes) -> tuple[Tensor, NDArray[Any]] | None:
        """The tensor if it is complete already.

        Raises:
            FrameError: it is larger than the limit.
        """
        if frame.nbytes > self._limit:
            raise FrameError(f"tensor of {frame.nbytes} bytes exceeds the limit of {self._limit}")
        self._frame = None
        if frame.nbytes == len(part):
            return frame, np.frombuffer(part, np.uint8).view(np.dtype(frame.dtype)).reshape(frame.shape)
        self._frame, self._filled = frame, 0
        self._buffer = np.empty(frame.nbytes, np.uint8)
        return self._add(part)

    def go_on(self, frame: Chunk, part: Bytes) -> tuple[Tensor, NDArray[Any]] | None:
        """The tensor once its last chunk has come.

        Raises:
            FrameError: no tensor is incomplete, or the chunk is not the next one.
        """
        if self._frame is None:
            raise FrameError("chunk without a tensor")
        if frame.offset != self._filled or len(part) != min(CHUNK, self._frame.nbytes - self._filled):
            raise FrameError(f"chunk at {frame.offset}, expected {self._filled}")
        return self._add(part)

    def _add(self, part: Bytes) -> tuple[Tensor, NDArray[Any]] | None:
        assert self._frame is not None
        self._buffer[self._filled : self._filled + len(part)] = np.frombuffer(part, np.uint8)
        self._filled += len(part)
        if self._filled < self._frame.nbytes:
            return None
        frame, self._frame = self._frame, None
        buffer, self._buffer = self._buffer, np.empty(0, np.uint8)
        return frame, buffer.view(np.dtype(frame.dtype)).reshape(frame.shape)
