"""The folder in which the workers of one machine keep compiled executables for each other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "writing"
"""There while a process may write entries; older than each of them."""


@contextmanager
def compiled_once(report: Callable[[str], None]) -> Iterator[None]:
    """On CPU, the two workers of one machine compile once: the first keeps the executables, the second loads them.

    The folder (``TANDEM_COMPILED``) is the user's own, since loading an executable runs code. Fingerprints are
    compared all the same. Not on accelerators, where jax's cache key leaves the autotuning out.
    """
    import jax

    name = os.environ.get("TANDEM_COMPILED")
    if not name or jax.default_backend() != "cpu":
        yield
        return
    folder = Path(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    with open(folder / "lock", "w") as lock:
        report("waiting for the other side to compile")
        fcntl.flock(lock, fcntl.LOCK_EX)
        with writing(folder):
            yield


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """For the one process that may write into the folder.

    jax writes an entry in place and never again, so that a process killed on the way would leave a torn one for
    ever: what was written since an earlier process set its mark and did not take it away is removed.
    """
    mark = folder / MARK
    if mark.exists():
        since = mark.stat().st_mtime - 1
        for entry in folder.glob("*-cache"):
            if entry.stat().st_mtime >= since:
                entry.unlink()
    mark.touch()
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)
