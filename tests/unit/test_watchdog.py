"""The watchdog's judgement as a table, and its thread with a clock of our own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem.vocabulary import POD_EXIT_INCONCLUSIVE
from tandem_worker.link.state import Activity, Own, Peer, PeerState, Progress
from tandem_worker.watchdog import Limits, Reason, Trip, Watchdog, judge

NOW = 10_000.0
LIMITS = Limits(
    step_timeout=100, peer_timeout=20, start_timeout=1000, reconnect_grace=10, slow_factor=20, slow_floor=300, grace=1
)
OWN = Own(5, Activity.COMPUTING, 3, touched_at=NOW, step_at=NOW, aside_s=0, longest_step_s=2, what="")
PEER = Peer(
    0.0, connected=True, ever=True, frame_at=NOW, counter_at=NOW, step=3, step_at=NOW, activity=Activity.COMPUTING
)
WAITING = replace(OWN, activity=Activity.WAITING)


def own(**changes: object) -> Own:
    return replace(OWN, **changes)  # type: ignore[arg-type]


def waiting(**changes: object) -> Own:
    return replace(WAITING, **changes)  # type: ignore[arg-type]


def peer(**changes: object) -> Peer:
    return replace(PEER, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "peer", "reason"),
    [
        (OWN, PEER, None),
        (WAITING, PEER, None),
        # this side's main thread
        (own(touched_at=NOW - 99), PEER, None),
        (own(touched_at=NOW - 101), PEER, Reason.HUNG_STEP),
        (own(touched_at=NOW - 101, activity=Activity.REPLAYING), PEER, Reason.HUNG_STEP),
        (own(touched_at=NOW - 101, activity=Activity.STARTING), PEER, None),
        (own(touched_at=NOW - 1001, activity=Activity.STARTING), PEER, Reason.HUNG_STEP),
        (own(touched_at=NOW - 5000, activity=Activity.FINISHED), peer(frame_at=0, counter_at=0), None),
        (own(touched_at=NOW - 101), peer(connected=False, lost_at=NOW - 11), Reason.HUNG_STEP),
        # waiting is no hang of one's own, for replays of the peer neither
        (waiting(touched_at=NOW - 5000), PEER, None),
        (waiting(touched_at=NOW - 5000), peer(activity=Activity.REPLAYING), None),
        # the connection
        (own(), peer(connected=False, ever=False, started_at=NOW - 999), None),
        (own(), peer(connected=False, ever=False, started_at=NOW - 1001), Reason.NO_PEER),
        (own(), peer(connected=False, lost_at=NOW - 9), None),
        (own(), peer(connected=False, lost_at=NOW - 11), Reason.DEAD_PEER),
        (own(), peer(frame_at=NOW - 19), None),
        (own(), peer(frame_at=NOW - 21, counter_at=NOW - 21), Reason.HALF_OPEN_LINK),
        (waiting(), peer(frame_at=NOW - 21), Reason.HALF_OPEN_LINK),
        # the peer's main thread
        (waiting(), peer(counter_at=NOW - 119), None),
        (waiting(), peer(counter_at=NOW - 121), Reason.PEER_HUNG),
        (own(), peer(counter_at=NOW - 121), Reason.PEER_HUNG),
        (waiting(), peer(counter_at=NOW - 121, activity=Activity.REPLAYING), Reason.PEER_HUNG),
        (waiting(), peer(counter_at=NOW - 121, activity=Activity.STARTING), None),
        (waiting(), peer(counter_at=NOW - 1021, activity=Activity.STARTING), Reason.PEER_HUNG),
        (waiting(), peer(counter_at=NOW - 5000, activity=Activity.FINISHED), None),
        (own(), peer(counter_at=NOW - 5000, activity=Activity.WAITING), None),
        # each waits for the other
        (waiting(touched_at=NOW - 99), peer(counter_at=NOW - 101, activity=Activity.WAITING), None),
        (waiting(touched_at=NOW - 101), peer(counter_at=NOW - 101, activity=Activity.WAITING), Reason.DEADLOCK),
        # a slow step
        (waiting(step_at=NOW - 299), PEER, None),
        (waiting(step_at=NOW - 301), PEER, Reason.SLOW_PEER),
        (waiting(step_at=NOW - 301, step=0), PEER, None),
        (own(step_at=NOW - 301), PEER, None),
        (waiting(step_at=NOW - 301, aside_s=20), PEER, None),
        (waiting(step_at=NOW - 301), peer(aside_s=20), None),
        (waiting(step_at=NOW - 301, longest_step_s=16), PEER, None),
        (waiting(step_at=NOW - 321, longest_step_s=16), PEER, Reason.SLOW_PEER),
        (waiting(step_at=NOW - 301, longest_step_s=0), PEER, Reason.SLOW_PEER),
        # after a goodbye nothing of it is missed, but nobody waits for ever
        (own(), peer(connected=False, lost_at=0, left="completed"), None),
        (waiting(touched_at=NOW - 101), peer(left="hung_step"), Reason.DEAD_PEER),
    ],
)
def test_judgement(own: Own, peer: Peer, reason: Reason | None) -> None:
    trip = judge(NOW, own, peer, LIMITS)
    assert (trip.reason if trip else None) is reason
    assert trip is None or (trip.detail and "\n" not in trip.detail)


AGES = st.floats(0, 20_000)


@given(st.sampled_from(Activity), st.sampled_from(Activity), AGES, AGES, AGES, AGES, st.booleans(), st.booleans())
def test_every_standstill_ends(
    mine: Activity, its: Activity, a: float, b: float, c: float, d: float, connected: bool, ever: bool
) -> None:
    """Whatever the two sides claim to do: if nothing moves, there is a trip, unless one has finished."""
    me = own(activity=mine, touched_at=-a, step_at=-b)
    it = peer(activity=its, connected=connected and ever, ever=ever, lost_at=-c, frame_at=-d, counter_at=-c)
    assert mine is Activity.FINISHED or its is Activity.FINISHED or judge(NOW, me, it, LIMITS) is not None


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_progress_counts_and_names() -> None:
    clock = FakeClock()
    progress = Progress(clock)
    assert progress.look().activity is Activity.STARTING
    progress.begin_step(4)
    clock.now += 5
    with progress.waiting("digests"):
        assert (progress.look().activity, progress.look().what) == (Activity.WAITING, "digests")
        clock.now += 5
        progress.touch()
    assert (progress.look().activity, progress.look().what) == (Activity.COMPUTING, "step 4")
    with progress.during(Activity.REPLAYING):
        for _ in range(3):
            clock.now += 7
            assert progress.look().aside_s % 7 == 0
            progress.touch()
    clock.now += 1
    look = progress.look()
    assert (look.aside_s, look.step_at, look.touched_at) == (21, 1000, clock.now - 1)
    progress.end_step(2.5)
    progress.begin_step(5)
    assert (progress.look().longest_step_s, progress.look().aside_s) == (2.5, 0)
    counters = [progress.look().counter]
    progress.touch()
    counters.append(progress.look().counter)
    assert counters[0] < counters[1]


def test_the_peers_replays_are_taken_off_its_step() -> None:
    clock = FakeClock()
    state = PeerState(clock)
    state.connected()
    for activity in ("computing", "replaying", "replaying", "waiting", "waiting"):
        clock.now += 3
        state.heartbeat(1, 1, activity)
        clock.now += 1
        state.heard()
    assert state.look().aside_s == 8
    state.heartbeat(1, 2, "what is this?")
    assert (state.look().aside_s, state.look().activity) == (0, Activity.COMPUTING)


def test_suspension_is_nobodys_fault() -> None:
    clock = FakeClock()
    progress, state = Progress(clock), PeerState(clock)
    state.connected()
    progress.begin_step(1)
    clock.now += 5000
    progress.excuse(4999)
    state.excuse(5001)
    assert progress.look().touched_at == clock.now - 1
    assert state.look().frame_at == clock.now
    assert judge(clock.now, progress.look(), state.look(), LIMITS) is None


# ---- the thread ----


class Ended:
    def __init__(self) -> None:
        self.at: float | None = None
        self.happened = threading.Event()

    def __call__(self) -> None:
        self.at = time.monotonic()
        self.happened.set()


def watch(on_trip: Callable[[Trip], bool | None], end: Ended, grace: float = 0.3) -> tuple[Watchdog, Progress]:
    progress = Progress()
    progress.begin_step(1)
    state = PeerState()
    state.connected()
    limits = Limits(step_timeout=0.1, grace=grace)
    return Watchdog(progress, state, limits, on_trip, end=end, interval=0.02), progress


def test_a_trip_tells_once_waits_its_grace_and_ends() -> None:
    trips: list[Trip] = []
    ended = Ended()
    dog, _ = watch(trips.append, ended)
    started = time.monotonic()
    with dog:
        assert ended.happened.wait(10)
    assert [trip.reason for trip in trips] == [Reason.HUNG_STEP]
    assert ended.at is not None
    assert ended.at - started >= 0.4


def test_a_callback_that_hangs_does_not_keep_the_process() -> None:
    release = threading.Event()
    ended = Ended()
    dog, _ = watch(lambda _: release.wait(30), ended)
    with dog:
        assert ended.happened.wait(10)
    release.set()


def test_a_callback_that_has_done_all_need_not_wait() -> None:
    ended = Ended()
    dog, _ = watch(lambda _: True, ended, grace=60)
    with dog:
        assert ended.happened.wait(10)


def test_an_orderly_end_after_a_trip_is_left_alone() -> None:
    tripped, ended = threading.Event(), Ended()
    dog, _ = watch(lambda _: tripped.set(), ended, grace=60)
    dog.start()
    assert tripped.wait(10)
    dog.stop()
    assert not ended.happened.is_set()
    assert dog.trip is not None


def test_progress_keeps_it_quiet() -> None:
    ended = Ended()
    dog, progress = watch(lambda _: None, ended)
    with dog:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            progress.touch()
            time.sleep(0.005)
    assert dog.trip is None
    assert not ended.happened.is_set()


HANG = """
import ctypes, sys, time
from tandem_worker.link.state import PeerState, Progress
from tandem_worker.watchdog import Limits, Watchdog
progress, peer = Progress(), PeerState()
peer.connected()
progress.begin_step(1)
limits = Limits(step_timeout=0.2, grace=0.2)
dog = Watchdog(progress, peer, limits, print, interval=0.05, last_resort={last_resort}).start()
{hang}
"""


@pytest.mark.parametrize(
    ("hang", "last_resort", "code", "says"),
    [
        ("time.sleep(60)", None, POD_EXIT_INCONCLUSIVE, "hung_step"),
        ("time.sleep(60)", 30, POD_EXIT_INCONCLUSIVE, "hung_step"),
        ("ctypes.PyDLL(None).sleep(60)", 1, 1, "Timeout"),  # keeps the interpreter's lock
    ],
)
def test_a_hanging_process_ends(hang: str, last_resort: float | None, code: int, says: str) -> None:
    script = HANG.format(hang=hang, last_resort=last_resort)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code
    assert says in done.stdout + done.stderr
