"""One worker process: its threads, its end, its exit code.

Main thread: jax and the lock-step. Beside it: the link, the digest reader, the watchdog, standard input (whose
end means that the supervisor died) and, on the reference, the sink.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tandem.errors import TandemError
from tandem.progress import ProgressEvent
from tandem.progress import encode as encode_progress
from tandem.spec import RunSpec, validate
from tandem.vocabulary import (
    POD_EXIT_INCONCLUSIVE,
    POD_EXIT_MATCH,
    POD_EXIT_MISMATCH,
    Role,
    SyncMode,
)
from tandem.worker_io import STOP, Bound, Failed, WorkerConfig, encode
from tandem_worker.devices import prepare_environment
from tandem_worker.link.channel import Channel, LinkLimits, OwnKeys, PeerState, Progress
from tandem_worker.link.events import PeerEvent
from tandem_worker.link.state import Activity
from tandem_worker.lockstep.inbox import Inbox, StopRequested, Tripped
from tandem_worker.watchdog import Limits, Trip, Watchdog

FLUSH_S = 30.0
"""How long the end waits for the database; what it did not take stays in the spool."""
PROGRESS_S = 0.2
"""Least time between two progress lines of one phase."""
NATIVE_HANG_S = 60.0
"""Beyond the step timeout: how long a native call may keep the interpreter's lock."""


