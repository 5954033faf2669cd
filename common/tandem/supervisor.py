"""The local supervisor: runs a pair as two processes on this machine, without Kubernetes.

It writes runs, attempts and the verdict; the reference worker writes everything else. It never retries.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO
from uuid import UUID

import zmq

from tandem.db import queries, store
from tandem.db.engine import connect
from tandem.db.liveness import host
from tandem.errors import PairError, SetupError, UsageError
from tandem.home import home
from tandem.ids import new_run_id
from tandem.progress import MAX_LINE, ProgressEvent
from tandem.progress import decode as decode_progress
from tandem.records import AttemptRow, RunRecords, RunRow
from tandem.recovery import check_spool, finish, recover, spool_folder
from tandem.spec import RunSpec
from tandem.vocabulary import AttemptState, Role
from tandem.worker_io import STOP, Bound, Checked, Failed, Message, WorkerConfig, decode, encode

LINGER_S = 20.0
"""How long the suspect may outlive the reference before it is ended."""
FAREWELL_S = 60.0
"""How long the reference may outlive the suspect: to notice that it is gone and to deliver its records."""
READ_S = 5.0
"""How long to wait for the last messages of ended workers."""
START_S = 120.0
"""How long the reference may take to listen."""


@dataclass(frozen=True)
class Local:
    """Where a local pair runs, and how a benchmark changes it."""

    url: str
    """PostgreSQL, its schema at the head."""
    run_id: UUID | None = None
    sync_schedule: list[str] = field(default_factory=list)
    link_delay_s: float = 0.0
    metrics_port: int | None = None
    """Where Prometheus finds the pair's metrics, on this machine alone; None: nowhere."""
    on_progress: Callable[[ProgressEvent], None] = lambda _: None
    on_started: Callable[[UUID, dict[Role, int]], None] = lambda *_: None
    """Told the run's id and the workers' process ids."""


