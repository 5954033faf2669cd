"""The pair link over real sockets: order, tensors, reconnects, refusals, hostile peers."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq

from tandem.errors import LinkError, SetupError
from tandem.vocabulary import Role
from tandem_worker.link import frames as f
from tandem_worker.link.channel import (
    Channel,
    FrameEvent,
    LinkLimits,
    PairKeys,
    PeerEvent,
    PeerState,
    Progress,
    new_keys,
)
from tandem_worker.link.keys import Endpoint, OwnKeys
from tandem_worker.link.tensors import pack

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


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


def through(proxy: Proxy) -> Callable[[int], int]:
    def via(port: int) -> int:
        proxy.target = port
        return proxy.port

    return via


# ---- what it carries ----


def test_frames_keep_their_order_both_ways() -> None:
    count = 3000
    with pair() as (reference, suspect):
        senders = [
            threading.Thread(target=lambda s=s: [s.channel.send(digests(op)) for op in range(count)])  # type: ignore[misc]
            for s in (reference, suspect)
        ]
        for sender in senders:
            sender.start()
        for receiver in (reference, suspect):
            for op in range(count):
                got = receiver.frame().frame
                assert isinstance(got, f.Digests)
                assert (got.op, got.run, got.attempt, got.seq) == (op, RUN, 1, op + 1)
        for sender in senders:
            sender.join()
        assert reference.channel.invalid_frames == suspect.channel.invalid_frames == 0


def test_a_large_tensor_arrives_whole_and_heartbeats_pass_it() -> None:
    array = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8).view(np.float32).reshape(1024, -1)
    with pair() as (reference, suspect):
        suspect.channel.send(f.Tensor(1, 2, 0, "full", 0, 1, "float32", list(array.shape), DIGEST), pack(array))
        suspect.channel.send(digests(3))
        event = reference.frame(60)
        assert isinstance(event.frame, f.Tensor)
        assert event.payload is not None
        assert event.payload.dtype == np.float32
        assert event.payload.shape == array.shape
        assert event.payload.tobytes() == array.tobytes()
        assert isinstance(reference.frame().frame, f.Digests)
        assert suspect.channel.drained(10)
        assert array.nbytes < suspect.channel.bytes_sent < array.nbytes * 1.001
        assert abs(reference.channel.bytes_received - suspect.channel.bytes_sent) < 2000


def test_bfloat16_scalars_and_empty_tensors() -> None:
    import ml_dtypes

    with pair() as (reference, suspect):
        for array in (np.array([1.5, -0.0], ml_dtypes.bfloat16), np.float32(3).reshape(()), np.zeros((0, 4), np.int8)):
            frame = f.Tensor(1, 2, 0, "input", 0, 1, str(array.dtype), list(array.shape), DIGEST)
            reference.channel.send(frame, pack(array))
            got = suspect.frame().payload
            assert got is not None
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_payload_must_fit_its_frame() -> None:
    with pair() as (_, suspect):
        tensor = f.Tensor(1, 2, 0, "input", 0, 1, "uint8", [3], DIGEST)
        for frame, payload in [(tensor, None), (tensor, memoryview(b"1234")), (f.Ready(1), memoryview(b"123"))]:
            with pytest.raises(ValueError, match="payload"):
                suspect.channel.send(frame, payload)
        with pytest.raises(f.FrameError):
            suspect.channel.send(f.Ready(-1))
        suspect.channel.send(f.Ready(1))  # nothing of it took a number


def test_heartbeats_tell_progress_and_are_not_events() -> None:
    with pair(limits=LinkLimits(heartbeat_s=0.02)) as (reference, suspect):
        suspect.progress.begin_step(7)
        counter = suspect.progress.look().counter
        wait_for(lambda: reference.peer.look().step == 7 and reference.peer.look().counter == counter)
        with suspect.progress.waiting():
            wait_for(lambda: reference.peer.look().activity == "waiting")
        assert reference.events.empty()


def wait_for(condition: Callable[[], object], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.005)


def test_added_delay_keeps_order_and_pipelines() -> None:
    delay, count = 0.1, 200
    with pair(delay_s=delay) as (reference, suspect):
        started = time.monotonic()
        for op in range(count):
            suspect.channel.send(digests(op))
        sent = time.monotonic() - started
        for op in range(count):
            got = reference.frame().frame
            assert isinstance(got, f.Digests)
            assert got.op == op
            if op == 0:
                assert time.monotonic() - started >= delay
        assert sent < delay * count / 10
        assert time.monotonic() - started < delay * count / 4


def test_back_pressure_waits_for_the_peer_and_reads_as_waiting() -> None:
    limits = LinkLimits(unacked_frames=50, queued_events=50)
    with pair(limits=limits) as (reference, suspect):
        total = 1000
        sender = threading.Thread(target=lambda: [suspect.channel.send(digests(op)) for op in range(total)])
        sender.start()
        wait_for(lambda: suspect.progress.look().activity == "waiting")
        assert reference.events.qsize() < 250
        got = [reference.frame().frame for _ in range(total)]
        assert [frame.op for frame in got if isinstance(frame, f.Digests)] == list(range(total))
        sender.join(10)
        assert not sender.is_alive()


def test_a_goodbye_is_no_death() -> None:
    with pair() as (reference, suspect):
        suspect.channel.say_bye("hung_step")
        got = reference.frame().frame
        assert isinstance(got, f.Bye)
        assert got.reason == "hung_step"
        assert reference.peer.look().left == "hung_step"


# ---- connections ----


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


# ---- who is turned away ----


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
    import msgspec

    return msgspec.msgpack.encode(msgspec.structs.replace(frame, run=run, attempt=attempt, seq=seq))


ATTACH = f.Attach(f.PROTOCOL, "raw", 0)


def answer(peer: zmq.Socket[bytes]) -> f.Frame:
    """What it is answered, heartbeats and acknowledgements aside."""
    while True:
        assert peer.poll(20_000), "no answer"
        frame = f.decode(peer.recv_multipart())
        if not isinstance(frame, f.Heartbeat | f.Ack):
            return frame


def works(reference: Side, suspect: Side) -> None:
    suspect.channel.send(f.Ready(42))
    reference.until(lambda e: isinstance(e, FrameEvent) and isinstance(e.frame, f.Ready) and e.frame.step == 42)


def test_keys_are_fresh_and_secret() -> None:
    assert len({new_keys().suspect_secret, new_keys().suspect_secret, KEYS.reference_secret}) == 3
    for shown in (repr(KEYS), repr(KEYS.suspect)):
        assert KEYS.suspect_secret not in shown
        assert KEYS.reference_secret not in shown


@pytest.mark.parametrize("who", ["other key", "plaintext", "wrong server key"])
def test_strangers_never_get_in(who: str) -> None:
    other = new_keys()
    keys = {
        "other key": OwnKeys(other.suspect_public, other.suspect_secret, KEYS.reference_public),
        "wrong server key": OwnKeys(KEYS.suspect_public, KEYS.suspect_secret, other.reference_public),
        "plaintext": None,
    }[who]
    with pair() as (reference, suspect), raw(reference.channel.endpoint, keys) as stranger:
        stranger.send(head(ATTACH))
        stranger.send(b"garbage" * 100)
        reference.until_kind("refused", "turned away")
        assert not stranger.poll(200)
        assert reference.channel.invalid_frames == 0
        works(reference, suspect)


def test_a_suspect_with_other_keys_learns_why() -> None:
    with (
        side(Role.REFERENCE, "tcp://127.0.0.1:0", KEYS.reference) as reference,
        side(
            Role.SUSPECT,
            reference.channel.endpoint,
            OwnKeys(*[k.decode() for k in zmq.curve_keypair()], KEYS.reference_public),
        ) as s,
    ):
        s.until_kind("refused", "its key was not accepted")
        reference.until_kind("refused", "its key is not this attempt's")
        assert not reference.peer.look().ever


@pytest.mark.parametrize(
    ("run", "attempt", "reason", "words"),
    [
        (OTHER_RUN, 1, "stale_run", OTHER_RUN),
        (RUN, 0, "stale_attempt", "attempt 0"),
        (RUN, 2, "stale_attempt", "attempt 2"),
    ],
)
def test_a_stale_peer_is_refused_by_name(run: str, attempt: int, reason: str, words: str) -> None:
    with (
        side(Role.REFERENCE, "tcp://127.0.0.1:0", KEYS.reference) as reference,
        side(Role.SUSPECT, reference.channel.endpoint, KEYS.suspect, run, attempt) as stale,
    ):
        event = stale.until_kind("refused")
        assert event.error is not None
        assert event.error.reason == reason
        assert words in event.detail
        assert reference.until_kind("refused", words).error is None
        with pytest.raises(LinkError, match=words):
            stale.channel.send(f.Ready(1))
        with side(Role.SUSPECT, reference.channel.endpoint, KEYS.suspect) as good:
            works(reference, good)


def test_a_second_worker_is_refused_and_the_first_goes_on() -> None:
    with pair() as (reference, suspect), side(Role.SUSPECT, reference.channel.endpoint, KEYS.suspect) as second:
        event = second.until_kind("refused")
        assert event.error is not None
        assert event.error.reason == "second_peer"
        reference.until_kind("refused", "second worker")
        works(reference, suspect)


def test_a_restarted_reference_is_noticed(proxy: Proxy) -> None:
    with side(Role.SUSPECT, f"tcp://127.0.0.1:{proxy.port}", KEYS.suspect) as suspect:
        with side(Role.REFERENCE, "tcp://127.0.0.1:0", KEYS.reference) as first:
            proxy.target = Endpoint.parse(first.channel.endpoint).port
            suspect.until_kind("connected")
        with side(Role.REFERENCE, "tcp://127.0.0.1:0", KEYS.reference) as second:
            proxy.target = Endpoint.parse(second.channel.endpoint).port
            event = suspect.until(lambda e: isinstance(e, PeerEvent) and e.error is not None)
            assert event.error.reason == "peer_restarted"


def test_another_protocol_is_refused_by_name() -> None:
    with (
        side(Role.REFERENCE, "tcp://127.0.0.1:0", KEYS.reference) as reference,
        raw(reference.channel.endpoint, KEYS.suspect) as peer,
    ):
        peer.send(head(f.Attach(f.PROTOCOL + 1, "raw", 0)))
        refusal = answer(peer)
        assert isinstance(refusal, f.Refuse)
        assert refusal.reason == "protocol"


def garbage(rng: random.Random) -> list[bytes]:
    """One message of nonsense: bytes, cut or flipped frames, replays, other attempts, too many parts, too large."""
    frame = head(
        rng.choice([ATTACH, digests(1), f.Ack(10**6), f.Bye("x"), f.Heartbeat(0, 0, 0, "?", 0)]),
        seq=rng.choice([0, 1, 9]),
    )
    flipped = bytearray(frame)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return rng.choice([
        [rng.randbytes(rng.randrange(300))],
        [frame[: rng.randrange(len(frame))]],
        [bytes(flipped)],
        [frame, rng.randbytes(10)],
        [b""] * rng.randrange(1, 9),
        [head(digests(1), attempt=7, seq=1)],
        [head(f.Chunk(0), seq=1), b"x"],
        [head(f.Tensor(1, 1, 0, "full", 0, 0, "uint8", [2**39], DIGEST), seq=1), bytes(f.CHUNK)],
    ])  # fmt: skip


def test_garbage_from_a_peer_that_is_not_attached_changes_nothing() -> None:
    rng = random.Random(2)
    with pair() as (reference, suspect), raw(reference.channel.endpoint, KEYS.suspect) as hostile:
        for _ in range(500):
            hostile.send_multipart(garbage(rng))
        hostile.send(head(ATTACH))
        assert isinstance(answer(hostile), f.Refuse)
        works(reference, suspect)
        assert reference.channel.error is None
        assert reference.channel.invalid_frames == 0
        wait_for(lambda: reference.peer.look().left == "")


@pytest.mark.parametrize("seed", range(3))
def test_garbage_from_the_attached_peer_gets_it_refused_by_name(seed: int) -> None:
    rng = random.Random(seed)
    with (
        side(Role.REFERENCE, "tcp://127.0.0.1:0", KEYS.reference) as reference,
        raw(reference.channel.endpoint, KEYS.suspect) as hostile,
    ):
        hostile.send(head(ATTACH))
        assert isinstance(answer(hostile), f.Attached)
        for _ in range(300):
            hostile.send_multipart(garbage(rng))
        event = reference.until(lambda e: isinstance(e, PeerEvent) and e.error is not None)
        assert event.error.reason == "hostile_peer"
        assert reference.channel.invalid_frames == LinkLimits().invalid_frames
        with pytest.raises(LinkError, match="invalid frames"):
            reference.channel.send(f.Ready(1))
        reported = [e for e in reference.seen if isinstance(e, PeerEvent) and e.kind == "invalid"]
        assert 1 <= len(reported) <= 3
        while not isinstance(refusal := answer(hostile), f.Refuse):
            pass
        assert refusal.reason == "hostile_peer"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([[head(f.Ready(1), seq=1)], [head(f.Ready(1), seq=1)]], "replayed"),
        ([[head(f.Ready(1), seq=2)]], "out of order"),
        ([[head(f.Ready(1), seq=1, attempt=0)]], "attempt 0"),
        ([[head(f.Ready(1), seq=1, run=OTHER_RUN)]], OTHER_RUN),
        ([[head(f.Ready(1))]], "without a number"),
        ([[head(f.Heartbeat(5, 0, 0, "computing", 0))]] * 2, "replayed"),
        ([[head(f.Ack(1))]], "last one sent"),
        ([[head(f.Attached(1, "x", 0))]], "without a number"),
        ([[head(f.Refuse("no", "", ""))]], "without a number"),
        ([[head(ATTACH)]], "without a number"),
        ([[head(f.Chunk(0), seq=1), b"x"]], "chunk without a tensor"),
        ([[head(f.Tensor(1, 1, 0, "full", 0, 0, "uint8", [2**39], DIGEST), seq=1), bytes(f.CHUNK)]], "limit"),
        (
            [
                [head(f.Tensor(1, 1, 0, "full", 0, 0, "uint8", [2 * f.CHUNK], DIGEST), seq=1), bytes(f.CHUNK)],
                [head(f.Ready(1), seq=2)],
            ],
            "inside a tensor",
        ),
        ([[head(f.Close("x", -1), seq=1)]], ">= 0"),
    ],
)
def test_every_kind_of_invalid_frame_is_dropped_by_name(messages: list[list[bytes]], why: str) -> None:
    with (
        side(Role.REFERENCE, "tcp://127.0.0.1:0", KEYS.reference) as reference,
        raw(reference.channel.endpoint, KEYS.suspect) as peer,
    ):
        peer.send(head(ATTACH))
        assert isinstance(answer(peer), f.Attached)
        for message in messages:
            peer.send_multipart(message)
        event = reference.until_kind("invalid")
        assert why in event.detail
        assert event.error is None
        assert reference.channel.invalid_frames == 1


def test_an_oversized_message_breaks_its_own_connection_only() -> None:
    with pair() as (reference, suspect), raw(reference.channel.endpoint, KEYS.suspect) as hostile:
        hostile.send(head(ATTACH))
        assert isinstance(answer(hostile), f.Refuse)
        with hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            hostile.send(bytes(4 * f.CHUNK))
            assert monitor.poll(20_000), "the connection of the oversized message stayed"
            hostile.disable_monitor()
        works(reference, suspect)
        assert reference.channel.bytes_received < f.CHUNK


def test_closing_is_bounded_when_the_peer_is_gone(proxy: Proxy) -> None:
    with ExitStack() as stack:
        _, suspect = stack.enter_context(pair(via=through(proxy)))
        proxy.blackhole = True
        suspect.channel.send(f.Ready(1))
        started = time.monotonic()
        suspect.channel.close(linger_s=0.5)
        assert time.monotonic() - started < 3
