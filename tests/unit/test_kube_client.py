"""The client against a server that answers whatever it likes, or nothing: every request ends in time, in one line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.errors import TandemError
from tandem.kube import client
from tandem.kube.client import Kube, interrupt
from tandem.kube.errors import Gone, KubeError, Unreachable
from tandem.kube.paths import PODS

pytest.importorskip("kubernetes")
Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(code: int, body: bytes, handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(code)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class Server:
    """Answers with `answer`; keeps what was asked."""

    def __init__(self) -> None:
        self.answer: Answer = lambda h: answer(200, b"{}", h)
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                outer.answer(self)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - as the library looks for them

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def stream(self, *events: Any, hold: bool = True) -> None:
        """Answer with a chunked stream of these lines, and then with nothing."""

        def run(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for event in events:
                data = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
                handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            if hold:
                self.release.wait(30)
            else:
                handler.wfile.write(b"0\r\n\r\n")

        self.answer = run


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.release.set()
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def kube(server: Server, tmp_path: Path) -> Iterator[Kube]:
    values = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.http.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(values))
    kube = Kube.connect(kubeconfig=str(tmp_path / "config"))
    yield kube
    kube._api.close()


def test_requests_are_what_the_api_server_expects(server: Server, kube: Kube) -> None:
    path = PODS.path("ns", "a")
    kube.apply(path, {"kind": "Pod"}, manager="tandem")
    kube.patch_status(path, {"x": 1}, resource_version="7")
    kube.patch(path, {"metadata": {}})
    kube.replace(path, {"kind": "Pod"})
    kube.create(PODS.path("ns"), {"kind": "Pod"}, dry_run=True)
    kube.delete(path, uid="u", grace_s=0)
    seen = [(method, target, headers["content-type"], body) for method, target, headers, body in server.asked]
    merge, jsonpatch, apply = (f"application/{k}" for k in ("merge-patch+json", "json-patch+json", "apply-patch+yaml"))
    assert seen == [
        ("PATCH", f"{path}?fieldManager=tandem&force=true", apply, {"kind": "Pod"}),
        (
            "PATCH", f"{path}/status", jsonpatch,
            [
                {"op": "add", "path": "/status", "value": {"x": 1}},
                {"op": "replace", "path": "/metadata/resourceVersion", "value": "7"},
            ],
        ),
        ("PATCH", path, merge, {"metadata": {}}),
        ("PUT", path, "application/json", {"kind": "Pod"}),
        ("POST", f"{PODS.path('ns')}?dryRun=All", "application/json", {"kind": "Pod"}),
        (
            "DELETE", path, "application/json",
            {
                "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background",
                "preconditions": {"uid": "u"}, "gracePeriodSeconds": 0,
            },
        ),
    ]  # fmt: skip
    assert all(headers["authorization"] == "Bearer secret-token" for _, _, headers, _ in server.asked)
    assert kube.namespace == "ns"


def test_a_collection_is_read_page_by_page(server: Server, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    pages = {"": (["a", "b"], "next"), "next": (["c"], "")}

    def page(handler: BaseHTTPRequestHandler) -> None:
        token = "next" if "continue=next" in handler.path else ""
        names, following = pages[token]
        items = [{"metadata": {"name": name}} for name in names]
        meta = {"resourceVersion": "7", **({"continue": following} if following else {})}
        answer(
            200, json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items}).encode(), handler
        )

    server.answer = page
    listing = kube.list(PODS.path("ns"), label_selector="a=b", field_selector="c=d")
    assert [item["metadata"]["name"] for item in listing.items] == ["a", "b", "c"]
    assert all((item["kind"], item["apiVersion"]) == ("Pod", "v1") for item in listing.items)
    assert listing.resource_version == "7"
    assert "labelSelector=a%3Db&fieldSelector=c%3Dd" in server.asked[0][1]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b"\xff"])
def test_an_answer_that_is_no_object_is_one_line(server: Server, kube: Kube, body: bytes) -> None:
    server.answer = lambda h: answer(200, body, h)
    with pytest.raises(Unreachable, match="no JSON object"):
        kube.get(PODS.path("ns", "a"))


def test_a_server_that_never_answers_is_given_up_in_time(server: Server, kube: Kube) -> None:
    server.answer = lambda h: server.release.wait(30) and None
    begin = time.monotonic()
    with pytest.raises(Unreachable, match="does not answer"):
        kube.get(PODS.path("ns", "a"), timeout_s=0.5)
    assert time.monotonic() - begin < 5
    assert len(server.asked) == 1  # not asked again behind the caller's back


def test_a_server_that_is_not_there_is_one_line(server: Server, kube: Kube) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(Unreachable, match="refused") as caught:
        kube.get(PODS.path("ns", "a"))
    assert "\n" not in str(caught.value)
    assert "secret-token" not in str(caught.value)


def test_a_watch_gives_events_as_they_come(server: Server, kube: Kube) -> None:
    one = {"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "8"}}}
    two = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
    raw = json.dumps(one).encode() + b"\n" + json.dumps(two).encode() + b"\n"
    server.stream(raw[:20], raw[20:], hold=False)
    events = list(kube.watch(PODS.path("ns"), "7", seconds=5))
    assert [(e.kind, e.object["metadata"]["resourceVersion"]) for e in events] == [("ADDED", "8"), ("BOOKMARK", "9")]
    asked = server.asked[0][1]
    for part in ("watch=true", "allowWatchBookmarks=true", "resourceVersion=7", "timeoutSeconds=5"):
        assert part in asked


def test_a_half_open_watch_ends_in_time(server: Server, kube: Kube) -> None:
    """The connection looks up, and nothing comes, not even its end."""
    server.stream({"type": "ADDED", "object": {}})
    begin = time.monotonic()
    stream = kube.watch(PODS.path("ns"), "7", seconds=1, quiet_s=0.5)
    assert next(stream).kind == "ADDED"
    with pytest.raises(Unreachable):
        next(stream)
    assert time.monotonic() - begin < 10


def test_a_watch_can_be_broken_from_another_thread(server: Server, kube: Kube) -> None:
    server.stream({"type": "ADDED", "object": {}})
    opened: list[Any] = []
    stream = kube.watch(PODS.path("ns"), "7", seconds=60, opened=opened.append)
    next(stream)
    threading.Timer(0.1, lambda: interrupt(opened[0])).start()
    begin = time.monotonic()
    with pytest.raises((Unreachable, StopIteration)):
        next(stream)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "old"}}, Gone),
        ({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}}, KubeError),
        ({"type": "ERROR"}, KubeError),
        (b"garbage\n", Unreachable),
    ],
)
def test_an_error_inside_a_stream_is_raised(server: Server, kube: Kube, event: Any, kind: type[TandemError]) -> None:
    server.stream(event)
    with pytest.raises(kind):
        list(kube.watch(PODS.path("ns"), "7", seconds=5))


def test_a_watch_that_is_refused_says_which(server: Server, kube: Kube) -> None:
    server.answer = lambda h: answer(403, b'{"reason": "Forbidden", "message": "no"}', h)
    with pytest.raises(KubeError, match="not allowed to watch pods in namespace ns"):
        list(kube.watch(PODS.path("ns"), "7"))


def test_what_is_gone_already_is_deleted(server: Server, kube: Kube) -> None:
    server.answer = lambda h: answer(404, b'{"reason": "NotFound", "message": "no"}', h)
    kube.delete(PODS.path("ns", "a"))
