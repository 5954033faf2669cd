"""Runs on this machine, one at a time, each supervised by a process of its own that outlives the API.

What was asked for lies in a folder, a few small files a run (``tandem_api.launch.child``): a new process takes up there
what the one before left, be it queued, running or dead.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from tandem.db.engine import connect
from tandem.db.liveness import alive, host
from tandem.errors import SetupError, TandemError
from tandem.home import home
from tandem.ids import new_run_id
from tandem.pairing.candidates import Candidate
from tandem.recovery import recover
from tandem.supervisor import worker_environment
from tandem_api.launch.child import write
from tandem_api.launch.launcher import Condition, Launch, Order, State, check, ended, key_reused
from tandem_api.problems import Problem, invalid, log, not_found

QUEUE = 16
"""Most runs that wait for their turn."""
KEPT = 1000
"""Ended launches that are remembered; their records stay in the database in any case."""
LOOK_S = 0.25
"""How often the running process is looked at."""
SUFFIXES = ("json", "lock", "pid", "progress", "stop", "end")


@dataclass
class _Entry:
    launch: Launch
    key: str
    digest: str
    process: subprocess.Popen[bytes] | None = None
    """Only if this process started it."""


class LocalLauncher:
    """Args:
    url: of the database; None: the embedded one, which every process finds by itself.
    database: the same, always an URL.
    folder: where the launches lie; None: in the data folder.
    clock: UTC seconds.
    """

    mode = "local"

    def __init__(
        self,
        database: str,
        url: str | None = None,
        *,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._url, self._clock = database, url, clock
        self._folder = folder or home() / "launches"
        self._entries: dict[UUID, _Entry] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._lock: Any = None

    # -- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up what an earlier process left.

        Raises:
            SetupError: another process does, or the folder cannot be used.
        """
        if self._task is not None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self._folder / "serving").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupError(f"another `tandem serve` uses {self._folder}: end it, or set TANDEM_HOME") from None
        except OSError as error:
            raise SetupError(f"{self._folder} cannot be used ({error.strerror}): set TANDEM_HOME") from None
        for path in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError, KeyError, msgspec.MsgspecError):
                self._read(path)
        self._prune()
        self._task = asyncio.create_task(self._work(), name="local launcher")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._lock is not None:
            self._lock.close()

    def wrong(self) -> str | None:
        return "the launcher has stopped" if self._task is None or self._task.done() else None

    # -- orders --------------------------------------------------------------------------------------

    async def launch(self, order: Order, *, by: str, key: str | None) -> tuple[Launch, bool]:
        check(order)
        for field in ("node", "reference"):
            if getattr(order, field) not in (None, host()):
                raise invalid(f"body.{field}", f"only this machine ({host()}) runs pairs here: leave it out")
        if order.cluster is not None:
            raise invalid("body.cluster", "there is no cluster here: leave it out")
        digest = order.digest
        hashed = "" if key is None else hashlib.sha256(f"{by}\0{key}".encode()).hexdigest()
        if hashed:
            known = next((e for e in self._entries.values() if e.key == hashed), None)
            if known is not None:
                if known.digest != digest:
                    raise key_reused()
                return known.launch, False
        if sum(e.launch.state is State.PENDING for e in self._entries.values()) >= QUEUE:
            raise Problem(
                429, "queue-full", f"{QUEUE} runs wait already: try again when one has ended",
                headers={"Retry-After": "30"},
            )  # fmt: skip
        now = self._clock()
        run_id = new_run_id(now, os.urandom(10))
        spec = order.spec.model_dump(mode="json", exclude_unset=True)
        values = {
            "run": str(run_id), "created_at": now, "by": by, "key": hashed, "digest": digest, "spec": spec,
            "kind": str(order.spec.kind), "workload": str(order.spec.workload), "model": order.spec.model,
            "synthetic": order.spec.fault is not None,
        }  # fmt: skip
        try:
            write(self._folder / f"{run_id}.json", values)
        except OSError as error:
            raise Problem(507, "disk", f"the order cannot be written down ({error.strerror})") from None
        entry = self._take(values)
        self._wake.set()
        return entry.launch, True

    async def cancel(self, run_id: UUID) -> Launch:
        entry = self._entries.get(run_id)
        if entry is None:
            raise not_found(f"run {run_id} that was launched here")
        if entry.launch.state is State.PENDING:
            self._end(entry, {"error": "cancelled before its turn", "reason": "cancelled"})
            return entry.launch
        if entry.launch.state is not State.RUNNING:
            raise ended(entry.launch)
        try:
            if not (self._folder / f"{run_id}.stop").exists():
                write(self._folder / f"{run_id}.stop", {"asked_at": self._clock()})
            self._stop(entry)
        except OSError as error:
            raise Problem(507, "disk", f"that it shall stop cannot be written down ({error.strerror})") from None
        entry.launch = replace(entry.launch, reason="stopping", message="asked to stop; the window drains")
        return entry.launch

    def _stop(self, entry: _Entry) -> None:
        """Send the signal that was asked for, once: a second one would kill the run instead of draining it."""
        run_id = entry.launch.run_id
        if (asked := self._file(run_id, "stop")) is None or "sent_at" in asked:
            return
        who = self._file(run_id, "pid")
        if who and alive(who):  # else it has not come so far: the next look tries again
            write(self._folder / f"{run_id}.stop", asked | {"sent_at": self._clock()})
            with suppress(ProcessLookupError, PermissionError):
                os.kill(who["pid"], signal.SIGINT)

    def find(self, run_id: UUID) -> Launch | None:
        entry = self._entries.get(run_id)
        if entry is None:
            return None
        launch = entry.launch
        progress = self._file(run_id, "progress") if launch.state is State.RUNNING else None
        ahead = sum(
            e.launch.state in (State.PENDING, State.RUNNING) and e.launch.run_id < run_id
            for e in self._entries.values()
        )
        queued = f"{ahead} runs come first" if ahead else "it is next"
        message = queued if launch.state is State.PENDING else launch.message
        return replace(launch, progress=progress, message=message, conditions=_conditions(launch, message))

    async def known(self, run_id: UUID) -> Launch | None:
        return self.find(run_id)

    def open(self) -> list[Launch]:
        found = [e.launch.run_id for e in self._entries.values() if e.launch.state in (State.PENDING, State.RUNNING)]
        return [launch for run_id in sorted(found, reverse=True) if (launch := self.find(run_id)) is not None]

    async def candidates(self) -> list[Candidate]:
        """The only pair is this machine: both workers run on it."""
        why = "both workers run on this machine: it finds faults of the software, and says nothing about a node"
        return [Candidate(host(), ["this machine"], host(), why, None, None, [])]

    # -- files ---------------------------------------------------------------------------------------

    def _take(self, values: dict[str, Any]) -> _Entry:
        run_id = UUID(values["run"])
        launch = Launch(
            run_id=run_id, name=str(run_id), state=State.PENDING, created_at=float(values["created_at"]),
            kind=values["kind"], workload=values["workload"], model=values["model"], node=host(), reference=host(),
            spec=values["spec"], synthetic=values["synthetic"],
        )  # fmt: skip
        self._entries[run_id] = _Entry(launch, values["key"], values["digest"])
        return self._entries[run_id]

    def _read(self, path: Path) -> None:
        entry = self._take(msgspec.json.decode(path.read_bytes()))
        run_id = entry.launch.run_id
        if (end := self._file(run_id, "end")) is not None:
            self._ended(entry, end)
        elif (self._folder / f"{run_id}.lock").exists():  # a process was started for it
            entry.launch = replace(entry.launch, state=State.RUNNING)

    def _file(self, run_id: UUID, suffix: str) -> dict[str, Any] | None:
        try:
            found = msgspec.json.decode((self._folder / f"{run_id}.{suffix}").read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        return found if isinstance(found, dict) else None

    def _end(self, entry: _Entry, end: dict[str, Any]) -> None:
        with suppress(OSError):
            write(self._folder / f"{entry.launch.run_id}.end", end | {"ended_at": self._clock()})
        self._ended(entry, end)

    def _ended(self, entry: _Entry, end: dict[str, Any]) -> None:
        failed = "error" in end
        entry.launch = replace(
            entry.launch,
            state=State.FAILED if failed else State.FINISHED,
            reason=str(end.get("reason") or ("not_started" if failed else "")),
            message=str(end.get("error") or ""),
        )

    def _prune(self) -> None:
        over = [e.launch.run_id for e in self._entries.values() if e.launch.state in (State.FINISHED, State.FAILED)]
        for run_id in sorted(over)[: max(0, len(over) - KEPT)]:
            del self._entries[run_id]
            for suffix in SUFFIXES:
                (self._folder / f"{run_id}.{suffix}").unlink(missing_ok=True)

    # -- work ----------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Start the next run when none goes on; see each to its end."""
        while True:
            running = [e for e in self._entries.values() if e.launch.state is State.RUNNING]
            for entry in running:
                try:
                    await self._look(entry)
                except Exception:
                    log.exception("run %s could not be looked after", entry.launch.run_id)
            if not running:
                waiting = [e for e in self._entries.values() if e.launch.state is State.PENDING]
                if waiting:
                    self._begin(min(waiting, key=lambda e: e.launch.run_id))
                    continue
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_S if running else 60.0)

    def _begin(self, entry: _Entry) -> None:
        run_id = entry.launch.run_id
        environment = dict(os.environ) if self._url is None else {**os.environ, "TANDEM_DB": self._url}
        if self._url is None:
            environment.pop("TANDEM_DB", None)
        environment.setdefault("TANDEM_COMPILED", worker_environment()["TANDEM_COMPILED"])
        logs = home() / "log"
        try:
            logs.mkdir(mode=0o700, exist_ok=True)
            (self._folder / f"{run_id}.lock").touch(mode=0o600)
            with (logs / f"{run_id}-supervisor.log").open("ab") as output:
                entry.process = subprocess.Popen(
                    [sys.executable, "-m", "tandem_api.launch.child", str(self._folder), str(run_id)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,  # Ctrl-C ends the API, not the run
                )
        except OSError as error:
            self._end(entry, {"error": f"no process could be started ({error.strerror})"})
            return
        # Somebody must wait for it, be the launcher there or not: else it stays as a zombie.
        threading.Thread(target=entry.process.wait, name=f"wait {run_id}", daemon=True).start()
        entry.launch = replace(entry.launch, state=State.RUNNING)

    async def _look(self, entry: _Entry) -> None:
        """Whether the run's process has ended, and how."""
        self._stop(entry)
        if entry.process is not None:
            if entry.process.poll() is None:
                return
        elif _held(self._folder / f"{entry.launch.run_id}.lock"):
            return
        end = self._file(entry.launch.run_id, "end")
        if end is None:
            # It was killed: what it had stored becomes the verdict, as with any command that comes after one that died.
            await asyncio.to_thread(self._recover)
            end = {"error": "its supervisor was killed", "reason": "supervisor_gone"}
            self._end(entry, end)
        else:
            self._ended(entry, end)
        self._prune()

    def _recover(self) -> None:
        engine = connect(self._database)
        try:
            recover(engine, self._database)
        except TandemError as error:
            log.warning("what a dead run left could not be recovered: %s", error)
        finally:
            engine.dispose()


def _held(path: Path) -> bool:
    """Whether a living process holds the lock."""
    try:
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except OSError:
        return False
    return False


def _conditions(launch: Launch, message: str) -> tuple[Condition, ...]:
    began = launch.state is not State.PENDING and launch.state is not State.FAILED
    over = launch.state in (State.FINISHED, State.FAILED)

    def told(on: bool) -> str:
        return "True" if on else "False"

    return (
        Condition("Running", told(began and not over), "Queued" if launch.state is State.PENDING else "Started",
                  message, launch.created_at),
        Condition("Finished", told(over), launch.state.capitalize(), launch.message, None),
    )  # fmt: skip