def run() -> int:
    """Run one worker to its end; returns the exit code."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    spec = validate(RunSpec, config.spec, "spec")
    prepare_environment(spec.tp)
    worker = Worker(config, spec)
    try:
        code = worker.run()
    except TandemError as error:
        code = worker.fail(getattr(error, "reason", "setup"), str(error), error.exit_code)
    except Exception as error:
        traceback.print_exc()
        code = worker.fail("crashed", f"the {config.role} failed unexpectedly: {type(error).__name__}: {error}", 2)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still wait in native code; everything that matters is written.
    os._exit(code)


class Worker:
    """What a worker process owns."""

    def __init__(self, config: WorkerConfig, spec: RunSpec) -> None:
        self.config, self.spec = config, spec
        self.progress, self.peer, self.inbox = Progress(), PeerState(), Inbox(self._told)
        self.channel: Channel | None = None
        self.sink: Any = None
        self.ledger: Any = None
        self.session: Any = None
        self._out = threading.Lock()
        self._shown: tuple[str, float] = ("", 0.0)
        self._closing = threading.Lock()
        self._closed = False
        self._started = time.monotonic()

    # -- the attempt -----------------------------------------------------------------------------

    def run(self) -> int:
        config, spec = self.config, self.spec
        threading.Thread(target=self._listen, name="stdin", daemon=True).start()
        self.channel = Channel(
            config.role, config.endpoint, OwnKeys(config.own_public, config.own_secret, config.peer_public),
            config.run_id.hex, config.attempt, self.inbox.queue, self.progress, self.peer,
            delay_s=config.link_delay_s, limits=LinkLimits(peer_timeout_s=spec.peer_timeout),
        ).start()  # fmt: skip
        if config.role is Role.REFERENCE:
            self._say(encode(Bound(self.channel.endpoint)))
        limits = Limits(
            step_timeout=spec.step_timeout,
            peer_timeout=spec.peer_timeout,
            reconnect_grace=min(Limits().reconnect_grace, spec.peer_timeout),
        )
        watchdog = Watchdog(
            self.progress, self.peer, limits, self._tripped, last_resort=spec.step_timeout + NATIVE_HANG_S
        ).start()  # fmt: skip
        try:
            prepared = self._prepare()
            return self._lead(prepared) if config.role is Role.REFERENCE else self._follow(prepared)
        finally:
            watchdog.stop()

    def _prepare(self) -> Any:
        from tandem_worker.prepare import prepare

        self.show("starting")
        prepared = prepare(self.spec, self.config.role, self.config.attempt, self.show, self.progress.touch)
        return prepared

    def _lead(self, prepared: Any) -> int:
        from tandem.db.sink import Sink
        from tandem_worker.lockstep.ledger import Ledger
        from tandem_worker.session.reference import Hooks, ReferenceSession

        config, channel = self.config, self.channel
        assert config.database is not None
        assert config.spool is not None
        assert channel is not None
        self.sink = Sink(config.database, Path(config.spool), config.run_id, config.attempt, on_error=self._log)
        self.ledger = Ledger(self.sink, config.run_id, config.attempt, self.spec.row_cap, time.time)
        schedule = [SyncMode(mode) for mode in config.sync_schedule] or [self.spec.sync]
        hooks = Hooks(
            progress=self.show,
            schedule=lambda step: schedule[(step - 1) % len(schedule)] if step else self.spec.sync,
            counters=lambda: channel.bytes_sent + channel.bytes_received,
        )
        self.session = ReferenceSession(prepared, channel, self.inbox, self.progress, self.ledger, hooks)
        reason = self.session.run()
        self.progress.enter(Activity.FINISHED)
        self.session.close(reason)
        self.show("closing")
        delivered = self._close(reason)
        channel.close()
        self.show("closed")
        if self.ledger.control_failed or not delivered or reason not in ("completed", "stopped"):
            return POD_EXIT_INCONCLUSIVE
        return POD_EXIT_MISMATCH if self.ledger.findings else POD_EXIT_MATCH

    def _follow(self, prepared: Any) -> int:
        from tandem_worker.session.suspect import SuspectSession

        assert self.channel is not None
        session = SuspectSession(prepared, self.channel, self.inbox, self.progress)
        close = session.run()
        self.progress.enter(Activity.FINISHED)
        self.channel.close()
        return POD_EXIT_MISMATCH if close.mismatches else POD_EXIT_MATCH

    # -- ends ------------------------------------------------------------------------------------

    def fail(self, reason: str, message: str, exit_code: int) -> int:
        """End without a result: tell the peer, store what is known, say why."""
        self.progress.enter(Activity.FINISHED)
        if self.channel is not None:
            self.channel.say_bye(reason)
        self._close(reason)
        if self.channel is not None:
            self.channel.close(1.0)
        self._say(encode(Failed(reason, message, exit_code)))
        return POD_EXIT_INCONCLUSIVE

    def _close(self, reason: str) -> bool:
        """Write the closing record once, from whichever thread comes first; whether everything was delivered."""
        with self._closing:
            if self.ledger is None or self._closed:
                return False
            self._closed = True
            if self.session is not None:
                self.session.reference.store_unsettled()
            self.ledger.close(reason, self.session.devices if self.session is not None else [])
            delivered: bool = self.sink.close(FLUSH_S)
            return delivered

    def _tripped(self, trip: Trip) -> bool:
        """The watchdog gave up: wake the main thread; where it does not come, end from here."""
        self.inbox.queue.put(Tripped(trip.reason, trip.detail))
        if self.channel is not None:
            self.channel.say_bye(trip.reason)
        if self.progress.look().activity is not Activity.WAITING:
            self._close(trip.reason)
            self._say(encode(Failed(trip.reason, trip.detail, 2)))
            return True
        return False

    def _listen(self) -> None:
        while line := sys.stdin.buffer.readline():
            if line == STOP:
                self._asked_to_stop()
        # The supervisor is gone: nobody waits for this attempt. What was put is in the database or in the spool.
        if self.channel is not None:
            self.channel.say_bye("supervisor_gone")
        if self.sink is not None:
            self.sink.flush(2.0)
        os._exit(POD_EXIT_INCONCLUSIVE)

    def _asked_to_stop(self) -> None:
        """End normally after the current step; at once while nothing can have been compared yet."""
        if self.progress.look().activity is Activity.STARTING:
            # The main thread compiles or loads, for minutes perhaps, and takes no messages meanwhile.
            os._exit(self.fail("stopped_early", "stopped before anything was compared", 2))
        self.inbox.queue.put(StopRequested("stopped"))

    # -- telling ---------------------------------------------------------------------------------

    def show(self, phase: str) -> None:
        """Progress line; of one phase at most one in PROGRESS_S seconds."""
        now = time.monotonic()
        if phase == self._shown[0] and now - self._shown[1] < PROGRESS_S:
            return
        self._shown = (phase, now)
        self._say(encode_progress(self._event(phase)))

    def _event(self, phase: str) -> ProgressEvent:
        if self.ledger is None or self.session is None:
            return ProgressEvent(phase=phase, steps=self.spec.steps)
        total, side, stats = self.ledger.total, self.session.reference, self.sink.stats
        done = max(total.steps - 1, 0)
        rate = self.session.steps_per_s
        eta = (self.spec.steps - done) / rate if rate and self.spec.steps is not None else None
        return ProgressEvent(
            phase=phase, step=done, steps=self.spec.steps, steps_per_s=rate, eta_s=eta,
            sites=total.sites, elements=total.elements,
            mismatched_sites=total.mismatched_sites, mismatched_elements=total.mismatched_elements,
            other_findings=total.other_findings, first_mismatch=total.first_mismatch, controls=self.ledger.states,
            link_bytes=total.link_bytes, full_bytes=total.full_bytes,
            window_used=side.window_max, window_limit=side.window.limit,
            records_put=stats.put, records_acknowledged=stats.acknowledged,
            records_spooled=stats.spooled if stats.last_error else 0,
        )  # fmt: skip

    def _told(self, event: PeerEvent) -> None:
        self._log(f"link {event.kind}: {event.detail}")

    def _log(self, line: str) -> None:
        sys.stderr.write(f"{self.config.role}: {line}\n")
        sys.stderr.flush()

    def _say(self, line: bytes) -> None:
        with self._out:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except BrokenPipeError:
                pass  # the supervisor is gone; standard input says so too
