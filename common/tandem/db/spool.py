"""A bounded local log of frames that survives the end of its process: the sink's write-ahead log.

A spool is a row of segment files. Each begins with a header (whose it is) and holds frames: length, CRC-32 of the
payload, CRC-32 of these eight bytes, payload. A tail that was cut off at any byte, or was never flushed by a
machine that lost power, is recognised and loses only itself; damage in the middle is told apart from it, because
the frames behind it are not gone. The writer holds a lock on each segment, so nobody replays a
living spool.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

_MAGIC = b"TANDEM1\n"
_HEADER = struct.Struct("<8s16sII")
_FRAME = struct.Struct("<III")
SUFFIX = ".spool"
MAX_PAYLOAD = 64 << 20
"""Longest payload in bytes; a longer length is damage."""


class SpoolError(Exception):
    """The spool cannot take more. ``reason``: ``spool_full``, ``disk_full`` or ``spool_unwritable``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SpoolCorruptError(Exception):
    """Damage that is no cut-off tail: frames behind it may be good, but cannot be told from noise."""


def frame(payload: bytes) -> bytes:
    """The bytes of one frame."""
    head = struct.pack("<II", len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def header(run_id: UUID, attempt: int) -> bytes:
    """The bytes with which a segment begins."""
    body = _HEADER.pack(_MAGIC, run_id.bytes, attempt, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


@dataclass(slots=True)
class _Segment:
    path: Path
    fd: int
    base: int
    """Position of the segment's first byte in the spool."""
    size: int
    synced: bool = True


class Spool:
    """The write side. All methods may be called from any thread.

    A position is a byte offset in the whole spool, headers included; it only grows.

    Args:
        folder: where the segments lie; made if missing.
        run_id: whose records these are.
        attempt: of the run.
        segment_bytes: size after which a new segment begins.
        limit_bytes: most bytes that unacknowledged segments may take.
    """

    def __init__(
        self, folder: Path, run_id: UUID, attempt: int, *, segment_bytes: int = 16 << 20, limit_bytes: int = 1 << 30
    ) -> None:
        self._folder = folder
        self._header = header(run_id, attempt)
        self._stem = f"{run_id}-{attempt}-{os.getpid()}-{os.urandom(3).hex()}"
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        self._segments: list[_Segment] = []
        self._made = 0
        self._end = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes on disk."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    def append(self, payloads: Sequence[bytes], *, sync: bool) -> tuple[int, int]:
        """Add frames, all or none.

        Args:
            payloads: one per frame.
            sync: also wait until the disk has them (they survive a power cut).

        Returns:
            Positions before the first and behind the last frame: what ``read`` takes.

        Raises:
            SpoolError: limit reached, disk full, or folder not writable; nothing was added.
        """
        data = b"".join(map(frame, payloads))
        with self._lock:
            total = sum(segment.size for segment in self._segments) + len(self._header)
            if total + len(data) > self._limit_bytes:
                raise SpoolError(
                    "spool_full", f"the spool in {self._folder} reached its limit of {self._limit_bytes} B"
                )
            try:
                segment = self._current()
                start = segment.base + segment.size
                try:
                    _write_all(segment.fd, data)
                    if sync:
                        os.fsync(segment.fd)
                except OSError:
                    # A frame half written here would hide what follows it.
                    os.ftruncate(segment.fd, segment.size)
                    raise
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                raise SpoolError(
                    "disk_full" if full else "spool_unwritable",
                    f"the spool in {self._folder} cannot be written ({error.strerror}): free some space there",
                ) from None
            segment.size += len(data)
            segment.synced = sync
            self._end = segment.base + segment.size
            return start, self._end

    def read(self, start: int, end: int) -> list[bytes]:
        """Payloads between two positions that one ``append`` returned."""
        with self._lock:
            segment = next(s for s in self._segments if s.base <= start and end <= s.base + s.size)
            data = os.pread(segment.fd, end - start, start - segment.base)
        return list(_frames(data))

    def acknowledge(self, position: int) -> None:
        """All frames before ``position`` are stored elsewhere: give their space back."""
        with self._lock:
            while self._segments and self._segments[0].base + self._segments[0].size <= position:
                segment = self._segments[0]
                if len(self._segments) == 1 and segment.size <= self._segment_bytes // 2:
                    # Keep the last segment and begin it anew: no file is made and removed for every batch.
                    os.ftruncate(segment.fd, len(self._header))
                    segment.base, segment.size = self._end - len(self._header), len(self._header)
                    return
                self._segments.pop(0)
                segment.path.unlink(missing_ok=True)
                os.close(segment.fd)

    def sync(self) -> None:
        """Wait until the disk has everything.

        Raises:
            OSError: the disk refuses.
        """
        with self._lock:
            for segment in self._segments:
                if not segment.synced:
                    os.fsync(segment.fd)
                    segment.synced = True

    def close(self) -> list[Path]:
        """Sync and unlock what is left for a replay; remove segments without frames.

        Returns:
            The segments that are left.
        """
        left = []
        with self._lock:
            for segment in self._segments:
                if segment.size <= len(self._header):
                    segment.path.unlink(missing_ok=True)
                else:
                    with suppress(OSError):
                        os.fsync(segment.fd)
                    left.append(segment.path)
                os.close(segment.fd)
            self._segments.clear()
        return left

    def _current(self) -> _Segment:
        if self._segments and self._segments[-1].size < self._segment_bytes:
            return self._segments[-1]
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{self._stem}-{self._made:06d}{SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            _write_all(fd, self._header)
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        self._made += 1
        self._segments.append(_Segment(path, fd, self._end, len(self._header)))
        self._end += len(self._header)
        return self._segments[-1]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _empty(data: bytes | mmap.mmap, offset: int) -> bool:
    """Whether only zeros follow: pages that a power cut left empty."""
    return not any(data[start : start + 65536].strip(b"\0") for start in range(offset, len(data), 65536))


def _frames(data: bytes | mmap.mmap, offset: int = 0) -> Iterator[bytes]:
    """Payloads of whole frames, up to the end or to a cut-off tail.

    Raises:
        SpoolCorruptError: damage that is no cut-off tail.
    """
    while len(data) - offset >= _FRAME.size:
        length, payload_crc, head_crc = _FRAME.unpack_from(data, offset)
        if zlib.crc32(data[offset : offset + 8]) != head_crc or length > MAX_PAYLOAD:
            if _empty(data, offset):
                return
            raise SpoolCorruptError(f"bad frame header at byte {offset}")
        end = offset + _FRAME.size + length
        if end > len(data):
            return
        payload = data[offset + _FRAME.size : end]
        if zlib.crc32(payload) != payload_crc:
            if _empty(data, end):
                return
            raise SpoolCorruptError(f"bad frame at byte {offset}")
        yield payload
        offset = end


class SegmentReader:
    """The read side: one segment that no living sink holds.

    ``run_id`` is None, and there are no payloads, if the file was cut off within its header.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.run_id: UUID | None = None
        self.attempt = 0
        self._fd = fd
        self._damage: str | None = None
        head = os.pread(fd, _HEADER.size, 0)
        if len(head) < _HEADER.size or not head.strip(b"\0"):
            return
        magic, run, attempt, crc = _HEADER.unpack(head)
        if magic != _MAGIC or zlib.crc32(head[:-4]) != crc:
            self._damage = "bad segment header"
            return
        self.run_id, self.attempt = UUID(bytes=run), attempt

    @classmethod
    def open(cls, path: Path) -> SegmentReader | None:
        """Lock and open a segment; None if its writer, or another reader, lives.

        Raises:
            FileNotFoundError: it is gone (another process replayed it).
        """
        fd = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:
                raise FileNotFoundError(path)
            return cls(path, fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def payloads(self) -> Iterator[bytes]:
        """Payloads of the whole frames; the file is mapped, not loaded.

        Raises:
            SpoolCorruptError: after everything before the damage was given.
        """
        if self._damage is not None:
            raise SpoolCorruptError(self._damage)
        if self.run_id is None:
            return
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as data:
            yield from _frames(data, _HEADER.size)
