"""Pairs under a supervisor process of their own, with an embedded PostgreSQL of their own: for what is killed, frozen
or cut off. Run as a script it is that process: a run spec (JSON) as its argument, one JSON object a line on standard
output.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import psutil

from tandem.cli.output import database_url, exit_code
from tandem.db import queries
from tandem.db.embedded import embedded_database, status
from tandem.db.engine import connect
from tandem.db.server import Server
from tandem.errors import TandemError
from tandem.progress import ProgressEvent
from tandem.records import RunRecords
from tandem.spec import RunSpec, validate
from tandem.vocabulary import Role

DEADLINE_S = 900.0
"""For everything that is waited for: a slow machine is no failure, a hang is."""
OF_THIS_PROCESS = ("XLA_FLAGS", "PJRT_NPROC", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "TANDEM_DB", "TANDEM_DEBUG")
"""Environment that the tests set for jax in their own process, and what would lead commands elsewhere."""

FAULTS = """
name = "two elements per tensor"
[[fault]]
kind = "flip"
elements = 2
bits = "mantissa"
phase = "fwd"
module = "ffn"
tensor = "out"
"""


@contextmanager
def new_home() -> Iterator[Home]:
    """A data folder that PostgreSQL's user can enter; nothing may run in it any more when it is removed."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-run-"))
    folder.chmod(0o755)
    home = Home(folder)
    try:
        yield home
    finally:
        left = home.processes()
        for process in left:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, f"still running: {left}"


@dataclass
class Home:
    """One user's data folder, and the commands that run in it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in OF_THIS_PROCESS}
        return kept | {"TANDEM_HOME": str(self.folder)}

    def command(self, *arguments: object, **popen: Any) -> subprocess.Popen[str]:
        """A `tandem` command, running."""
        return subprocess.Popen(
            [sys.executable, "-m", "tandem.cli.app", *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment, **popen,
        )  # fmt: skip

    def tandem(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a `tandem` command."""
        process = self.command(*arguments)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def pair(self, **spec: Any) -> Pair:
        """A pair that starts now."""
        return Pair(self, spec)

    def fault_profile(self) -> Path:
        path = self.folder / "faults.toml"
        path.write_text(FAULTS)
        return path

    def records(self, run_id: UUID) -> RunRecords:
        """What is stored of a run; recovers nothing."""
        with embedded_database(home=self.folder) as url:
            engine = connect(url)
            try:
                return queries.load_run(engine, run_id)
            finally:
                engine.dispose()

    def run_ids(self) -> list[UUID]:
        with embedded_database(home=self.folder) as url:
            engine = connect(url)
            try:
                return [summary.run.run_id for summary in queries.list_runs(engine)]
            finally:
                engine.dispose()

    def postmaster(self) -> int | None:
        return Server(self.folder / "postgres").pid()

    def spooled(self) -> list[Path]:
        """Everything in the spool: segments, and what a replay put into quarantine."""
        folder = self.folder / "spool"
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []

    def processes(self) -> list[psutil.Process]:
        """What runs in this folder: by its environment, or its working directory (PostgreSQL)."""
        found = []
        for process in psutil.process_iter():
            try:
                here = process.environ().get("TANDEM_HOME") == str(self.folder) and process.pid != os.getpid()
                if here or Path(process.cwd()).is_relative_to(self.folder):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def at_rest(self) -> None:
        """Nothing runs, nothing is spooled: what every end leaves, once the command after it has run."""
        assert self.processes() == []
        assert self.spooled() == []
        assert not status(home=self.folder).running


