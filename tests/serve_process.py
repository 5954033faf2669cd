"""A running `tandem serve`, as a process of its own, and a client of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from supervised import DEADLINE_S, Home
from tandem_api.answers.runs import LaunchAnswer, RunAnswer


class Serving:
    """A running `tandem serve`."""

    def __init__(self, home: Home, port: int = 0, *options: str) -> None:
        self.process = home.command("serve", "--port", port, *options)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "answers at http://127.0.0.1:" in line, line + (
            self.process.stderr.read() if self.process.stderr else ""
        )
        self.url = line.split()[3]
        self.token_file = Path(self.process.stdout.readline().split()[1])
        self.console = self.process.stdout.readline().strip()
        self.token = token = self.token_file.read_text().strip()
        self.client = httpx2.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=DEADLINE_S
        )  # fmt: skip

    def launch(self, order: dict[str, Any], **headers: str) -> str:
        answer = self.client.post("/v1/runs", json=order, headers=headers)
        assert answer.status_code == 202, answer.text
        LaunchAnswer.model_validate(answer.json())
        return str(answer.json()["run"])

    def look(self, run: str) -> Any:
        answer = self.client.get(f"/v1/runs/{run}")
        assert answer.status_code == 200, answer.text
        RunAnswer.model_validate(answer.json())
        return answer.json()

    def wait(self, run: str, *states: str) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while (found := self.look(run))["state"] not in states:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        return found

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        self.client.close()
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, err


@contextmanager
def served(home: Home, port: int = 0, *options: str) -> Iterator[Serving]:
    """A server that is killed at the end, if it goes on until then."""
    found = Serving(home, port, *options)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.end(signal.SIGKILL)
