"""What a worker knows of its own progress and of its peer: written by the engine and by the link's thread,
read by the watchdog. Thread-safe; the clock is injected and monotonic (seconds).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

Clock: TypeAlias = Callable[[], float]


class Activity(StrEnum):
    """What a worker's main thread is doing."""

    STARTING = "starting"
    """Loads weights, compiles; may take minutes."""
    COMPUTING = "computing"
    REPLAYING = "replaying"
    """Repeats a program on kept inputs, or runs a control; not part of a step's time."""
    WAITING = "waiting"
    """Waits for its peer."""
    FINISHED = "finished"
    """Nothing is expected of it any more."""


class Own(msgspec.Struct, frozen=True):
    """One look at a worker's own progress."""

    counter: int
    activity: Activity
    step: int
    touched_at: float
    """When progress was last made, or the activity last changed."""
    step_at: float
    """When the current step started."""
    aside_s: float
    """Seconds of the current step that went into replays."""
    longest_step_s: float
    """Longest time that a finished step kept this side busy; 0 before the first."""
    what: str
    """What is being done or waited for, for the message of a trip."""


class Progress:
    """The engine's own progress. Every method may be called from any thread."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self._waits_since: float | None = None
        """Since when nothing was done but waiting."""
        self._own = Own(0, Activity.STARTING, 0, now, now, 0.0, 0.0, "")

    def touch(self) -> None:
        """Something was done: an op dispatched, a frame handled, a replay finished, a chunk loaded."""
        with self._lock:
            self._waits_since = None
            self._switch(self._own.activity, self._own.what)

    def enter(self, activity: Activity, what: str = "") -> None:
        """The main thread turns to something else."""
        with self._lock:
            self._switch(activity, what)

    def begin_step(self, step: int) -> None:
        """A step starts; its time runs from now."""
        with self._lock:
            self._waits_since = None
            self._switch(Activity.COMPUTING, f"step {step}")
            self._own = replace(self._own, step=step, step_at=self._own.touched_at, aside_s=0.0)

    def end_step(self, busy_s: float) -> None:
        """A step ended after ``busy_s`` seconds in which this side did not wait."""
        with self._lock:
            longest = max(self._own.longest_step_s, busy_s)
            self._waits_since = None
            self._switch(self._own.activity, self._own.what)
            self._own = replace(self._own, longest_step_s=longest)

    @contextmanager
    def during(self, activity: Activity, what: str = "") -> Iterator[None]:
        """The main thread does something else for the length of the block."""
        before = self.look()
        self.enter(activity, what)
        try:
            yield
        finally:
            self.enter(before.activity, before.what)

    def waiting(self, what: str = "peer") -> AbstractContextManager[None]:
        """The main thread waits for its peer for the length of the block: not a hang of its own."""
        return self.during(Activity.WAITING, what)

    def look(self) -> Own:
        with self._lock:
            own = self._own
            if own.activity is Activity.REPLAYING:
                own = replace(own, aside_s=own.aside_s + self._clock() - own.touched_at)
            return own

    def excuse(self, lost_s: float) -> None:
        """The whole process stood still for ``lost_s`` seconds (suspended): nobody's fault."""
        with self._lock:
            own, now = self._own, self._clock()
            touched_at, step_at = min(own.touched_at + lost_s, now), min(own.step_at + lost_s, now)
            self._own = replace(own, touched_at=touched_at, step_at=step_at)
            if self._waits_since is not None:
                self._waits_since = min(self._waits_since + lost_s, now)

    def _switch(self, activity: Activity, what: str) -> None:
        own, now = self._own, self._clock()
        waits = self._waits_since
        if activity is Activity.WAITING:
            # Waiting again without anything done in between is one wait, not progress.
            counter = own.counter + (waits is None)
            self._waits_since = waits = now if waits is None else waits
            self._own = replace(
                self._settled(own, now), counter=counter, activity=activity, touched_at=waits, what=what
            )
            return
        if own.activity is Activity.WAITING and waits is not None:
            self._own = replace(own, activity=activity, touched_at=now, what=what)
            return
        self._own = replace(
            self._settled(own, now), counter=own.counter + 1, activity=activity, touched_at=now, what=what
        )

    @staticmethod
    def _settled(own: Own, now: float) -> Own:
        """With the time of a replay that ends now."""
        aside = own.aside_s + (now - own.touched_at if own.activity is Activity.REPLAYING else 0.0)
        return replace(own, aside_s=aside)


class Peer(msgspec.Struct, frozen=True):
    """One look at the peer, as seen from here."""

    started_at: float
    """When this side began to wait for it."""
    connected: bool = False
    ever: bool = False
    """Whether it was ever connected."""
    left: str = ""
    """Its reason for leaving; empty while it has not said goodbye."""
    lost_at: float = 0.0
    """When the connection was lost; meaningless while connected."""
    frame_at: float = 0.0
    """When anything of it last arrived."""
    counter: int = 0
    counter_at: float = 0.0
    """When its progress counter was last seen to move."""
    step: int = 0
    step_at: float = 0.0
    activity: Activity = Activity.STARTING
    beat_at: float = 0.0
    """When its last heartbeat arrived."""
    aside_s: float = 0.0
    """Seconds of its current step seen in replays."""


class PeerState:
    """What the link's thread learns of the peer."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self._peer = Peer(now, counter_at=now, step_at=now, beat_at=now)

    def look(self) -> Peer:
        with self._lock:
            return self._peer

    def connected(self) -> None:
        now = self._clock()
        self._set(connected=True, ever=True, frame_at=now, counter_at=now)

    def disconnected(self) -> None:
        if self.look().connected:
            self._set(connected=False, lost_at=self._clock())

    def said_goodbye(self, reason: str) -> None:
        self._set(left=reason or "bye")

    def heard(self) -> None:
        """Any frame of it arrived."""
        self._set(frame_at=self._clock())

    def heartbeat(self, counter: int, step: int, state: str) -> None:
        """Its main thread's progress, as its link thread reports it. An unknown ``state`` counts as computing."""
        now = self._clock()
        activity = Activity(state) if state in frozenset(Activity) else Activity.COMPUTING
        with self._lock:
            old = self._peer
            new = replace(old, frame_at=now, beat_at=now, activity=activity)
            if counter != old.counter:
                new = replace(new, counter=counter, counter_at=now)
            if step != old.step:
                new = replace(new, step=step, step_at=now, aside_s=0.0)
            elif old.activity is Activity.REPLAYING:
                new = replace(new, aside_s=old.aside_s + now - old.beat_at)
            self._peer = new

    def excuse(self, lost_s: float) -> None:
        """The own process stood still for ``lost_s`` seconds: the peer's silence meanwhile is not its fault."""
        with self._lock:
            now = self._clock()
            times = ("started_at", "lost_at", "frame_at", "counter_at", "step_at", "beat_at")
            moved = {name: min(getattr(self._peer, name) + lost_s, now) for name in times}
            self._peer = replace(self._peer, **moved)

    def _set(self, **changes: object) -> None:
        with self._lock:
            self._peer = replace(self._peer, **changes)
