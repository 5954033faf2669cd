"""The pair link over real sockets: what it carries, in which order, and what it waits for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from links import DIGEST, RUN, digests, pair, wait_for
from tandem_worker.link import frames as f
from tandem_worker.link.channel import LinkLimits
from tandem_worker.link.tensors import pack


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
