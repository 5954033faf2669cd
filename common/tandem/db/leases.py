"""Who uses something: one locked file per user process. Pure operating system, no database.

A lease is a file named after the process that holds an exclusive ``flock`` on it. The kernel drops the lock when
the process ends, however it ends, so a lease cannot outlive its user and a reused process id cannot revive it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.errors import DatabaseError

_POLL_S = 0.02


class Lease:
    """Held from construction until ``release`` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}-{os.urandom(4).hex()}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def holders(folder: Path) -> list[int]:
    """Process ids that hold a lease, ascending; leases of dead processes are removed.

    Call it under ``exclusive``: a lease that is being made is not locked yet.
    """
    alive = set()
    for path in folder.iterdir():
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alive.add(int(path.name.split("-")[0]))
        else:
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)
    return sorted(alive)


@contextmanager
def exclusive(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file ``path``; other processes and threads wait.

    Raises:
        DatabaseError: another process kept it longer than ``timeout_s``, or the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DatabaseError(f"{path} cannot be opened ({error.strerror}): make the folder writable") from None
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise DatabaseError(f"another command has held {path} for {timeout_s:.0f} s: end it, then try again")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)
