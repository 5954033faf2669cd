"""What never reaches a route: no HTTP at all, and more connections than are served; answered like every error."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import fastapi.dependencies.utils
import fastapi.routing
import httpx2
import pytest

from api_server import Served, is_problem, serving
from prometheus import until
from tandem_api.security import limits
from tandem_api.security.limits import HEADERS


@pytest.fixture
def api(database_url: str) -> Iterator[Served]:
    with serving(database_url) as served:
        yield served


def said(api: Served, raw: bytes) -> bytes:
    """All that the server answers to some bytes, until it hangs up."""
    out = b""
    with socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1])), timeout=30) as client:
        client.sendall(raw)
        while piece := client.recv(4096):
            out += piece
    return out


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http_is_told_so_as_every_error_is(api: Served, raw: bytes) -> None:
    head, _, body = said(api, raw).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    assert status == "HTTP/1.1 400 Bad Request"
    assert headers["content-type"] == "application/problem+json"
    assert {name: headers.get(name.lower()) for name in HEADERS} == HEADERS
    assert json.loads(body)["type"] == "urn:tandem:problem:no-http"
    assert (json.loads(body)["status"], int(headers["content-length"])) == (400, len(body))


def test_connections_beyond_the_limit_are_told_when_to_come_back(api: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 3)
    connected = lambda: len(api.server.server_state.connections)
    with ExitStack() as idle:
        for _ in range(3):
            idle.enter_context(socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1]))))
        until("the connections", lambda: connected() == 3)
        answer = httpx2.get(f"{api.url}/healthz")
        is_problem(answer, 503, "busy")
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("5", "close")
        assert answer.headers["x-content-type-options"] == "nosniff"
    until("their end", lambda: connected() == 0)
    assert httpx2.get(f"{api.url}/healthz").status_code == 200
    counted = httpx2.get(f"{api.url}/metrics").text
    assert 'tandem_api_requests_total{method="GET",route="none",status="503"} 1.0' in counted


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/nodes", f"/v1/runs/{UUID(int=1)}", f"/v1/runs/{UUID(int=1)}/steps"])
def test_nothing_that_every_request_asks_for_is_computed_in_a_thread(
    api: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A plain function as dependency would be: with many clients each hop costs more than the question itself."""
    hops: list[str] = []

    async def hop(function: Any, *args: Any, **more: Any) -> Any:
        hops.append(function.__name__)
        return function(*args, **more)

    for module in (fastapi.dependencies.utils, fastapi.routing):
        monkeypatch.setattr(module, "run_in_threadpool", hop)
    assert api.client.get(path).status_code in (200, 404)
    assert hops == []
