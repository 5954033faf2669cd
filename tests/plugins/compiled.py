"""XLA compiles each program once: for tests in this process and for the workers that tests start.

Executables are kept in ``.cache/compiled`` of the checkout, or in the folder that ``TANDEM_TEST_COMPILED`` names, apart
for each Python, processor and purpose. jax finds them by a hash of the program, its options and the versions of jax and
XLA, so that another program is another entry; fingerprints are compared all the same.

A session works in a folder of its own, into which it links what is kept, and gives what is new at its orderly end.
So sessions that run at once share what was there before, and no kept entry was ever half-written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tandem_worker.compiled import writing

KEPT_IN = "TANDEM_TEST_COMPILED"
PURPOSES = ("in-process", "workers")
MOST = 1 << 30
"""Bytes of one purpose that are kept; of more, the oldest go."""
ROOT = Path(__file__).resolve().parents[2]


class Session:
    """The executables of one test session.

    Args:
        base: where executables are kept, of one Python and processor.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        base.mkdir(parents=True, exist_ok=True)
        with (base / "lock").open("w") as one_at_a_time:  # no other may take a folder that is not locked yet for left
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            _remove_left(base)
            self.folder = Path(tempfile.mkdtemp(prefix="session-", dir=base))
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        for purpose in PURPOSES:
            (self.folder / purpose).mkdir(mode=0o700)
            (base / purpose).mkdir(mode=0o700, exist_ok=True)
            _give(base / purpose, self.folder / purpose)

    def end(self) -> None:
        """An orderly end: keep what is new. Of workers that were killed, nothing torn."""
        for purpose in PURPOSES:
            with writing(self.folder / purpose):
                _give(self.folder / purpose, self.base / purpose)
            _prune(self.base / purpose, MOST)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


_session: Session | None = None


def start() -> None:
    """Set the environment, unless it says already where; must run before jax is imported."""
    global _session
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    kept = os.environ.get(KEPT_IN)
    _session = Session((Path(kept).expanduser().resolve() if kept else ROOT / ".cache" / "compiled") / _machine())
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_session.folder / "in-process")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    os.environ.setdefault("TANDEM_COMPILED", str(_session.folder / "workers"))


def end() -> None:
    """At the end of the session."""
    if _session is not None:
        _session.end()


def _give(source: Path, target: Path) -> None:
    """Link every entry that the other folder lacks; an entry is never changed once it is whole."""
    for entry in source.glob("*-cache"):
        try:
            os.link(entry, target / entry.name)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links
            partial = target / f"{entry.name}.{os.getpid()}"
            shutil.copy2(entry, partial)
            partial.rename(target / entry.name)


def _prune(folder: Path, most: int) -> None:
    """Remove the oldest entries beyond so many bytes."""
    found = sorted(((e.stat(), e) for e in folder.glob("*-cache")), key=lambda pair: -pair[0].st_mtime)
    size = 0
    for stat, entry in found:
        if (size := size + stat.st_size) > most:
            entry.unlink(missing_ok=True)


def _remove_left(base: Path) -> None:
    """Folders of sessions that were killed: the kernel dropped their locks."""
    for folder in base.glob("session-*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _machine() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(errors="replace").splitlines() if cpu.exists() else []
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    return f"{sys.implementation.cache_tag}-{platform.machine()}-{name}"
