"""One worker process: its threads, its end, its exit code.

Main thread: jax and the lock-step. Beside it: the link, the digest reader, the watchdog, whoever asks it to stop
(standard input, whose end means that the supervisor died; in a pod, signals) and, on the reference, the sink.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from tandem.errors import TandemError
from tandem.progress import ProgressEvent
from tandem.spec import RunSpec, validate
from tandem.vocabulary import (
    POD_EXIT_INCONCLUSIVE,
    POD_EXIT_MATCH,
    POD_EXIT_MISMATCH,
    Role,
    SyncMode,
)
from tandem.worker_io import STOP, Failed, WorkerConfig
from tandem_worker.devices import prepare_environment
from tandem_worker.link.channel import Channel, LinkLimits, OwnKeys, PeerState, Progress
from tandem_worker.link.events import PeerEvent
from tandem_worker.link.state import Activity
from tandem_worker.lockstep.inbox import Inbox, StopRequested, Tripped
from tandem_worker.outlet import Lines, Outlet
from tandem_worker.watchdog import Limits, Trip, Watchdog

if TYPE_CHECKING:
    from tandem_worker.metrics import Look
    from tandem_worker.prepare import Inputs

FLUSH_S = 30.0
"""How long the end waits for the database on one machine, where the next command replays the spool."""
EARLY_S = 5.0
"""The same where nothing was compared."""
TELL_S = 1.0
"""How often it tells that it waits."""
PROGRESS_S = 0.2
"""Least time between two progress lines of one phase."""
NATIVE_HANG_S = 60.0
"""Beyond the step timeout: how long a native call may keep the interpreter's lock."""


def run() -> NoReturn:
    """Run one worker for a supervisor, told on standard input."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    worker = Worker(config, validate(RunSpec, config.spec, "spec"), Lines(config.role))
    work(worker, lambda: listen(worker))


def work(worker: Worker, attend: Callable[[], None]) -> NoReturn:
    """Run a worker to its end, and end the process with its exit code.

    Args:
        worker: not started yet.
        attend: waits, in a thread of its own, for whoever may ask the worker to stop.
    """
    prepare_environment(worker.spec.tp)
    threading.Thread(target=attend, name="attend", daemon=True).start()
    try:
        code = worker.run()
    except TandemError as error:
        code = worker.fail(getattr(error, "reason", "setup"), str(error), error.exit_code)
    except Exception as error:
        worker.outlet.trace(traceback.format_exc())
        role = worker.config.role
        code = worker.fail("crashed", f"the {role} failed unexpectedly: {type(error).__name__}: {error}", 2)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still wait in native code; everything that matters is written.
    os._exit(code)


def listen(worker: Worker) -> None:
    """Standard input: a request to stop, or the supervisor's end."""
    while line := sys.stdin.buffer.readline():
        if line == STOP:
            worker.stop()
    worker.abandon()


