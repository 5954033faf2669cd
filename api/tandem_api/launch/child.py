"""The process that supervises one run which the API began: it outlives the API, and tells by files how it goes.

``python -m tandem_api.launch.child FOLDER RUN``: reads ``RUN.json``; holds a lock on ``RUN.lock`` while it lives, so
that nobody takes another process with its number for it; writes ``RUN.pid``, ``RUN.progress`` and, at the end,
``RUN.end``.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from tandem.cli.output import database_url
from tandem.db.liveness import identity
from tandem.errors import TandemError
from tandem.progress import ProgressEvent
from tandem.spec import RunSpec, validate
from tandem.supervisor import Local, Stop, run_local

EVERY_S = 0.25
"""Least time between two writes of the progress."""


def main(folder: Path, run: str) -> int:
    """Run it; the exit code says nothing that the files do not."""
    with (folder / f"{run}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stop = Stop()
        with stop.on_interrupt():
            write(folder / f"{run}.pid", identity())  # from here on it may be asked to stop
            end = _run(folder, run, stop)
        write(folder / f"{run}.end", end)
    return 0


def _run(folder: Path, run: str, stop: Stop) -> dict[str, Any]:
    order = msgspec.json.decode((folder / f"{run}.json").read_bytes())
    last = 0.0

    def on_progress(event: ProgressEvent) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY_S or event.phase == "closing":
            last = now
            write(folder / f"{run}.progress", msgspec.to_builtins(event))

    try:
        spec = validate(RunSpec, order["spec"], "spec")
        with database_url(os.environ.get("TANDEM_DB") or None) as url:
            local = Local(url=url, run_id=UUID(run), on_progress=on_progress)
            records = run_local(spec, local, stop)
    except TandemError as error:
        return {"error": str(error), "ended_at": time.time()}
    return {"verdict": records.run.verdict, "reason": records.run.reason, "ended_at": time.time()}


def write(path: Path, value: Any) -> None:
    """Write a small JSON file so that a reader sees the old one or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(value))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
