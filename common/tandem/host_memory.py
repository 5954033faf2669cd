"""What memory a process may still take on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes that new processes may take: what the kernel calls available, or less if a cgroup limits it."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # Files that were read once and lie in the cache give way.
        stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
        available = min(available, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return max(available, 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
