"""The two pods of an attempt, started as Kubernetes would: told by environment and files, without a supervisor."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from sqlalchemy import Engine

from supervised import OF_THIS_PROCESS
from tandem.db import store
from tandem.db.liveness import controller_identity
from tandem.ids import new_run_id
from tandem.records import AttemptRow, RunRow
from tandem.vocabulary import Role
from tandem.worker_io import KeyFile

DEADLINE_S = 600.0
START = "import sys; from pathlib import Path; from tandem_worker.pod import pod; pod(*map(Path, sys.argv[1:]))"
"""As ``python -m tandem_worker pod``, with folders of the test's own."""


def until(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


class Pair:
    """The two pods of one attempt."""

    def __init__(self, folder: Path, url: str, **spec: Any) -> None:
        self.folder, self.url = folder, url
        self.run_id = new_run_id(time.time(), os.urandom(10))
        self.spec = {"steps": 2, "model": "tiny", "self_replays": 2, **spec}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.pods: dict[Role, subprocess.Popen[str]] = {}
        keys = {role: zmq.curve_keypair() for role in Role}
        for role, peer in ((Role.REFERENCE, Role.SUSPECT), (Role.SUSPECT, Role.REFERENCE)):
            link = self.of(role) / "link"
            link.mkdir(parents=True)
            files = {KeyFile.OWN_PUBLIC: keys[role][0], KeyFile.OWN_SECRET: keys[role][1]}
            for name, value in {**files, KeyFile.PEER_PUBLIC: keys[peer][0]}.items():
                (link / name).write_bytes(value)
            (self.of(role) / "termination-log").touch()
        database = self.of(Role.REFERENCE) / "database"
        database.mkdir()
        (database / "uri").write_text(url)

    def of(self, role: Role) -> Path:
        return self.folder / role

    def store(self, engine: Engine) -> None:
        """As a controller does."""
        row = RunRow(
            run_id=self.run_id, created_at=time.time(), workload="submodule", kind="suspect", model="tiny",
            synthetic="fault" in self.spec, reference_node="healthy", suspect_node="sick",
            spec={"tp": 2} | self.spec, state="running",
        )  # fmt: skip
        store.create_run(engine, row, controller_identity("tandem", "sick", "u"), exists_ok=True)
        store.start_attempt(
            engine,
            AttemptRow(
                run_id=self.run_id, attempt=1, state="running", started_at=time.time(), reference_host="healthy",
                suspect_host="sick", devices=2,
            ),
            exists_ok=True,
        )  # fmt: skip

    def start(self, role: Role, **environment: str) -> subprocess.Popen[str]:
        values = {
            "TANDEM_ROLE": str(role),
            "TANDEM_RUN_ID": str(self.run_id),
            "TANDEM_ATTEMPT": "1",
            "TANDEM_SPEC": json.dumps(self.spec),
            "TANDEM_ENDPOINT": f"tcp://{'*' if role is Role.REFERENCE else 'localhost'}:{self.port}",
            "TANDEM_HOME": str(self.of(role) / "home"),
            "TANDEM_RECORDS_TIMEOUT": "120",
            "TANDEM_NODE": f"node-of-the-{role}",
        }
        kept = {name: value for name, value in os.environ.items() if name not in OF_THIS_PROCESS}
        with open(self.of(role) / "log", "w") as log:
            self.pods[role] = subprocess.Popen(
                [sys.executable, "-c", START, *(self.of(role) / n for n in ("link", "database", "termination-log"))],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, env={**kept, **values, **environment},
                start_new_session=True,
            )  # fmt: skip
        return self.pods[role]

    def start_both(self) -> None:
        for role in (Role.SUSPECT, Role.REFERENCE):
            self.start(role)

    def log(self, role: Role) -> str:
        return (self.of(role) / "log").read_text()

    def said(self, role: Role) -> dict[str, str]:
        """The termination message."""
        values: dict[str, str] = json.loads((self.of(role) / "termination-log").read_text())
        return values

    def codes(self) -> dict[Role, int]:
        return {role: pod.wait(DEADLINE_S) for role, pod in self.pods.items()}

    def until_log(self, role: Role, words: str) -> None:
        until(
            f"{words!r} in the log of the {role}:\n{self.log(role)}",
            lambda: words in self.log(role) or self.pods[role].poll() is not None,
        )
        assert words in self.log(role), self.log(role)
