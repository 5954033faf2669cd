"""The pair link over real sockets: who is turned away, by which name, and that nobody else notices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from links import ATTACH, DIGEST, KEYS, OTHER_RUN, RUN, Proxy, answer, digests, head, pair, raw, side, wait_for, works
from tandem.errors import LinkError
from tandem.vocabulary import Role
from tandem_worker.link import frames as f
from tandem_worker.link.channel import LinkLimits, PeerEvent, new_keys
from tandem_worker.link.keys import Endpoint, OwnKeys


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with closing(Proxy()) as relay:
        yield relay


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
