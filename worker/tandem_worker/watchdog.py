"""The watchdog: outside JAX's calls, it ends an attempt that hangs, by name and within a bounded time.

`judge` is pure; `Watchdog` is a thread around it. A trip first lets the engine write what is known, then the process
is ended, since a main thread that hangs inside XLA cannot be. Time that the whole process was suspended counts
for nobody. Where a native call keeps the interpreter's lock, no Python thread can run: `last_resort` arms the
interpreter's own C timer for that.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from tandem.vocabulary import POD_EXIT_INCONCLUSIVE
from tandem_worker.link.state import Activity, Clock, Own, Peer, PeerState, Progress


class Reason(StrEnum):
    """Why an attempt was ended; each becomes the run's reason."""

    HUNG_STEP = "hung_step"
    """This side's main thread makes no progress in a computation."""
    PEER_HUNG = "peer_hung"
    """The peer's heartbeats arrive, but its main thread makes no progress in a computation."""
    DEADLOCK = "deadlock"
    """Both sides wait for each other."""
    DEAD_PEER = "dead_peer"
    """The connection ended and the peer did not come back."""
    HALF_OPEN_LINK = "half_open_link"
    """The connection looks up, but nothing arrives."""
    SLOW_PEER = "slow_peer"
    """The peer makes progress, but its step takes far too long."""
    NO_PEER = "no_peer"
    """The peer never connected."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    step_timeout: float = 600.0
    """Without progress in a computation."""
    peer_timeout: float = 20.0
    """Without any frame."""
    start_timeout: float = 1800.0
    """Until the peer is there (image pulls, name service), and without progress while loading and compiling."""
    reconnect_grace: float = 10.0
    """After a connection ended."""
    slow_factor: float = 20.0
    """Times the longest step of this side that a step may take because of the peer ..."""
    slow_floor: float = 300.0
    """... but never less than this, nor than step_timeout before this side has finished a step."""
    grace: float = 15.0
    """For writing what is known, after a trip."""


@dataclass(frozen=True, slots=True)
class Trip:
    reason: Reason
    detail: str
    """One line: what was seen, for how long."""


def judge(now: float, own: Own, peer: Peer, limits: Limits) -> Trip | None:
    """What is wrong, if anything; the cause nearest to this side first.

    Args:
        now: monotonic seconds, of the clock that stamped ``own`` and ``peer``.
        own: this side's progress.
        peer: what is known of the peer.
        limits: time limits.
    """
    if own.activity is Activity.FINISHED:
        return None
    stuck = now - own.touched_at
    allowed = limits.start_timeout if own.activity is Activity.STARTING else limits.step_timeout
    if own.activity is not Activity.WAITING and stuck > allowed:
        where = f" in {own.what}" if own.what else ""
        return Trip(Reason.HUNG_STEP, f"no progress for {stuck:.0f} s while {own.activity}{where}, step {own.step}")
    if peer.left:
        if own.activity is Activity.WAITING and stuck > limits.step_timeout:
            return Trip(Reason.DEAD_PEER, f"the peer left ({peer.left}) and this side still waits after {stuck:.0f} s")
        return None
    return _judge_link(now, peer, limits) or _judge_peer(now, own, peer, limits)


def _judge_link(now: float, peer: Peer, limits: Limits) -> Trip | None:
    if not peer.ever:
        waited = now - peer.started_at
        return Trip(Reason.NO_PEER, f"no peer within {waited:.0f} s") if waited > limits.start_timeout else None
    if not peer.connected:
        away = now - peer.lost_at
        if away > limits.reconnect_grace:
            return Trip(Reason.DEAD_PEER, f"the connection ended {away:.0f} s ago and the peer did not come back")
        return None
    silent = now - peer.frame_at
    if silent > limits.peer_timeout:
        return Trip(Reason.HALF_OPEN_LINK, f"the connection looks up, but nothing came for {silent:.0f} s")
    return None


def _judge_peer(now: float, own: Own, peer: Peer, limits: Limits) -> Trip | None:
    if not peer.connected or peer.activity is Activity.FINISHED:
        return None
    still = now - peer.counter_at
    if peer.activity is Activity.WAITING:
        both = min(still, now - own.touched_at)
        if own.activity is Activity.WAITING and both > limits.step_timeout:
            return Trip(Reason.DEADLOCK, f"both sides have waited for each other for {both:.0f} s, step {own.step}")
        return None
    # The peer's own watchdog has the same limit and knows more: it gets the time to say so first.
    allowed = limits.start_timeout if peer.activity is Activity.STARTING else limits.step_timeout
    if still > allowed + limits.peer_timeout:
        detail = f"the peer answers, but made no progress for {still:.0f} s while {peer.activity}, step {peer.step}"
        return Trip(Reason.PEER_HUNG, detail)
    if own.activity is not Activity.WAITING or own.step == 0 or peer.activity is Activity.STARTING:
        return None
    taken = now - own.step_at - own.aside_s - peer.aside_s
    longest = limits.slow_factor * own.longest_step_s if own.longest_step_s else limits.step_timeout
    if taken > max(longest, limits.slow_floor):
        detail = (
            f"step {own.step} has taken {taken:.0f} s because of the peer; this side needs {own.longest_step_s:.1f} s"
        )
        return Trip(Reason.SLOW_PEER, detail)
    return None


class Watchdog:
    """The thread around `judge`.

    Args:
        progress: this side's.
        peer: the link's view of the other side.
        limits: time limits.
        on_trip: called once, in a thread of its own, with the trip: tells the peer and the records, and may
            wake the main thread, whose orderly end then calls `stop`.
        end: called ``limits.grace`` seconds after the trip, or as soon as ``on_trip`` has returned True, unless
            `stop` came first; the default ends the process at once with the code for an inconclusive run.
        interval: seconds between looks.
        clock: monotonic seconds, the same as of ``progress`` and ``peer``.
        last_resort: seconds for which this thread may be kept from running before the interpreter's C timer
            dumps all stacks to stderr and ends the process with 1; None: never.
    """

    def __init__(
        self,
        progress: Progress,
        peer: PeerState,
        limits: Limits,
        on_trip: Callable[[Trip], bool | None],
        *,
        end: Callable[[], None] = lambda: os._exit(POD_EXIT_INCONCLUSIVE),
        interval: float = 0.5,
        clock: Clock = time.monotonic,
        last_resort: float | None = None,
    ) -> None:
        self._progress, self._peer, self._limits, self._on_trip = progress, peer, limits, on_trip
        self._end, self._interval, self._clock, self._last_resort = end, interval, clock, last_resort
        self._stopped = threading.Event()
        self._ready_to_end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.trip: Trip | None = None
        """What it found."""

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Watch no more; after a trip: the main thread ends the process itself."""
        self._stopped.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._watch()
            if self.trip is not None:
                threading.Thread(target=self._tell, args=(self.trip,), name="watchdog-trip", daemon=True).start()
                self._await_end(time.monotonic() + self._limits.grace)
        finally:
            if self._last_resort is not None:
                faulthandler.cancel_dump_traceback_later()
        if self.trip is not None and not self._stopped.is_set():
            self._end()

    def _watch(self) -> None:
        looked_at = self._clock()
        while self.trip is None:
            self._arm()
            if self._stopped.wait(self._interval):
                return
            now = self._clock()
            late = now - looked_at - self._interval
            looked_at = now
            if late > max(2.0, 4 * self._interval):
                # Suspended, or starved: everybody's times stood still with this thread.
                self._progress.excuse(late)
                self._peer.excuse(late)
                continue
            self.trip = judge(now, self._progress.look(), self._peer.look(), self._limits)

    def _arm(self) -> None:
        if self._last_resort is not None:
            faulthandler.dump_traceback_later(self._last_resort, exit=True, file=2)

    def _tell(self, trip: Trip) -> None:
        if self._on_trip(trip):
            self._ready_to_end.set()

    def _await_end(self, deadline: float) -> None:
        while time.monotonic() < deadline and not self._ready_to_end.is_set():
            self._arm()
            if self._stopped.wait(0.05):
                return
