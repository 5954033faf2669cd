"""The informer follows whatever the server does: its cache ends equal to what is there, and no loop is hot."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from tandem.kube.client import Event, Listing, Object
from tandem.kube.errors import Forbidden, Gone, KubeError, NotFound, Unreachable
from tandem.kube.informer import Informer, key_of


def obj(name: str, version: int, **values: Any) -> Object:
    meta = {"namespace": "ns", "name": name, "resourceVersion": str(version), "managedFields": [1]}
    return {"metadata": meta, **values}


class Server:
    """One collection; a watch ends as the test says."""

    def __init__(self) -> None:
        self.there: dict[str, Object] = {}
        self.version = 10
        self.calls: list[tuple[str, str]] = []
        self.list_error: KubeError | None = None
        self.watch_error: KubeError | None = None
        self.streams: queue.Queue[Event | KubeError | None] = queue.Queue()

    def list(self, path: str, **_: Any) -> Listing:
        self.calls.append(("list", ""))
        if self.list_error is not None:
            raise self.list_error
        return Listing([dict(o) for o in self.there.values()], str(self.version))

    def watch(self, path: str, version: str, **_: Any) -> Generator[Event]:
        self.calls.append(("watch", version))
        if self.watch_error is not None:
            raise self.watch_error
        while True:
            item = self.streams.get(timeout=30)
            if item is None:
                return
            if isinstance(item, KubeError):
                raise item
            yield item

    def send(self, kind: str, name: str, **values: Any) -> None:
        self.version += 1
        changed = obj(name, self.version, **values)
        if kind == "DELETED":
            self.there.pop(name, None)
        else:
            self.there[name] = changed
        self.streams.put(Event(kind, changed))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Told:
    def __init__(self) -> None:
        self.changes: list[tuple[str, bool, bool]] = []
        self.errors: list[str] = []
        self.fail_once = False

    def __call__(self, key: str, before: Object | None, now: Object | None) -> None:
        if self.fail_once:
            self.fail_once = False
            raise RuntimeError("a handler failed")
        self.changes.append((key, before is not None, now is not None))


@pytest.fixture
def server() -> Server:
    server = Server()
    server.there["a"] = obj("a", 5)
    return server


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def informer(server: Server, told: Told) -> Generator[Informer]:
    informer = Informer(server, "/api/v1/things", told, on_error=told.errors.append)  # type: ignore[arg-type]
    informer.start()
    assert informer.wait_synced(20)
    yield informer
    informer._stopping.set()
    server.streams.put(None)
    informer.stop()
    assert not informer._thread.is_alive()


def names(informer: Informer) -> set[str]:
    return {str(o["metadata"]["name"]) for o in informer}


def test_it_lists_then_follows_from_there(server: Server, told: Told, informer: Informer) -> None:
    server.send("ADDED", "b")
    server.send("MODIFIED", "a", spec=1)
    server.send("DELETED", "b")
    until(lambda: len(told.changes) == 4)
    assert told.changes == [("ns/a", False, True), ("ns/b", False, True), ("ns/a", True, True), ("ns/b", True, False)]
    assert names(informer) == {"a"}
    found = informer.get("ns/a")
    assert found is not None
    assert found["spec"] == 1
    assert "managedFields" not in found["metadata"]
    assert server.calls == [("list", ""), ("watch", "10")]


def test_a_stream_that_ends_or_breaks_is_taken_up_behind_its_last_event(server: Server, informer: Informer) -> None:
    """No event is lost, none comes twice, and nothing is listed again."""
    server.send("ADDED", "b")
    server.streams.put(None)
    until(lambda: len(server.calls) == 3)
    server.send("ADDED", "c")
    server.streams.put(Unreachable("broken", "https://api"))
    until(lambda: len(server.calls) == 4)
    assert server.calls[2:] == [("watch", "11"), ("watch", "12")]
    assert names(informer) == {"a", "b", "c"}
    server.streams.put(Event("BOOKMARK", {"metadata": {"resourceVersion": "99"}}))
    server.streams.put(None)
    until(lambda: len(server.calls) == 5)
    assert server.calls[-1] == ("watch", "99")


def test_a_version_that_is_too_old_means_a_new_listing_with_every_difference_told(
    server: Server, told: Told, informer: Informer
) -> None:
    del server.there["a"]
    server.there["z"] = obj("z", 20)
    server.streams.put(Gone(410, "Expired", "too old"))
    until(lambda: ("ns/z", False, True) in told.changes)
    assert told.changes[1:] == [("ns/a", True, False), ("ns/z", False, True)]
    assert names(informer) == {"z"}


@pytest.mark.parametrize(
    "error",
    [
        Forbidden(403, "Forbidden", "no", "watch", "things", None),
        KubeError(429, "TooManyRequests", "slow down"),
        Gone(410, "Expired", "too old"),
        Unreachable("refused", "https://api"),
    ],
    ids=lambda error: error.reason,
)
def test_a_server_that_refuses_is_not_asked_in_a_hot_loop(
    server: Server, told: Told, informer: Informer, error: KubeError
) -> None:
    """The back-off doubles: within two seconds no more than a handful of requests; then it goes on by itself."""
    server.watch_error = error
    server.streams.put(None)
    until(lambda: len(server.calls) > 3)
    begin, before = time.monotonic(), len(server.calls)
    until(lambda: time.monotonic() - begin > 2 or len(server.calls) > before + 12)
    assert len(server.calls) <= before + 12
    server.watch_error = None
    server.send("ADDED", "later")
    until(lambda: "later" in names(informer))
    until(lambda: informer.error is None)
    if not isinstance(error, Gone):
        assert told.errors


def test_streams_that_end_at_once_are_no_hot_loop_either(server: Server, informer: Informer) -> None:
    for _ in range(200):
        server.streams.put(None)
    begin = time.monotonic()
    until(lambda: time.monotonic() - begin > 1.5)
    assert len(server.calls) < 20
    while not server.streams.empty():
        server.streams.get_nowait()


def test_a_handler_that_fails_is_told_everything_again(server: Server, told: Told, informer: Informer) -> None:
    """Its thread never ends silently."""
    told.fail_once = True
    server.send("ADDED", "b")
    until(lambda: ("ns/b", True, True) in told.changes)
    assert "a handler failed" in told.errors[0]
    assert names(informer) == {"a", "b"}


def test_everything_is_told_again_every_so_often(server: Server, told: Told) -> None:
    informer = Informer(server, "/api/v1/things", told, resync_s=0.05)  # type: ignore[arg-type]
    informer.start()
    for _ in range(2):
        server.streams.put(None)
    until(lambda: told.changes.count(("ns/a", True, True)) >= 1)
    informer._stopping.set()
    server.streams.put(None)
    informer.stop()


def test_last_heard_moves_with_every_sign_of_life_and_stands_still_without(server: Server) -> None:
    clock = [100.0]
    informer = Informer(server, "/x", lambda *_: None, clock=lambda: clock[0])  # type: ignore[arg-type]
    server.list_error = Unreachable("away", "https://api")
    informer.start()
    clock[0] = 200.0
    until(lambda: informer.error is not None)
    assert informer.last_heard == 100.0
    assert not informer.synced
    server.list_error = None
    assert informer.wait_synced(20)
    assert informer.last_heard == 200.0
    clock[0] = 300.0
    server.streams.put(Event("BOOKMARK", {"metadata": {"resourceVersion": "11"}}))
    until(lambda: informer.last_heard == 300.0)
    informer._stopping.set()
    server.streams.put(None)
    informer.stop()


@pytest.mark.parametrize(
    "error",
    [Forbidden(403, "Forbidden", "no", "list", "things", None), NotFound(404, "NotFound", "no such kind")],
    ids=lambda error: error.reason,
)
def test_a_server_that_says_no_is_alive_and_is_asked_until_it_says_yes(server: Server, error: KubeError) -> None:
    """A process that is started again would be told the same: this is nothing that it dies of."""
    clock = [100.0]
    informer = Informer(server, "/x", lambda *_: None, clock=lambda: clock[0])  # type: ignore[arg-type]
    server.list_error = error
    informer.start()
    clock[0] = 1000.0
    until(lambda: informer.last_heard == 1000.0)
    assert informer.refused == str(error)
    assert not informer.synced
    server.list_error = None
    assert informer.wait_synced(20)
    assert informer.refused is None
    informer._stopping.set()
    server.streams.put(None)
    informer.stop()


def test_keys() -> None:
    assert key_of({"metadata": {"namespace": "a", "name": "b"}}) == "a/b"
    assert key_of({"metadata": {"name": "b"}}) == "b"
