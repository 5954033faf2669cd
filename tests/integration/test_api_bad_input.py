"""What a client can send wrong, one by one: the right status, a problem, nothing lost, leaked or run."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID

import httpx2
import pytest
from sqlalchemy import Engine

from api_server import DEADLINE_S, TOKEN, Served, is_problem, serving
from db_samples import make_run, scalar
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect
from tandem_api.settings import Settings

EVIL = [
    "'; DROP TABLE runs; --", "<script>alert(1)</script>", "\u202egpj.exe", "../../etc/passwd", "%00", "a" * 253,
    "$(id)", "\\u0000", "{{7*7}}", "😀", "ﬀ", "\x7f", "x' OR '1'='1",
]  # fmt: skip


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = connect(database)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def served(database: str) -> Iterator[Served]:
    with serving(database, head_seconds=0.5, body_seconds=0.5, body_limit=4096) as served:
        yield served


@pytest.fixture
def api(served: Served) -> Iterator[Served]:
    """The server; what a test sends wrong begins no run."""
    before = launched(served)
    yield served
    assert launched(served) == before


@pytest.fixture
def fresh(database: str) -> Iterator[Served]:
    """A server that nobody has troubled yet."""
    with serving(database) as served:
        yield served


def post(api: Served, body: Any, **more: Any) -> httpx2.Response:
    raw = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return api.client.post("/v1/runs", content=raw, headers={"Content-Type": "application/json"} | more)


def launched(api: Served) -> list[Path]:
    return sorted(api.folder.glob("*.json"))


# -- bodies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b"\xff\xfe", b"\xff\xff", b'{"spec": NaN', b"[1,", b'{"a":1}}'], ids=str
)
def test_what_is_no_json(api: Served, body: bytes) -> None:
    answer = post(api, body)
    assert answer.status_code in (400, 422)
    is_problem(answer, answer.status_code, "malformed-json" if answer.status_code == 400 else "validation")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ([], "body"),
        ({"nodes": "x"}, "body.nodes"),
        ({"spec": {"stpes": 5}}, "body.spec.stpes"),
        ({"spec": {"steps": "many"}}, "body.spec.steps"),
        ({"spec": {"steps": -1}}, "body.spec.steps"),
        ({"spec": {"steps": 10**30}}, "body.spec.steps"),
        ({"spec": {"steps": True, "tp": 2.5}}, "body.spec.tp"),
        ({"spec": {"workload": "everything"}}, "body.spec.workload"),
        ({"spec": {"sync": "none"}}, "body.spec"),
        ({"spec": {"model": "../tiny"}}, "body.spec.model"),
        ({"spec": {"model": "a\u0000b"}}, "body"),
        ({"spec": {"data": ["relative.txt"]}}, "body.spec.data"),
        ({"spec": {"fault": "no-such-profile"}}, "body.spec.fault"),
        ({"spec": {"optimizer": {"learning_rate": "\ud800"}}}, "body"),
        ({"node": "Not A Name"}, "body.node"),
        ({"node": "somewhere-else"}, "body.node"),
        ({"cluster": {}}, "body.cluster"),
        ({"spec": None}, "body.spec"),
        (json.loads("[" * 200 + "]" * 200), "body"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_order(api: Served, body: Any, where: str) -> None:
    values = is_problem(post(api, body), 422, "validation")
    assert where in values["errors"][0]["where"], values


def test_json_that_is_too_deep(api: Served) -> None:
    is_problem(post(api, b"[" * 2000 + b"]" * 2000), 400, "malformed-json")


def test_bodies_that_are_too_large(api: Served) -> None:
    """By what they say of themselves, and by what really comes."""
    answer = post(api, b" " * 5000)
    is_problem(answer, 413, "too-large")

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    answer = api.client.post("/v1/runs", content=chunks(), headers={"Content-Type": "application/json"})
    is_problem(answer, 413, "too-large")


@pytest.mark.parametrize("told", [True, False], ids=["told", "chunked"])
def test_who_still_sends_a_body_that_is_refused_sees_why(api: Served, told: bool) -> None:
    """A server that closes before a client that sends makes the network throw its answer away."""
    address = urlsplit(api.url)
    head = f"POST /v1/runs HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {TOKEN}\r\n"
    size = "Content-Length: 200000" if told else "Transfer-Encoding: chunked"
    head += f"Content-Type: application/json\r\n{size}\r\n\r\n"
    piece = b" " * 10_000 if told else b"2710\r\n" + b" " * 10_000 + b"\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE_S) as client:
        client.sendall(head.encode())
        for _ in range(20):
            client.sendall(piece)
            select.select([client], [], [], 0.02)  # time for a hasty answer
        if not told:
            client.sendall(b"0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize("key", ["", "with space", "ü", "x" * 256, "tab\there"], ids=repr)
def test_keys_that_are_none(api: Served, key: str) -> None:
    answer = api.client.post("/v1/runs", json={}, headers=[(b"Idempotency-Key", key.encode())])  # type: ignore[arg-type]
    is_problem(answer, 422, "validation")


def test_one_key_is_one_run(fresh: Served) -> None:
    """However often, and however the same order is written; another order is refused."""
    order = {"spec": {"steps": 5, "tp": 1}, "node": None}
    first = fresh.client.post("/v1/runs", json=order, headers={"Idempotency-Key": "k"})
    assert first.status_code == 202
    assert first.headers["location"] == f"/v1/runs/{first.json()['run']}"
    again = fresh.client.post("/v1/runs", json=order, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["run"]) == (202, first.json()["run"])
    assert again.headers["idempotent-replayed"] == "true"
    other = fresh.client.post("/v1/runs", json={"spec": {"steps": 6}}, headers={"Idempotency-Key": "k"})
    is_problem(other, 422, "idempotency-key-reused")
    assert len(launched(fresh)) == 1
    fresh.client.post(f"/v1/runs/{first.json()['run']}/cancel")


# -- addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["x", "", "e30", "!!!!", "WyJhIl0", "é", "a" * 3000, "WyJhYmMiLCBbMV1d"], ids=str)
def test_page_tokens_that_are_none(api: Served, engine: Engine, token: str) -> None:
    run = make_run(engine)
    for path in ("/v1/runs", f"/v1/runs/{run}/steps", "/v1/nodes"):
        is_problem(api.client.get(path, params={"page_token": token}), 400, "page-token")


def test_a_page_token_of_another_question(api: Served, engine: Engine, tmp_path: Path) -> None:
    runs = [make_run(engine) for _ in range(3)]
    token = api.get("/v1/runs", params={"page_size": 1})["next_page_token"]
    is_problem(api.client.get("/v1/runs", params={"page_token": token, "kind": "null"}), 400, "page-token")
    is_problem(api.client.get(f"/v1/runs/{runs[0]}/steps", params={"page_token": token}), 400, "page-token")
    assert api.get("/v1/runs", params={"page_token": token})["runs"]


@pytest.mark.parametrize(
    "query",
    ["page_size=0", "page_size=1001", "page_size=x", "verdict=good", "since=-1", "since=nan", "until=1e30",
     "synthetic=perhaps", "node=", "node=%00", "workload=%27", "verdct=match", "=", "page_size=1&x"],
)  # fmt: skip
def test_parameters_that_are_none(api: Served, query: str) -> None:
    is_problem(api.client.get(f"/v1/runs?{query}"), 422, "validation")


@pytest.mark.parametrize("path", ["/v1/runs/1", "/v1/runs/x/steps", "/v1/runs/%27", "/v1/runs/last"])
def test_ids_that_are_none(api: Served, path: str) -> None:
    is_problem(api.client.get(path), 422, "validation")


@pytest.mark.parametrize("last", ["x", "1", "1.2", "-1.0.0", "1.2.3.4", "9" * 40, "1.0.99999999", "۱.0.0"], ids=str)
def test_event_ids_that_are_none(api: Served, engine: Engine, last: str) -> None:
    answer = api.client.get(f"/v1/runs/{make_run(engine)}/events", params={"after": last})
    is_problem(answer, 422, "validation")


def test_other_methods_and_addresses(api: Served) -> None:
    answer = api.client.delete("/v1/runs")
    is_problem(answer, 405, "method-not-allowed")
    assert "GET" in answer.headers["allow"]
    for path in ("/v1", "/v1/runs/", "/v2/runs", "/v1/runs/../../etc/passwd", "/openapi.yaml"):
        is_problem(api.client.get(path), 404, "not-found")


def test_text_of_all_kinds_is_data(api: Served, engine: Engine) -> None:
    """As a node's name, in a filter, as a reason: it is looked for or kept, and never anything else."""
    for text in EVIL:
        answer = api.client.get(f"/v1/nodes/{quote(text, safe='')}")
        assert answer.status_code in (404, 422), text
        assert answer.headers["content-type"] == "application/problem+json"
        answer = api.client.get("/v1/runs", params={"node": text})
        assert (answer.status_code, answer.json().get("runs")) == (200, []), text
    store_run(engine, node_run(kind="null", suspect="well-1", reference="well-2"))
    store_run(engine, node_run(hits={3: 5}, began=BEGAN + HOUR))
    reason = " ".join(EVIL)
    answer = api.client.post("/v1/nodes/sick/clear", json={"reason": reason})
    assert answer.status_code == 200
    (kept,) = answer.json()["decisions"]
    assert (kept["reason"], kept["decided_by"]) == (reason, "tester")
    assert scalar(engine, "SELECT count(*) FROM runs WHERE kind = 'null'") == 1
    is_problem(api.client.post("/v1/nodes/sick/clear", json={"reason": "again"}), 409, "nothing-to-clear")
    is_problem(api.client.post("/v1/nodes/nobody/clear", json={"reason": "x"}), 404, "not-found")
    for bad in ({}, {"reason": ""}, {"reason": "  "}, {"reason": "a\u0000"}, {"reason": "x" * 2001}, {"why": "x"}):
        is_problem(api.client.post("/v1/nodes/sick/clear", json=bad), 422, "validation")
    assert scalar(engine, "SELECT count(*) FROM node_decisions") == 1


