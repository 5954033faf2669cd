"""Commands, conditions and the one kind of error that users see."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

STARTED = time.monotonic()


class ClusterError(Exception):
    """What went wrong and, where one is known, the mend."""


def say(text: str) -> None:
    """Print a result."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def log(text: str) -> None:
    """Print progress, with the seconds since the start."""
    sys.stderr.write(f"[{time.monotonic() - STARTED:6.1f}s] {text}\n")
    sys.stderr.flush()


def run(*argv: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a short command to its end; its output is the result, or part of the error."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            cwd=cwd, env=env, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ClusterError(f"{words[0]} is not installed") from None
    if done.returncode:
        raise ClusterError(f"{shlex.join(words)} exited with {done.returncode}:\n{done.stdout.strip()}")
    return done.stdout


def succeeds(*argv: object) -> bool:
    words = [str(word) for word in argv]
    return subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0


def wait_until(what: str, check: Callable[[], object], seconds: float = 20.0) -> None:
    """Return when ``check()`` is true.

    Raises:
        TimeoutError: it was not in time; the message holds the last error that it met on the way.
    """
    end, last = time.monotonic() + seconds, ""
    while True:
        try:
            if check():
                return
        except (OSError, ValueError) as error:  # a refused connection, an HTTP error, half a JSON document
            last = f" ({error})"
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}{last}")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now; somebody may before they are used, so `up` tries again."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
