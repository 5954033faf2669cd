"""A real Prometheus (Debian's package) for tests, and promtool."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

DEADLINE_S = 120.0
SCRAPE = "500ms"


def lint(exposition: bytes) -> str:
    """What ``promtool check metrics`` says against an exposition; empty: nothing."""
    done = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, check=False)
    return (done.stdout + done.stderr).decode()


def scrape(port: int) -> bytes:
    """What a process tells at its port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        body: bytes = answer.read()
        return body


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def until(what: str, condition: Callable[[], Any], seconds: float = DEADLINE_S) -> Any:
    """Wait for something that is true; returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found


class Prometheus:
    """One that runs.

    Args:
        port: of its API.
    """

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **values: Any) -> Any:
        """The data of an answer of its API; an error of a query is an assertion."""
        query = urllib.parse.urlencode(values, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/{path}?{query}", timeout=30) as answer:
                body = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{values}: {error.read().decode()}") from None
        assert body["status"] == "success", body
        return body["data"]

    def now(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def up(self) -> bool:
        """Whether every target was scraped."""
        targets = self.ask("targets", state="active")["activeTargets"]
        return all(target["health"] == "up" for target in targets)


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes local ports.

    Args:
        folder: for its configuration and data.
        targets: job -> port.
    """
    config = {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE},
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": "tandem"}}],
            }
            for job, port in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        found = Prometheus(port)
        until("Prometheus", lambda: _ready(found, process))
        yield found
    finally:
        process.kill()
        process.wait()


def _ready(found: Prometheus, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Prometheus has ended"
    try:
        with urllib.request.urlopen(f"{found.address}/-/ready", timeout=10):
            return True
    except OSError:
        return False