# -- tokens and hosts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"bearer{TOKEN}", f"Bearer {TOKEN}x",
     f"Bearer {TOKEN[:-1]}", "Bearer " + "x" * 20000],
)  # fmt: skip
def test_tokens_that_are_none(fresh: Served, engine: Engine, header: str | None) -> None:
    client = httpx2.Client(base_url=fresh.url, headers={} if header is None else {"Authorization": header})
    with client:
        run = make_run(engine)
        for path in ("/v1/runs", f"/v1/runs/{run}", f"/v1/runs/{run}/events", "/v1/nodes", "/v1/presets"):
            answer = client.get(path)
            is_problem(answer, 401, "unauthenticated")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        for path in ("/v1/runs", f"/v1/runs/{run}/cancel", "/v1/nodes/sick/clear"):
            is_problem(client.post(path, json={}), 401, "unauthenticated")


def test_guessing_tokens_is_slowed_down(fresh: Served) -> None:
    with httpx2.Client(base_url=fresh.url) as client:
        statuses = [client.get("/v1/runs", headers={"Authorization": f"Bearer {n}"}).status_code for n in range(40)]
        assert set(statuses) == {401, 429}
        answer = client.get("/v1/runs", headers={"Authorization": "Bearer x"})
        is_problem(answer, 429, "too-many")
        assert int(answer.headers["retry-after"]) >= 1
    # Everybody behind one proxy has one address: strangers there keep nobody out whose token is good.
    assert fresh.client.get("/v1/runs").status_code == 200
    made = fresh.client.post("/v1/runs", json={"spec": {"steps": 1, "tp": 1}})
    assert made.status_code == 202
    fresh.client.post(f"/v1/runs/{made.json()['run']}/cancel")


