"""The images' first process: signals reach a service that has no handler yet, and exit codes come through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[2] / "deploy" / "entrypoint"
pytestmark = pytest.mark.needs("root")  # a PID namespace of its own: only there is it process 1


@contextmanager
def process_1(tmp_path: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """The entrypoint as process 1, with a Python that runs ``program`` whatever it is asked to."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o755)
    script = tmp_path / "tandem"
    script.write_text(ENTRYPOINT.read_text().replace("/opt/tandem/bin/python", str(python)))
    words = ["unshare", "--pid", "--fork", "--kill-child", "sh", str(script), "worker"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def inside(process: subprocess.Popen[str]) -> int:
    """PID, on this side, of the namespace's process 1."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def test_a_service_without_a_handler_ends_by_sigterm(tmp_path: Path) -> None:
    with process_1(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(600)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.kill(inside(process), signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_a_service_with_a_handler_ends_as_it_likes(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(0.2)\n"
        "    sys.exit(40)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(1)"
    )
    with process_1(tmp_path, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.kill(inside(process), signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        assert process.wait(60) == 40


@pytest.mark.parametrize("code", [0, 1, 40, 41, 42])
def test_exit_codes_come_through(tmp_path: Path, code: int) -> None:
    with process_1(tmp_path, f"raise SystemExit({code})") as process:
        assert process.wait(60) == code


def test_a_killed_service_is_told_as_kubernetes_tells_it(tmp_path: Path) -> None:
    with process_1(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)") as process:
        assert process.wait(60) == 137
