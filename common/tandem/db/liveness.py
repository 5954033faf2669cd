"""Who supervises an attempt, and whether that process still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host() -> str:
    """Name of this machine."""
    return socket.gethostname()


def _boot() -> str:
    """Differs after a restart of the machine."""
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text().strip()
    return str(int(psutil.boot_time()))


def _namespace() -> str:
    """Process ids mean something only inside their namespace (a container has its own)."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def identity(pid: int | None = None) -> dict[str, Any]:
    """What tells a process (default: this one) from any other, also after its id was given to another."""
    process = psutil.Process(pid or os.getpid())
    return {
        "host": host(),
        "boot": _boot(),
        "namespace": _namespace(),
        "pid": process.pid,
        "started": process.create_time(),
    }


CONTROLLER = "controller"
"""``kind`` in the identity of a run that a controller supervises: any of its replicas may do so, on any machine."""


def controller_identity(namespace: str, name: str, uid: str) -> dict[str, Any]:
    """What supervises the run of a PairRun."""
    return {"kind": CONTROLLER, "namespace": namespace, "pairrun": name, "uid": uid}


def alive(supervisor: Mapping[str, Any]) -> bool | None:
    """Whether the process of an ``identity`` lives; None where that cannot be told from here, as of a controller."""
    if supervisor.get("kind") == CONTROLLER:
        return None
    if supervisor.get("host") != host() or not isinstance(supervisor.get("pid"), int):
        return None
    if supervisor.get("boot") != _boot():
        return False
    if supervisor.get("namespace") != _namespace():
        return None
    try:
        process = psutil.Process(supervisor["pid"])
        return bool(
            abs(process.create_time() - supervisor.get("started", 0.0)) < 1.0
            and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None
