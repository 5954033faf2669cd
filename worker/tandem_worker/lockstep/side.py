"""What both sides of the pair do alike: keep a queue of unconfirmed executions and wait for events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from tandem.vocabulary import SyncMode
from tandem_worker.chain import Op
from tandem_worker.link.channel import Channel, FrameEvent
from tandem_worker.link.frames import Frame
from tandem_worker.link.state import Progress
from tandem_worker.lockstep.inbox import DigestReady, Inbox, ReaderFailed
from tandem_worker.lockstep.machine import Execution, Machine, Reader
from tandem_worker.lockstep.window import Window

F = TypeVar("F")
IDLE_S = 0.5
"""Longest single wait for an event, seconds; the watchdog bounds the sum."""
Clock = Callable[[], float]
"""Seconds, monotonic."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What both sides must agree on for a run's comparison."""

    window: int
    replays: int
    replay_budget: int
    self_replays: int
    seed: int
    row_cap: int
    exchange_bytes: int = 64 << 20
    """Most bytes of a differing tensor under way at once."""


class Side:
    """Base of `Reference` and `Suspect`; single-threaded, driven by the worker's main thread."""

    def __init__(
        self, machine: Machine, channel: Channel, inbox: Inbox, progress: Progress, settings: Settings, clock: Clock
    ) -> None:
        self.machine, self.channel, self.inbox, self.progress = machine, channel, inbox, progress
        self.settings, self.clock = settings, clock
        self.plan = machine.plan
        machine.touch = progress.touch
        self.pending: deque[Execution] = deque()
        self.unconfirmed = 0
        self.generation = 0
        self.step_number = 0
        self.sync = SyncMode.OPTIMISTIC
        self.window = self.ahead = Window(settings.window)
        """Of this step; ``ahead`` is that of optimistic steps, which blocking steps in between leave as it is."""
        self.window_max = 0
        self.waited_s = 0.0
        self.kept_op = -1
        self.kept: Execution | None = None
        """This step's execution that the positive control copies, once it is settled."""
        self.reader = Reader(
            report=lambda execution: inbox.queue.put(DigestReady(execution)),
            fail=lambda error: inbox.queue.put(ReaderFailed(error)),
        )

    # -- the chain -------------------------------------------------------------------------------

    def admits(self, op: Op) -> bool:
        """Whether ``op`` may start now: drained where it must be, and room in the window."""
        if op.drain and self.pending:
            return False
        return self.window.admits(self.unconfirmed, len(op.sites))

    def start(self, op: Op) -> Execution:
        """Dispatch ``op`` and put it among the unconfirmed."""
        self.progress.touch()
        execution = self.machine.execute(op, self.step_number, self.generation)
        self.pending.append(execution)
        self.unconfirmed += len(op.sites)
        self.window_max = max(self.window_max, self.unconfirmed)
        self.reader.submit(execution)
        return execution

    def confirm_head(self) -> Execution:
        """Take the oldest execution off the queue: its sites are settled."""
        execution = self.pending.popleft()
        self.unconfirmed -= len(execution.op.sites)
        self.window.confirmed(len(execution.op.sites))
        self.machine.release(execution.op)
        if execution.op.index == self.kept_op and self.step_number:
            self.kept = execution
        self.progress.touch()
        return execution

    def unsynchronised(self, ops: tuple[Op, ...]) -> None:
        """Run ops without any comparison (benchmark baseline): what is done is released at once."""
        last: Any = None
        for op in ops:
            self.progress.touch()
            last = self.machine.execute(op, self.step_number, self.generation)
            self.machine.release(op)
        if last is not None:
            # As in the other modes: nothing of the step is left for the next one to wait for.
            jax.block_until_ready((last.digests, self.machine.slots))

    # -- events ----------------------------------------------------------------------------------

    def handle(self, frame: Frame, payload: np.ndarray | None) -> None:
        """Store what a frame says; never answers with a dialogue of its own."""
        raise NotImplementedError

    def digest_ready(self, execution: Execution) -> None:
        """The digests of an execution reached the host."""

    def pump(self, timeout: float | None) -> bool:
        """Handle one event; False if none came in time."""
        event = self._next(timeout)
        if event is None:
            return False
        if isinstance(event, DigestReady):
            self.progress.touch()
            self.digest_ready(event.execution)
        else:
            self.handle(event.frame, event.payload)
        return True

    def pump_all(self) -> None:
        """Handle everything that is already there."""
        while self.pump(0):
            pass

    def _next(self, timeout: float | None) -> FrameEvent | DigestReady | None:
        if timeout == 0:
            return self.inbox.next(0)
        patience = IDLE_S if timeout is None else timeout
        if self.pending and self.pending[0].lanes is None:
            return self.inbox.next(patience)  # the own device is not done: a wait that the watchdog counts as computing
        started = self.clock()
        with self.progress.waiting():
            event = self.inbox.next(patience)
        self.waited_s += self.clock() - started
        return event

    def expect(self, kind: type[F], matches: Callable[[F], bool]) -> tuple[F, np.ndarray | None]:
        """Wait for one frame of a dialogue; other events are handled meanwhile.

        The watchdog bounds the wait.
        """
        while True:
            event = self._next(None)
            if event is None:
                continue
            if isinstance(event, DigestReady):
                self.progress.touch()
                self.digest_ready(event.execution)
            elif isinstance(event.frame, kind) and matches(event.frame):
                self.progress.touch()
                return event.frame, event.payload
            else:
                self.handle(event.frame, event.payload)

    def expect_any(self, *kinds: type[Any], matches: Callable[[Any], bool] = lambda _: True) -> tuple[Any, Any]:
        """Wait for one frame of several kinds; its payload, if any, is a numpy array."""
        return self.expect(kinds, matches)  # type: ignore[arg-type]