class Worker:
    """What a worker process owns.

    Args:
        config: what it was started with.
        spec: the run.
        outlet: what it tells.
        inputs: the spec's inputs (`tandem_worker.prepare.Inputs`), if they were read already.
        records_timeout: seconds that the end waits for the database; what it did not take stays in the spool.
    """

    def __init__(
        self,
        config: WorkerConfig,
        spec: RunSpec,
        outlet: Outlet,
        *,
        inputs: Inputs | None = None,
        records_timeout: float = FLUSH_S,
    ) -> None:
        self.config, self.spec, self.outlet = config, spec, outlet
        self._inputs, self._records_timeout = inputs, records_timeout
        self.progress, self.peer, self.inbox = Progress(), PeerState(), Inbox(self._told)
        self.channel: Channel | None = None
        self.sink: Any = None
        self.ledger: Any = None
        self.session: Any = None
        self._places: frozenset[tuple[str, str]] = frozenset()
        """Phase and module of every site, once they are known."""
        self._shown: tuple[str, float] = ("", 0.0)
        self._closing = threading.Lock()
        self._closed = False

    # -- the attempt -----------------------------------------------------------------------------

    def run(self) -> int:
        """The attempt; returns the exit code.

        Raises:
            TandemError: it ended without a result.
        """
        config, spec = self.config, self.spec
        self.channel = Channel(
            config.role, config.endpoint, OwnKeys(config.own_public, config.own_secret, config.peer_public),
            config.run_id.hex, config.attempt, self.inbox.queue, self.progress, self.peer,
            delay_s=config.link_delay_s, limits=LinkLimits(peer_timeout_s=spec.peer_timeout),
        ).start()  # fmt: skip
        if config.role is Role.REFERENCE:
            self.outlet.bound(self.channel.endpoint)
            self._export()
        limits = Limits(
            step_timeout=spec.step_timeout,
            peer_timeout=spec.peer_timeout,
            reconnect_grace=min(Limits().reconnect_grace, spec.peer_timeout),
            # Where no later command replays the spool, a trip waits for the database as a regular end does.
            grace=Limits().grace + max(0.0, self._records_timeout - FLUSH_S),
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
        return prepare(
            self.spec, self.config.role, self.config.attempt, self.show, self.progress.touch, inputs=self._inputs,
            run=self.config.run_id.hex, node_devices=self.config.node_devices,
        )  # fmt: skip

    def _lead(self, prepared: Any) -> int:
        from tandem.db.sink import Sink
        from tandem_worker.lockstep.ledger import Ledger
        from tandem_worker.lockstep.tally import places_of
        from tandem_worker.session.choose import reference_session
        from tandem_worker.session.reference import Hooks

        config, channel = self.config, self.channel
        assert config.database is not None
        assert config.spool is not None
        assert channel is not None
        self.sink = Sink(config.database, Path(config.spool), config.run_id, config.attempt, on_error=self.outlet.log)
        self.ledger = Ledger(self.sink, config.run_id, config.attempt, self.spec.row_cap, time.time)
        schedule = [SyncMode(mode) for mode in config.sync_schedule] or [self.spec.sync]
        hooks = Hooks(
            progress=self.show,
            schedule=lambda step: schedule[(step - 1) % len(schedule)] if step else self.spec.sync,
            counters=lambda: channel.bytes_sent + channel.bytes_received,
        )
        session = reference_session(self.spec.workload)
        self._places = places_of(prepared.machine.plan)
        self.session = session(prepared, channel, self.inbox, self.progress, self.ledger, hooks)
        reason = self.session.run()
        self.progress.enter(Activity.FINISHED)
        self.session.close(reason)
        self.show("closing")
        delivered = self._close(reason)
        channel.close()
        self.show("closed")
        if not delivered:
            stats = self.sink.stats
            lost = f"{stats.put - stats.acknowledged} of {stats.put} records were not delivered"
            why = f" ({stats.last_error})" if stats.last_error else ""
            return self._end("closing_missing", lost + why, POD_EXIT_INCONCLUSIVE)
        steps = f"{max(self.ledger.total.steps - 1, 0)} steps compared"
        if self.ledger.control_failed:
            failed = ", ".join(name for name, state in self.ledger.states.items() if state.startswith("failed"))
            return self._end(reason, f"{steps}; controls failed: {failed}", POD_EXIT_INCONCLUSIVE)
        code = POD_EXIT_MISMATCH if self.ledger.findings else POD_EXIT_MATCH
        return self._end(reason, f"{steps}, {self.ledger.findings} findings", code)

    def _follow(self, prepared: Any) -> int:
        from tandem_worker.session.choose import suspect_session

        assert self.channel is not None
        made = suspect_session(self.spec.workload)
        session = made(prepared, self.channel, self.inbox, self.progress, node=self.config.node)
        close = session.run()
        self.progress.enter(Activity.FINISHED)
        self.channel.close()
        if close.failed:
            why = "the reference closed the attempt; controls failed"
            return self._end("completed", why, POD_EXIT_INCONCLUSIVE)
        code = POD_EXIT_MISMATCH if close.findings else POD_EXIT_MATCH
        return self._end("completed", "the reference closed the attempt", code)

    # -- ends ------------------------------------------------------------------------------------

    def fail(self, reason: str, message: str, exit_code: int) -> int:
        """End without a result: tell the peer, say why, store what is known."""
        self.progress.enter(Activity.FINISHED)
        if self.channel is not None:
            self.channel.say_bye(reason)
        # Before the records, whose delivery may outlast whoever waits for this process.
        self.outlet.ended(Failed(reason, message, exit_code))
        self._close(reason)
        if self.channel is not None:
            self.channel.close(1.0)
        return POD_EXIT_INCONCLUSIVE

    def _end(self, reason: str, message: str, code: int) -> int:
        """A whole attempt's end."""
        self.outlet.ended(Failed(reason, message, code))
        return code

    def _close(self, reason: str) -> bool:
        """Write the closing record once, from whichever thread comes first; whether everything was delivered."""
        with self._closing:
            if self.ledger is None or self._closed:
                return False
            self._closed = True
            if self.session is not None:
                self.session.reference.store_unsettled()
            self.ledger.close(reason, self.session.devices if self.session is not None else [])
            return self._deliver()

    def _deliver(self) -> bool:
        """Wait for the database to take everything, and tell of it."""
        deadline = time.monotonic() + self._records_timeout
        while (rest := deadline - time.monotonic()) > 0 and self.sink.stats.waiting:
            if not self.sink.flush(min(rest, TELL_S)):
                self.show("delivering")
        delivered: bool = self.sink.close(max(rest, 0.0))
        return delivered

    def _tripped(self, trip: Trip) -> bool:
        """The watchdog gave up: wake the main thread; where it does not come, end from here."""
        self.inbox.queue.put(Tripped(trip.reason, trip.detail))
        if self.channel is not None:
            self.channel.say_bye(trip.reason)
        if self.progress.look().activity is not Activity.WAITING:
            self.outlet.ended(Failed(trip.reason, trip.detail, 2))
            self._close(trip.reason)
            return True
        return False

    def stop(self) -> None:
        """End normally after the current step; at once while nothing can have been compared yet. Any thread."""
        if self._nothing_begun():
            # A closing record of nothing is worth no waiting.
            self._records_timeout = min(self._records_timeout, EARLY_S)
            os._exit(self.fail("stopped_early", "stopped before anything was compared", 2))
        self.inbox.queue.put(StopRequested("stopped"))

    def _nothing_begun(self) -> bool:
        """Whether the main thread compiles or loads, for minutes perhaps, and takes no messages meanwhile, or waits for
        a peer that may never come.
        """
        own = self.progress.look()
        if own.activity is not Activity.WAITING:
            return own.activity is Activity.STARTING
        return own.step == 0 and (self.session is None or not self.session.devices)

    def abandon(self) -> NoReturn:
        """The supervisor is gone: nobody waits for this attempt. What was put is in the database or in the spool."""
        if self.channel is not None:
            self.channel.say_bye("supervisor_gone")
        if self.sink is not None:
            self.sink.flush(2.0)
        os._exit(POD_EXIT_INCONCLUSIVE)

    # -- telling ---------------------------------------------------------------------------------

    def show(self, phase: str) -> None:
        """Progress line; of one phase at most one in PROGRESS_S seconds."""
        now = time.monotonic()
        if phase == self._shown[0] and now - self._shown[1] < PROGRESS_S:
            return
        self._shown = (phase, now)
        self.outlet.progress(self._event(phase))

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

    def _export(self) -> None:
        """Answer Prometheus, where that is asked for."""
        config, spec = self.config, self.spec
        if config.metrics_port is None:
            return
        from tandem_worker.metrics import PairLabels, export

        labels = PairLabels(
            node=config.suspect_node, reference=config.node, workload=spec.workload, kind=spec.kind,
            synthetic=spec.fault is not None,
        )  # fmt: skip
        export(config.metrics_port, labels, self.look, self.outlet.log, config.metrics_host)

    def look(self) -> Look:
        """How the pair stands now. Any thread."""
        from tandem_worker.metrics import Look

        event, activity, ledger = self._event(self._shown[0]), self.progress.look().activity, self.ledger
        if ledger is None:
            return Look(event, activity, time.time())
        return Look(event, activity, time.time(), ledger.total, ledger.failures, self._places)

    def _told(self, event: PeerEvent) -> None:
        self.outlet.log(f"link {event.kind}: {event.detail}")