def test_a_rebound_name_is_turned_away(api: Served) -> None:
    """A page whose name was made to lead here cannot speak for its visitor."""
    for name in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", ""):
        is_problem(api.client.get("/healthz", headers={"Host": name}), 421, "host")
    for name in ("localhost:1234", "127.0.0.1", "[::1]:99"):
        assert api.client.get("/healthz", headers={"Host": name}).status_code == 200


def test_writes_are_limited_for_each_user(database: str) -> None:
    with serving(database, writes={"burst": 3, "per_minute": 1}) as api:
        statuses = [api.client.post("/v1/runs", json={"spec": {"tp": 0}}).status_code for _ in range(5)]
        assert statuses == [422, 422, 422, 429, 429]
        assert api.client.get("/v1/runs").status_code == 200


def test_reading_without_a_token_is_a_setting_and_writing_never(database: str) -> None:
    assert not Settings().anonymous_reads
    with serving(database, anonymous_reads=True) as api, httpx2.Client(base_url=api.url) as client:
        assert client.get("/v1/runs").status_code == 200
        is_problem(client.post("/v1/runs", json={}), 401, "unauthenticated")
        is_problem(client.get("/v1/runs", headers={"Authorization": "Bearer wrong"}), 401, "unauthenticated")


def test_every_answer_has_its_security_headers(api: Served) -> None:
    for answer in (api.client.get("/healthz"), api.client.get("/nowhere"), api.client.post("/v1/runs", content=b"{")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


# -- slow clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"", b"GET /v1/runs HT", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_a_head_that_never_ends(api: Served, begin: bytes) -> None:
    """Byte by byte or not at all: the connection is closed after the time that a head may take."""
    with socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1])), timeout=10) as client:
        client.sendall(begin)
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012 - either call may meet the end
            while client.recv(100):
                pass
            raise ConnectionResetError
        assert time.monotonic() - began < 5
    assert api.client.get("/healthz").status_code == 200


