"""State folders of the clusters that tests boot: one for each, removed at the end, or by the next run.

A folder is locked by the process that made it. When that process is killed the kernel drops the lock, and the next run,
which finds a folder that nobody holds, takes the cluster in it down.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.bare.machines import marked_processes

PREFIX = "tandem-test-cluster-"
TOOL = Path(__file__).resolve().parent / "bare"


def bare(root: Path, *args: object, input: str | None = None, timeout: float = 300) -> str:
    """Run a command of the cluster tool; what it prints.

    Raises:
        AssertionError: it failed; with what it said.
    """
    words = [sys.executable, str(TOOL), "--root", str(root), *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, input=input, timeout=timeout, check=False)
    if done.returncode:
        said = "\n".join([done.stderr.strip(), done.stdout.strip()]).strip()
        raise AssertionError(f"cluster tool: {' '.join(map(str, args))} exited with {done.returncode}: {said}")
    return done.stdout


@contextmanager
def booted(*options: str) -> Iterator[Path]:
    """The state folder of a cluster of its own, up; gone afterwards."""
    clean()
    folder, lock = _open()
    try:
        bare(folder / "run", "up", *options)
        yield folder / "run"
    finally:
        _remove(folder)
        os.close(lock)


def clean() -> None:
    """Remove what runs that were killed have left."""
    left = set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    left |= {Path(root).parent for root, _, _ in marked_processes().values()}  # perhaps under another TMPDIR
    for folder in left:
        if not folder.name.startswith(PREFIX):
            continue  # somebody's own
        if not folder.exists():  # its processes have outlived it
            _remove(folder)
        elif folder.stat().st_uid == os.geteuid() and (lock := _lock(folder)) is not None:
            _remove(folder)
            os.close(lock)


def _open() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Another run may have cleaned it up before it was locked.
        if (lock := _lock(folder)) is not None and folder.exists():
            return folder, lock


def _lock(folder: Path) -> int | None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _remove(folder: Path) -> None:
    bare(folder / "run", "down")
    shutil.rmtree(folder)
