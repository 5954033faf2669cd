"""XLA compiles each program once per checkout: for tests in this process and for the workers that tests start.

The executables lie in ``.cache/compiled`` of the checkout, apart for each Python, processor and purpose. Two sessions
at once do not share: the second compiles for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from tandem_worker.compiled import writing

_lock: IO[str] | None = None
_temporary: Path | None = None
_writing = ExitStack()


def start() -> None:
    """Set the environment, unless it says already where; must run before jax is imported."""
    global _lock, _temporary
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = Path(__file__).resolve().parents[2] / ".cache" / "compiled" / _machine()
    base.mkdir(parents=True, exist_ok=True)
    _lock = (base / "session.lock").open("w")
    try:
        fcntl.flock(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        _temporary = base = Path(tempfile.mkdtemp(prefix="tandem-compiled-"))
    folder = base / "in-process"
    folder.mkdir(exist_ok=True)
    _writing.enter_context(writing(folder))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    os.environ.setdefault("TANDEM_COMPILED", str(base / "workers"))


def end() -> None:
    """An orderly end: nothing is torn."""
    _writing.close()
    if _temporary is not None:
        shutil.rmtree(_temporary, ignore_errors=True)
    if _lock is not None:
        _lock.close()


def _machine() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(errors="replace").splitlines() if cpu.exists() else []
    facts = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    return f"{sys.implementation.cache_tag}-{platform.machine()}-{name}"