@dataclass
class Pair:
    """A supervisor process with its two workers."""

    home: Home
    spec: dict[str, Any]
    events: list[ProgressEvent] = field(default_factory=list)
    run_id: UUID | None = None
    workers: dict[Role, int] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    """``verdict`` and ``reason``, or ``error`` and ``code``, if the supervisor came to its end."""
    errors: str = ""

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._over = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the pair
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(self.spec, default=str)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, env=self.home.environment,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, what: Callable[[ProgressEvent], bool]) -> ProgressEvent:
        """The first event, from now on or already here, of which ``what`` is true."""
        seen = 0

        def there() -> bool:
            nonlocal seen
            while seen < len(self.events):
                if what(self.events[seen]):
                    return True
                seen += 1
            return self._over

        with self._changed:
            assert self._changed.wait_for(there, DEADLINE_S), f"never came; last: {self.events[-1:]}"
            assert seen < len(self.events), f"the supervisor ended first: {self.outcome} {self.stderr()}"
            return self.events[seen]

    def wait_for_start(self) -> None:
        """Until both workers were started."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.workers or self._over, DEADLINE_S)
            assert self.workers, f"the supervisor ended first: {self.outcome} {self.stderr()}"

    def after(self, steps: int) -> ProgressEvent:
        """The event that tells of ``steps`` more finished steps."""
        so_far = self.events[-1].step if self.events else 0
        return self.wait_for(lambda event: event.step >= so_far + steps)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for the supervisor and its workers; returns its exit code (negative: killed by that signal)."""
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self.errors = self._errors_so_far()
        self._errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        psutil.wait_procs([p for pid in self.workers.values() if (p := _process(pid)) is not None], DEADLINE_S)
        assert [pid for pid in self.workers.values() if _process(pid) is not None] == [], "a worker outlives its pair"
        return code

    def stderr(self) -> str:
        """What the supervisor process wrote to standard error: a trace, where a test fails."""
        return self.errors or self._errors_so_far()

    def _errors_so_far(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, value = json.loads(line)
            with self._changed:
                if kind == "event":
                    self.events.append(msgspec.convert(value, ProgressEvent))
                elif kind == "started":
                    self.run_id = UUID(value["run"])
                    self.workers = {Role(role): pid for role, pid in value["workers"].items()}
                else:
                    self.outcome = value
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()


def _process(pid: int) -> psutil.Process | None:
    """A living process; a zombie (whose parent, the supervisor, was killed) is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


# -- what stored rows must be ------------------------------------------------------------------------

Row = tuple[object, ...]
Truth = dict[int, frozenset[Row]]
"""Step -> its mismatches, as the first run that came so far stored them."""


def check_rows(records: RunRecords, truth: Truth, acknowledged: int) -> None:
    """Nothing is lost and nothing doubled: what is stored is a whole beginning of what the reference wrote.

    The reference writes a step's mismatches and injected faults before the step itself. So every stored step has all of
    them; they equal the injector's log element by element, and those of any other run of the same seed. At
    most one step, the one that was cut off, has rows without being stored itself.

    Args:
        records: what is stored.
        truth: of the runs before; extended.
        acknowledged: records of which the reference said that the database has them.
    """
    numbers = [step.step for step in records.steps]
    assert numbers == list(range(len(numbers)))
    rows: dict[int, list[Row]] = {}
    found: dict[tuple[int, int, int], int | None] = {}
    for m in records.mismatches:
        rows.setdefault(m.step, []).append(
            (m.site, m.rank, m.tensor, m.cause, m.mismatched, m.first_index, tuple(m.bits or ()), m.replay)
        )
        found[m.step, m.site, m.rank] = m.mismatched
    injected = {(f.step, f.site, f.rank): f.changed for f in records.faults if f.step < len(numbers)}
    assert {key: n for key, n in found.items() if key[0] < len(numbers)} == injected
    assert set(rows) <= set(range(len(numbers) + 1))
    whole = None
    for step in records.steps:
        mine = rows.get(step.step, [])
        assert len(mine) == len(set(mine)) == step.rows == sum(c.mismatched_sites for c in step.classes.values())
        if step.step:
            compared = {name: (c.sites, c.elements) for name, c in step.classes.items()}
            assert whole in (None, compared)
            whole = compared
        assert truth.setdefault(step.step, frozenset(mine)) == frozenset(mine)
    stored = (records.steps, records.mismatches, records.controls, records.faults, records.closings)
    assert sum(map(len, stored)) >= acknowledged


# -- the supervisor process --------------------------------------------------------------------------


def _say(kind: str, value: Any) -> None:
    sys.stdout.write(json.dumps([kind, value]) + "\n")
    sys.stdout.flush()


def main() -> int:
    from tandem.supervisor import Local, Stop, run_local

    spec = validate(RunSpec, json.loads(sys.argv[1]), "spec")
    stop = Stop()
    try:
        with database_url(None) as url, stop.on_interrupt():
            local = Local(
                url=url,
                on_progress=lambda event: _say("event", msgspec.to_builtins(event)),
                on_started=lambda run, workers: _say("started", {"run": str(run), "workers": workers}),
            )
            records = run_local(spec, local, stop)
    except TandemError as error:
        _say("end", {"error": str(error), "code": error.exit_code})
        return error.exit_code
    _say("end", {"verdict": records.run.verdict, "reason": records.run.reason})
    return exit_code(records.run.verdict)


def until(what: Callable[[], bool], message: str) -> None:
    """Wait for a condition that nobody announces."""
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
