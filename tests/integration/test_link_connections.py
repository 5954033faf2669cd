"""The pair link over real sockets: connections that come late, break, go silent or cannot be made."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from links import DIGEST, KEYS, RUN, Proxy, Side, digests, pair, side, through, wait_for, works
from tandem.errors import SetupError
from tandem.vocabulary import Role
from tandem_worker.link import frames as f
from tandem_worker.link.channel import LinkLimits
from tandem_worker.link.tensors import pack


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with closing(Proxy()) as relay:
        yield relay


def test_a_suspect_may_start_first_and_the_reference_late() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with side(Role.SUSPECT, f"tcp://localhost:{port}", KEYS.suspect) as suspect:
        suspect.channel.send(digests(1))
        with side(Role.REFERENCE, f"tcp://*:{port}", KEYS.reference) as reference:
            assert reference.frame().frame == f.Digests(1, 1, 0, DIGEST, run=RUN, attempt=1, seq=1)


def test_ipv6() -> None:
    with ExitStack() as stack:
        try:
            reference = stack.enter_context(side(Role.REFERENCE, "tcp://[::1]:0", KEYS.reference))
        except SetupError:
            pytest.skip("this machine has no IPv6")
        suspect = stack.enter_context(side(Role.SUSPECT, reference.channel.endpoint, KEYS.suspect))
        works(reference, suspect)


def test_a_used_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} of 127.0.0.1 is in use: ") as error:
            side(Role.REFERENCE, f"tcp://127.0.0.1:{port}", KEYS.reference).__enter__()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/x", "tcp://1.2.3.4", "tcp://h:70000", "", "tcp://a b:1", "tcp://::1:5"]
)
def test_bad_endpoints_are_one_line(endpoint: str) -> None:
    for role, keys in ((Role.REFERENCE, KEYS.reference), (Role.SUSPECT, KEYS.suspect)):
        with pytest.raises(SetupError, match="tcp://HOST:PORT"):
            side(role, endpoint, keys).__enter__()


def test_an_address_of_another_machine_is_one_line() -> None:
    with pytest.raises(SetupError, match="cannot listen"):
        side(Role.REFERENCE, "tcp://192.0.2.1:0", KEYS.reference).__enter__()


def test_reconnects_lose_and_double_nothing(proxy: Proxy) -> None:
    """Connections break at random moments while both sides send frames and tensors."""
    rng, count = random.Random(1), 1500
    array = np.arange(3 << 18, dtype=np.float32)
    tensor = f.Tensor(1, 2, 0, "full", 0, 1, "float32", [array.size], DIGEST)
    with pair(via=through(proxy)) as (reference, suspect):

        def talk(one: Side) -> None:
            for op in range(count):
                one.channel.send(digests(op))
                if op % 300 == 0:
                    one.channel.send(tensor, pack(array))

        senders = [threading.Thread(target=talk, args=(s,)) for s in (reference, suspect)]
        for sender in senders:
            sender.start()
        done = threading.Event()

        def breaks() -> None:
            while not done.wait(rng.uniform(0.05, 0.4)):
                proxy.cut()

        breaker = threading.Thread(target=breaks)
        breaker.start()
        wait_for(lambda: proxy.connections > 3)
        done.set()
        breaker.join()
        for receiver in (reference, suspect):
            ops = []
            while len(ops) < count:
                event = receiver.frame(60)
                if isinstance(event.frame, f.Digests):
                    ops.append(event.frame.op)
                else:
                    assert event.payload is not None
                    assert event.payload.tobytes() == array.tobytes()
            assert ops == list(range(count))
        for sender in senders:
            sender.join()
        assert reference.channel.invalid_frames == suspect.channel.invalid_frames == 0
        assert reference.channel.error is suspect.channel.error is None


def test_a_lost_connection_is_told_and_comes_back(proxy: Proxy) -> None:
    with pair(via=through(proxy)) as (reference, suspect):
        proxy.cut()
        for one in (reference, suspect):
            one.until_kind("disconnected")
            one.until_kind("connected", "again")
            assert one.peer.look().connected


def test_silence_is_not_a_closed_connection(proxy: Proxy) -> None:
    with pair(via=through(proxy), limits=LinkLimits(heartbeat_s=0.05, peer_timeout_s=0.6)) as (reference, suspect):
        proxy.blackhole = True
        for one in (reference, suspect):
            wait_for(lambda one=one: time.monotonic() - one.peer.look().frame_at > 0.6)  # type: ignore[misc]
            assert one.peer.look().connected
        proxy.blackhole = False
        proxy.cut()
        for one in (reference, suspect):
            one.until_kind("connected", "again")


def test_closing_is_bounded_when_the_peer_is_gone(proxy: Proxy) -> None:
    with ExitStack() as stack:
        _, suspect = stack.enter_context(pair(via=through(proxy)))
        proxy.blackhole = True
        suspect.channel.send(f.Ready(1))
        started = time.monotonic()
        suspect.channel.close(linger_s=0.5)
        assert time.monotonic() - started < 3