class Stop:
    """How Ctrl-C reaches a pair: the first drains it, the second kills it."""

    def __init__(self) -> None:
        self.requests = 0

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Count SIGINT and SIGTERM while the block runs; main thread only."""

        def count(*_: object) -> None:
            self.requests += 1

        before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_local(spec: RunSpec, local: Local, stop: Stop | None = None) -> RunRecords:
    """Run a pair on this machine and store its verdict.

    Args:
        spec: what to run.
        local: where.
        stop: asks for an early, clean end.

    Returns:
        Everything stored of the run; the verdict is in ``run``.

    Raises:
        TandemError: the inputs cannot be used; nothing was stored. Or the pair could not be
            set up; the run is stored as inconclusive.
    """
    checked = check_inputs(spec)
    spec = spec.model_copy(update={"model": checked.preset})
    check_spool(spool_folder())
    engine = connect(local.url)
    try:
        recover(engine, local.url)
        run_id = local.run_id or new_run_id(time.time(), os.urandom(10))
        node = host()
        store.create_run(
            engine,
            RunRow(
                run_id=run_id, created_at=time.time(), workload=spec.workload, kind=spec.kind, model=checked.model,
                synthetic=spec.fault is not None, reference_node=node, suspect_node=node,
                spec=spec.model_dump(mode="json"), state="running",
            ),
        )  # fmt: skip
        store.start_attempt(
            engine,
            AttemptRow(
                run_id=run_id, attempt=1, state=AttemptState.RUNNING, started_at=time.time(),
                reference_host=node, suspect_host=node, devices=spec.tp,
            ),
        )  # fmt: skip
        pair = _Pair(spec, local, run_id, stop or Stop())
        try:
            pair.run()
        finally:
            pair.close()
            finish(engine, local.url, run_id, 1, pair.reason)
        if pair.failure is not None and pair.failure.reason in ("setup", "input"):
            error = UsageError if pair.failure.exit_code == UsageError.exit_code else SetupError
            raise error(pair.failure.message)
        return queries.load_run(engine, run_id)
    finally:
        engine.dispose()


def check_inputs(spec: RunSpec) -> Checked:
    """Have a worker process read everything that the spec names, before anything is stored.

    Returns:
        Which model and training shape these are.

    Raises:
        TandemError: the first thing that is wrong.
    """
    command = [sys.executable, "-m", "tandem_worker", "check"]
    done = subprocess.run(
        command,
        input=json.dumps(spec.model_dump(mode="json", exclude_unset=True)).encode(),
        capture_output=True,
        check=False,
        env=worker_environment(),
        start_new_session=True,  # Ctrl-C is the supervisor's: it stops the run once it has begun
    )
    message = decode(done.stdout)
    if isinstance(message, Checked):
        return message
    if not isinstance(message, Failed):
        if b"No module named" in done.stderr:
            missing = done.stderr.decode(errors="replace").strip().splitlines()[-1]
            raise SetupError(f"the worker cannot start ({missing}): install tandem-sdc[worker]")
        raise SetupError(f"the worker cannot read its inputs: {done.stderr.decode(errors='replace').strip()[-300:]}")
    raise UsageError(message.message) if message.exit_code == UsageError.exit_code else SetupError(message.message)


class _Pair:
    """The two worker processes of one attempt."""

    def __init__(self, spec: RunSpec, local: Local, run_id: UUID, stop: Stop) -> None:
        self.spec, self.local, self.run_id, self.stop = spec, local, run_id, stop
        self.reason = "supervisor_failed"
        self.failure: Failed | None = None
        """What the side that failed first said."""
        self._workers: dict[Role, subprocess.Popen[bytes]] = {}
        self._killed: set[Role] = set()
        """Ended by this supervisor: how they ended says nothing about them."""
        self._messages: queue.SimpleQueue[tuple[Role, Message | ProgressEvent]] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []
        self._log = home() / "log"
        self._log.mkdir(mode=0o700, exist_ok=True)
        self._keys = {role: zmq.curve_keypair() for role in Role}

    def run(self) -> None:
        """Start both, relay progress, wait for both."""
        self._start(Role.REFERENCE, "tcp://127.0.0.1:0")
        endpoint = self._endpoint()
        if endpoint is not None:
            self._start(Role.SUSPECT, endpoint)
            self.local.on_started(self.run_id, {role: worker.pid for role, worker in self._workers.items()})
        asked, deadline = 0, float("inf")
        patience = {Role.REFERENCE: LINGER_S, Role.SUSPECT: FAREWELL_S}
        while any(worker.poll() is None for worker in self._workers.values()):
            self._take(0.1)
            if self.stop.requests > asked:
                asked = self.stop.requests
                self._ask_to_stop() if asked == 1 else self.kill()
            for role, worker in self._workers.items():
                if worker.poll() is not None:
                    deadline = min(deadline, time.monotonic() + patience[role])
            if time.monotonic() > deadline:
                self.kill()
        self._join_readers()
        while self._take(0):
            pass
        self.reason = self._why()

    def close(self) -> None:
        """Leave nothing behind, however `run` ended."""
        self.kill()
        self._join_readers()
        for worker in self._workers.values():
            for pipe in (worker.stdin, worker.stdout):
                with suppress(OSError):  # what was not flushed to a dead worker
                    assert pipe is not None
                    pipe.close()

    def kill(self) -> None:
        """End both at once."""
        for role, worker in self._workers.items():
            if worker.poll() is None:
                self._killed.add(role)
                worker.kill()
            worker.wait()

    def _why(self) -> str:
        """How the attempt ended; a worker that died before anything that its peer could say of it."""
        codes = {role: worker.returncode for role, worker in self._workers.items() if role not in self._killed}
        for role, code in codes.items():
            if code < 0 or code == 1:
                return f"{role}_died"
        if self.failure is not None:
            return self.failure.reason
        if self._killed and self.stop.requests > 1:
            return "killed"
        for role in Role:
            if role not in codes:
                return f"{role}_hung" if role in self._killed else f"{role}_not_started"
        return "completed"

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(READ_S)

    def _ask_to_stop(self) -> None:
        for worker in self._workers.values():
            assert worker.stdin is not None
            try:
                worker.stdin.write(STOP)
                worker.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended already

    def _endpoint(self) -> str | None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            message = self._take(0.2)
            if isinstance(message, Bound):
                return message.endpoint
            if self._workers[Role.REFERENCE].poll() is not None and message is None:
                return None
        self.reason = "reference_not_listening"
        raise PairError(self.reason, f"the reference did not listen within {START_S:.0f} s")

    def _take(self, timeout: float) -> Message | ProgressEvent | None:
        """Handle one message of a worker."""
        try:
            role, message = self._messages.get(timeout > 0, timeout)
        except queue.Empty:
            return None
        if isinstance(message, Failed) and self.failure is None:
            self.failure = message
        if isinstance(message, ProgressEvent) and role is Role.REFERENCE:
            self.local.on_progress(message)
        return message

    def _start(self, role: Role, endpoint: str) -> None:
        own, peer = self._keys[role], self._keys[Role.SUSPECT if role is Role.REFERENCE else Role.REFERENCE]
        leads = role is Role.REFERENCE
        config = WorkerConfig(
            role=role, run_id=self.run_id, attempt=1, spec=self.spec.model_dump(mode="json"), endpoint=endpoint,
            own_public=own[0].decode(), own_secret=own[1].decode(), peer_public=peer[0].decode(),
            database=self.local.url if leads else None, spool=str(spool_folder()) if leads else None,
            sync_schedule=self.local.sync_schedule, link_delay_s=self.local.link_delay_s,
            node=host() if leads else "", suspect_node=host() if leads else "", metrics_host="127.0.0.1",
            metrics_port=self.local.metrics_port if leads else None,
        )  # fmt: skip
        with open(self._log / f"{self.run_id}-{role}.log", "ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "tandem_worker", "run"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C is the supervisor's to pass on
            )
        self._workers[role] = worker
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(encode(config))
            worker.stdin.flush()
        except BrokenPipeError:
            pass  # it ended at once; its exit code says so
        reader = threading.Thread(target=self._read, args=(role, worker.stdout), name=f"read-{role}", daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, role: Role, stream: IO[bytes]) -> None:
        while line := stream.readline(MAX_LINE):
            if message := decode(line) or decode_progress(line):
                self._messages.put((role, message))


def worker_environment() -> dict[str, str]:
    """The environment without what a worker must not know, with what two workers on one machine need."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TANDEM_DB", "PGPASSWORD")}
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    environment.setdefault("TANDEM_COMPILED", str(home() / "compiled"))
    return environment
