"""Peers that die, stop or fall silent, as processes: each ends in its own named reason, within a bounded time."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tandem.vocabulary import Role
from tandem_worker.link.channel import Channel, LinkLimits, PeerEvent, PeerState, Progress, new_keys
from tandem_worker.link.keys import Endpoint
from tandem_worker.watchdog import Limits, Reason, Trip, Watchdog

RUN = "c" * 32
LINK = LinkLimits(heartbeat_s=0.1, peer_timeout_s=2.0)
LIMITS = Limits(step_timeout=2.0, peer_timeout=2.0, start_timeout=20.0, reconnect_grace=1.0, grace=30.0)
BOUND_S = 30.0
"""Generous, for a busy machine; the limits above add up to a few seconds."""

SUSPECT = """
import queue, sys, time
from tandem.vocabulary import Role
from tandem_worker.link.channel import Channel, LinkLimits, OwnKeys, PeerState, Progress
from tandem_worker.link.frames import Bye
endpoint, run, public, secret, peer_public, behaviour = sys.argv[1:]
progress, peer = Progress(), PeerState()
link = LinkLimits(heartbeat_s=0.1, peer_timeout_s=2.0)
keys = OwnKeys(public, secret, peer_public)
channel = Channel(Role.SUSPECT, endpoint, keys, run, 1, queue.SimpleQueue(), progress, peer, limits=link).start()
while not peer.look().connected:
    time.sleep(0.01)
progress.begin_step(1)
while behaviour == "works":
    progress.touch()
    time.sleep(0.02)
if behaviour == "leaves":
    channel.send(Bye("completed"))
    channel.close()
    sys.exit(0)
time.sleep(600)  # hangs, its link's thread alive
"""


class Scene:
    """A reference with its watchdog in this process, a suspect as another one."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.progress, self.peer, self.keys = Progress(), PeerState(), new_keys()
        self.tripped = threading.Event()
        self.trips: list[Trip] = []
        self.channel = Channel(
            Role.REFERENCE, "tcp://127.0.0.1:0", self.keys.reference, RUN, 1, self.events, self.progress, self.peer,
            limits=LINK,
        )  # fmt: skip
        self.dog = Watchdog(self.progress, self.peer, LIMITS, self._trip, end=lambda: None, interval=0.1)
        self.process: subprocess.Popen[bytes] | None = None

    def _trip(self, trip: Trip) -> bool:
        self.trips.append(trip)
        self.tripped.set()
        return True

    def suspect(self, behaviour: str, port: int | None = None) -> int:
        """Start the suspect and wait until it is attached; its process id."""
        port = port or Endpoint.parse(self.channel.endpoint).port
        keys = self.keys.suspect
        arguments = [f"tcp://127.0.0.1:{port}", RUN, keys.public, keys.secret, keys.peer_public, behaviour]
        self.process = subprocess.Popen([sys.executable, "-c", SUSPECT, *arguments])
        while True:
            event = self.events.get(timeout=60)
            if isinstance(event, PeerEvent) and event.kind == "connected":
                break
        self.progress.begin_step(1)
        self.progress.enter(self.progress.look().activity.WAITING)
        self.dog.start()
        return self.process.pid

    def reason(self) -> Reason:
        assert self.tripped.wait(BOUND_S), "the watchdog did not trip"
        return self.trips[0].reason


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    scene.channel.start()
    yield scene
    scene.dog.stop()
    if scene.process is not None:
        scene.process.kill()
        scene.process.wait()
    scene.channel.close(0.1)


def test_a_working_peer_trips_nothing(scene: Scene) -> None:
    scene.suspect("works")
    assert not scene.tripped.wait(2 * LIMITS.step_timeout)


def test_killed(scene: Scene) -> None:
    os.kill(scene.suspect("works"), signal.SIGKILL)
    assert scene.reason() is Reason.DEAD_PEER


def test_stopped(scene: Scene) -> None:
    os.kill(scene.suspect("works"), signal.SIGSTOP)
    assert scene.reason() is Reason.HALF_OPEN_LINK


def test_a_short_stop_is_survived(scene: Scene) -> None:
    pid = scene.suspect("works")
    os.kill(pid, signal.SIGSTOP)
    assert not scene.tripped.wait(LIMITS.peer_timeout / 2)
    os.kill(pid, signal.SIGCONT)
    assert not scene.tripped.wait(2 * LIMITS.peer_timeout)


def test_hung_but_heard(scene: Scene) -> None:
    scene.suspect("hangs")
    assert scene.reason() is Reason.PEER_HUNG


def test_left_in_good_order(scene: Scene) -> None:
    scene.suspect("leaves")
    scene.progress.enter(scene.progress.look().activity.FINISHED)
    assert not scene.tripped.wait(2 * LIMITS.reconnect_grace)
    assert scene.peer.look().left == "completed"


def test_never_came() -> None:
    trips: queue.SimpleQueue[Trip] = queue.SimpleQueue()
    progress = Progress()
    with Watchdog(progress, PeerState(), Limits(start_timeout=0.3), trips.put, end=lambda: None, interval=0.05):
        progress.begin_step(0)
        assert trips.get(timeout=BOUND_S).reason is Reason.NO_PEER


@contextmanager
def swallowing_proxy(target: int) -> Iterator[tuple[int, threading.Event]]:
    """A relay that, once told to, reads on and forwards nothing: a half-open link."""
    swallow = threading.Event()
    sockets = [socket.create_server(("127.0.0.1", 0))]

    def relay(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not swallow.is_set():
                    sink.sendall(data)
        except OSError:
            return

    def accept() -> None:
        while True:
            try:
                near, _ = sockets[0].accept()
                far = socket.create_connection(("127.0.0.1", target))
            except OSError:
                return
            sockets.extend((near, far))
            threading.Thread(target=relay, args=(near, far), daemon=True).start()
            threading.Thread(target=relay, args=(far, near), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield sockets[0].getsockname()[1], swallow
    finally:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_swallowed(scene: Scene) -> None:
    with swallowing_proxy(Endpoint.parse(scene.channel.endpoint).port) as (port, swallow):
        scene.suspect("works", port)
        silent_from = time.monotonic()
        swallow.set()
        assert scene.reason() is Reason.HALF_OPEN_LINK
        assert time.monotonic() - silent_from >= LIMITS.peer_timeout - LINK.heartbeat_s - 0.2