def test_a_body_that_never_ends(api: Served) -> None:
    with socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1])), timeout=10) as client:
        head = f"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        answer = b""
        while piece := client.recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"application/problem+json" in answer


@pytest.mark.parametrize(
    "asked", ["GET /healthz", "POST /nowhere", "DELETE /v1/runs", f"POST /v1/runs/{UUID(int=1)}/cancel"]
)
def test_a_body_that_nobody_reads_and_that_never_ends(api: Served, asked: str) -> None:
    """What is answered without its body, mostly to strangers, holds no connection: further bytes win no time."""
    address = urlsplit(api.url)
    head = f"{asked} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 100\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=0.1) as client:
        client.sendall(head.encode())
        began, answer, ended = time.monotonic(), b"", False
        while not ended and time.monotonic() - began < 5:
            try:
                if b"\r\n\r\n" in answer:
                    client.sendall(b" ")
                piece = client.recv(4096)
                answer, ended = answer + piece, not piece
            except TimeoutError:
                pass
            except OSError:
                ended = True
        assert answer.startswith(b"HTTP/1.1 ")
        assert ended


def test_a_body_that_comes_after_its_answer_keeps_the_connection(api: Served) -> None:
    """Within its time; the next request is answered as any."""
    address = urlsplit(api.url)
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE_S) as client:
        client.sendall(f"GET /healthz HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 100\r\n\r\n".encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        client.sendall(b" " * 100)
        client.sendall(f"GET /nowhere HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        while (piece := client.recv(4096)) and b"HTTP/1.1 404 " not in piece:
            pass
        assert b"HTTP/1.1 404 " in piece


def test_requests_that_are_no_http(api: Served) -> None:
    for raw in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" * 2,
                b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000):  # fmt: skip
        with socket.create_connection(("127.0.0.1", int(api.url.rsplit(":", 1)[1])), timeout=10) as client:
            answer = b""
            try:
                client.sendall(raw)
                while piece := client.recv(4096):
                    answer += piece
            except OSError:
                pass
            assert b" 500 " not in answer
    assert api.client.get("/healthz").status_code == 200


# -- what nobody foresaw ---------------------------------------------------------------------------------


def test_an_unforeseen_error_is_a_number_and_its_trace_stays_in_the_log(
    fresh: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("tandem_api.routes.runs.runs_page", broken)
    values = is_problem(fresh.client.get("/v1/runs"), 500, "internal")
    assert "secret" not in json.dumps(values)
    number = values["detail"].rsplit(" ", 1)[1]
    (told,) = [record for record in caplog.records if number in record.getMessage()]
    assert told.exc_info is not None
    assert "a secret" in str(told.exc_info[1])
    monkeypatch.undo()
    assert fresh.client.get("/v1/runs").status_code == 200
