"""The pair link over real sockets, for its tests: both sides, a relay between them, a peer that speaks anything."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from tandem.vocabulary import Role
from tandem_worker.link import frames as f
from tandem_worker.link.channel import Channel, FrameEvent, PairKeys, PeerEvent, PeerState, Progress, new_keys
from tandem_worker.link.keys import Endpoint, OwnKeys

RUN, OTHER_RUN = "a" * 32, "b" * 32
DIGEST = b"\0" * 8
KEYS = new_keys()


@dataclass
class Side:
    """One side with all that a test wants to look at."""

    channel: Channel
    events: queue.SimpleQueue[Any]
    progress: Progress
    peer: PeerState
    seen: list[Any] = field(default_factory=list)

    def until(self, wanted: Callable[[Any], bool], timeout: float = 20.0) -> Any:
        """The first event that is wanted, older ones included; fails the test if none comes."""
        for event in self.seen:
            if wanted(event):
                return event
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                break
            self.seen.append(event)
            if wanted(event):
                return event
        raise AssertionError(f"no such event in {timeout} s; last: {self.seen[-5:]}")

    def until_kind(self, kind: str, text: str = "") -> PeerEvent:
        event = self.until(lambda e: isinstance(e, PeerEvent) and e.kind == kind and text in e.detail)
        assert isinstance(event, PeerEvent)
        return event

    def frame(self, timeout: float = 20.0) -> FrameEvent:
        """The next frame that was not seen before."""
        self.seen.clear()
        event = self.until(lambda e: isinstance(e, FrameEvent), timeout)
        assert isinstance(event, FrameEvent)
        return event


@contextmanager
def side(role: Role, endpoint: str, keys: OwnKeys, run: str = RUN, attempt: int = 1, **options: Any) -> Iterator[Side]:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    progress, peer = Progress(), PeerState()
    with Channel(role, endpoint, keys, run, attempt, events, progress, peer, **options) as channel:
        yield Side(channel, events, progress, peer)


@contextmanager
def pair(
    keys: PairKeys = KEYS, via: Callable[[int], int] = lambda port: port, **options: Any
) -> Iterator[tuple[Side, Side]]:
    """Both sides, attached; ``via`` maps the reference's port to the one that the suspect is told."""
    with side(Role.REFERENCE, "tcp://127.0.0.1:0", keys.reference, **options) as reference:
        port = via(Endpoint.parse(reference.channel.endpoint).port)
        with side(Role.SUSPECT, f"tcp://127.0.0.1:{port}", keys.suspect, **options) as suspect:
            suspect.until_kind("connected")
            reference.until_kind("connected")
            yield reference, suspect


def digests(op: int) -> f.Digests:
    return f.Digests(1, op, 0, DIGEST)


class Proxy:
    """A TCP relay that can break its connections, or go on accepting and swallow everything."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.target = 0
        self.blackhole = False
        self.connections = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self.connections += 1
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self.blackhole:
                    sink.sendall(data)
        except OSError:
            pass
        for each in (source, sink):
            if not self.blackhole:
                self._kill(each)

    @staticmethod
    def _kill(each: socket.socket) -> None:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def cut(self) -> None:
        """Break all connections; new ones are welcome."""
        while self._sockets:
            self._kill(self._sockets.pop())

    def close(self) -> None:
        self._kill(self._listener)
        self.blackhole = False
        self.cut()


def through(proxy: Proxy) -> Callable[[int], int]:
    def via(port: int) -> int:
        proxy.target = port
        return proxy.port

    return via


def wait_for(condition: Callable[[], object], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.005)


def works(reference: Side, suspect: Side) -> None:
    suspect.channel.send(f.Ready(42))
    reference.until(lambda e: isinstance(e, FrameEvent) and isinstance(e.frame, f.Ready) and e.frame.step == 42)


def raw(endpoint: str, keys: OwnKeys | None) -> zmq.Socket[bytes]:
    """A peer that speaks ZeroMQ, but not necessarily sense."""
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    made.linger = 0
    if keys is not None:
        made.curve_serverkey = keys.peer_public.encode()
        made.curve_publickey, made.curve_secretkey = keys.public.encode(), keys.secret.encode()
    made.connect(endpoint)
    return made


def head(frame: f.Frame, run: str = RUN, attempt: int = 1, seq: int = 0) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(frame, run=run, attempt=attempt, seq=seq))


ATTACH = f.Attach(f.PROTOCOL, "raw", 0)


def answer(peer: zmq.Socket[bytes]) -> f.Frame:
    """What it is answered, heartbeats and acknowledgements aside."""
    while True:
        assert peer.poll(20_000), "no answer"
        frame = f.decode(peer.recv_multipart())
        if not isinstance(frame, f.Heartbeat | f.Ack):
            return frame
