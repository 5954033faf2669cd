"""A real server of the API, in a thread of the test's process, and small helpers of its clients."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from tandem_api.app import create_app
from tandem_api.launch.launcher import Launcher
from tandem_api.launch.local import LocalLauncher
from tandem_api.reads.store import Store
from tandem_api.security.authenticate import Authenticator
from tandem_api.security.limits import loopback_hosts
from tandem_api.security.local import LocalAuthenticator
from tandem_api.serve import Server, bound, server_of
from tandem_api.settings import Settings

TOKEN = "a-token-of-the-tests-with-32-chars"
LOCAL: dict[str, Any] = {
    "hosts": loopback_hosts(), "loopback_only": True, "writes": {"burst": 1000, "per_minute": 60000},
}  # fmt: skip
DEADLINE_S = 60.0


@dataclass
class Served:
    """A running server."""

    url: str
    app: FastAPI
    server: Server
    client: httpx2.Client
    folder: Path
    _thread: threading.Thread = field(repr=False)

    def get(self, path: str, status: int = 200, **values: Any) -> Any:
        """The JSON of a GET."""
        answer = self.client.get(path, **values)
        assert answer.status_code == status, answer.text[:2000]
        return answer.json()

    def pages(self, path: str, name: str, **params: Any) -> list[Any]:
        """A whole list, page by page."""
        out: list[Any] = []
        token = None
        while True:
            page = self.get(path, params=params | ({"page_token": token} if token else {}))
            out += page[name]
            token = page["next_page_token"]
            if token is None:
                return out
            assert page[name], "an empty page that is not the last"

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self.client.close()


@contextmanager
def serving(
    database: str,
    *,
    launcher: Launcher | None = None,
    authenticator: Authenticator | None = None,
    token: str = TOKEN,
    folder: Path | None = None,
    pool: int = 5,
    port: int = 0,
    **settings: Any,
) -> Iterator[Served]:
    """A server on a port of the loopback device (0: any), with the local parts unless others are given."""
    chosen = Settings.model_validate({**LOCAL, **settings})
    mine = folder or Path(tempfile.mkdtemp(prefix="tandem-api-"))
    listening = bound("127.0.0.1", port)
    made: list[tuple[FastAPI, Server]] = []
    failed: list[BaseException] = []

    def work() -> None:
        async def main() -> None:
            store = Store(database, pool=pool, query_s=chosen.query_seconds, whole_s=chosen.report_seconds)
            app = create_app(
                chosen, store, launcher or LocalLauncher(database, database, folder=mine),
                authenticator or LocalAuthenticator(TOKEN, "tester"),
            )  # fmt: skip
            server = server_of(app, chosen)
            made.append((app, server))
            await server.serve([listening])

        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="api", daemon=True)
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while not (made and made[0][1].started):
        assert not failed, failed
        assert time.monotonic() < deadline
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    client = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=DEADLINE_S)
    served = Served(url, *made[0], client, mine, thread)
    try:
        yield served
    finally:
        served.stop()
        listening.close()
        if folder is None:
            shutil.rmtree(mine)
    assert not failed, failed


@dataclass
class SentEvent:
    """One event as a browser would see it."""

    kind: str
    id: str | None
    data: Any


def events(lines: Iterator[str]) -> Iterator[SentEvent]:
    """Read a stream; comments are left out."""
    kind, number, data = "message", None, []
    for line in lines:
        name, _, value = line.partition(": ")
        if not line:
            if data:
                yield SentEvent(kind, number, json.loads("\n".join(data)))
            kind, number, data = "message", None, []
        elif name == "event":
            kind = value
        elif name == "id":
            number = value
        elif name == "data":
            data.append(value)


@contextmanager
def watching(served: Served, run: object, last: str | None = None) -> Iterator[Iterator[SentEvent]]:
    """The events of a run from a place on."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with served.client.stream("GET", f"/v1/runs/{run}/events", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        yield events(answer.iter_lines())


def is_problem(answer: httpx2.Response, status: int, name: str) -> dict[str, Any]:
    """Checks that an answer is an RFC 9457 problem that gives nothing away; returns it."""
    from tandem_api.problems import ProblemDetails

    assert answer.status_code == status, answer.text[:1000]
    assert answer.headers["content-type"] == "application/problem+json"
    values: dict[str, Any] = answer.json()
    ProblemDetails.model_validate(values)
    assert (values["status"], values["type"]) == (status, f"urn:tandem:problem:{name}")
    for leak in ("Traceback", 'File "', "sqlalchemy", "psycopg", "SELECT ", "postgresql://", "site-packages"):
        assert leak not in answer.text, leak
    return values
