"""A worker in a pod: told by its environment and by files, asked to stop by signals.

No supervisor stands beside it. The first SIGTERM or SIGINT ends the attempt cleanly (window drained, end controls,
closing record), the second at once. A thread of their own waits for the signals' numbers on a pipe: the main thread may
be inside a compiler for minutes, and would not run a Python handler before it comes back.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from uuid import UUID

import msgspec

from tandem.db.engine import parse
from tandem.errors import SetupError, TandemError
from tandem.spec import RunSpec, validate
from tandem.vocabulary import POD_EXIT_INCONCLUSIVE, Role
from tandem.worker_io import DATABASE_FOLDER, LINK_FOLDER, Failed, KeyFile, WorkerConfig
from tandem_worker.outlet import LAST_MESSAGE, PodLog
from tandem_worker.worker import Worker, work

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True, slots=True)
class PodConfig:
    """What a pod's worker is told."""

    worker: WorkerConfig
    records_timeout: float
    """Seconds that the reference's end waits for the database."""


def pod(
    link: Path = Path(LINK_FOLDER), database: Path = Path(DATABASE_FOLDER), last_message: Path = LAST_MESSAGE
) -> NoReturn:
    """Run the worker of this pod to its end; exits with 40, 41 or 42.

    Args:
        link: folder of the link's keys.
        database: folder of the database's URL (reference only).
        last_message: where the reason and message of the end go, if that file exists.
    """
    pipe = signal_pipe()
    log = PodLog(os.environ.get("TANDEM_ROLE", "worker"), last_message=last_message)
    try:
        config = read_config(os.environ, link, database)
        log = PodLog(config.worker.role, secrets_of(config.worker), last_message=last_message)
        signals = Signals(log, pipe)
        threading.Thread(target=signals.attend, name="signals", daemon=True).start()
        worker = prepared(config, log)
    except TandemError as error:
        log.ended(Failed("input", str(error), POD_EXIT_INCONCLUSIVE))
        os._exit(POD_EXIT_INCONCLUSIVE)
    except Exception as error:
        log.ended(Failed("crashed", f"the worker could not start: {type(error).__name__}: {error}"))
        os._exit(POD_EXIT_INCONCLUSIVE)
    work(worker, lambda: signals.watch(worker))


def read_config(
    environment: Mapping[str, str], link: Path = Path(LINK_FOLDER), database: Path = Path(DATABASE_FOLDER)
) -> PodConfig:
    """The configuration of this pod.

    Args:
        environment: ``TANDEM_...`` variables.
        link: folder of the link's keys.
        database: folder of the database's URL (reference only).

    Raises:
        TandemError: one line that names what is missing or wrong, and shows nothing secret.
    """

    def variable(name: str) -> str:
        if not (value := environment.get(name, "")):
            raise SetupError(f"the variable {name} is missing: this program is started by Tandem's controller")
        return value

    try:
        role, run_id = Role(variable("TANDEM_ROLE")), UUID(variable("TANDEM_RUN_ID"))
        attempt = int(variable("TANDEM_ATTEMPT"))
        timeout = float(environment.get("TANDEM_RECORDS_TIMEOUT") or 600)
        metrics = int(environment["TANDEM_METRICS_PORT"]) if environment.get("TANDEM_METRICS_PORT") else None
        node_devices = int(environment.get("TANDEM_NODE_DEVICES") or 0)
        spec = msgspec.json.decode(variable("TANDEM_SPEC"))
    except (ValueError, msgspec.MsgspecError) as error:
        raise SetupError(
            f"a TANDEM_ variable cannot be read ({error}): is the controller of the same version?"
        ) from None
    values = validate(RunSpec, spec, "TANDEM_SPEC").model_dump(mode="json", exclude_unset=True)
    leads = role is Role.REFERENCE
    url = _file(database / "uri") if leads else None
    if url is not None:
        parse(url)
    worker = WorkerConfig(
        role=role, run_id=run_id, attempt=attempt, spec=values, endpoint=variable("TANDEM_ENDPOINT"),
        own_public=_file(link / KeyFile.OWN_PUBLIC), own_secret=_file(link / KeyFile.OWN_SECRET),
        peer_public=_file(link / KeyFile.PEER_PUBLIC), database=url, node=environment.get("TANDEM_NODE", ""),
        node_devices=node_devices,
        spool=str(Path(variable("TANDEM_HOME")) / "spool") if leads else None,
        suspect_node=environment.get("TANDEM_SUSPECT_NODE", ""), metrics_port=metrics if leads else None,
    )  # fmt: skip
    return PodConfig(worker, timeout)


def _file(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not plain text"
        raise SetupError(f"{path} cannot be read ({why}): look at the Secrets and volumes of this pod") from None
    if not text:
        raise SetupError(f"{path} is empty: look at the Secrets of this pod")
    return text


def secrets_of(config: WorkerConfig) -> list[str]:
    """What no line of the log may show."""
    if config.database is None:
        return [config.own_secret]
    password = parse(config.database).password
    return [config.own_secret, config.database, *([str(password)] if password else [])]


def prepared(config: PodConfig, log: PodLog) -> Worker:
    """The worker, its inputs read and its spool tried.

    Raises:
        TandemError: the first thing that is wrong.
    """
    from tandem.recovery import check_spool
    from tandem_worker.prepare import Inputs

    if config.worker.spool is not None:
        folder = Path(config.worker.spool)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"the spool in {folder} cannot be made ({error.strerror}): is the volume there?") from None
        check_spool(folder)
    inputs = Inputs(validate(RunSpec, config.worker.spec, "spec"))
    return Worker(config.worker, inputs.spec, log, inputs=inputs, records_timeout=config.records_timeout)


def signal_pipe() -> int:
    """A file descriptor from which the numbers of SIGTERM and SIGINT can be read, one byte each, as they come.

    Blocking the signals and waiting for them would need the mask in every thread, also in those that libraries made
    while they were imported. The interpreter's C handler writes to the pipe from whichever thread the signal meets.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    return read


class Signals:
    """SIGTERM and SIGINT, one after the other, from the process's start to its end.

    Args:
        log: told of them.
        pipe: of `signal_pipe`.
    """

    def __init__(self, log: PodLog, pipe: int) -> None:
        self._log, self._pipe = log, pipe
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._asked = threading.Event()

    def attend(self) -> NoReturn:
        """A thread of its own: the first signal asks for a clean end, the second ends at once."""
        self._log.log(f"{self._next()}: ends after the current step; a second signal ends at once")
        with self._lock:
            if self._worker is None:
                self._log.ended(Failed("stopped_early", "stopped before anything was compared"))
                os._exit(POD_EXIT_INCONCLUSIVE)
            self._asked.set()
        self._log.log(f"{self._next()} again: ends at once")
        self._log.ended(Failed("killed", "a second signal came before the attempt was closed"))
        os._exit(POD_EXIT_INCONCLUSIVE)

    def watch(self, worker: Worker) -> None:
        """Stop the worker when the first signal has come."""
        with self._lock:
            self._worker = worker
        self._asked.wait()
        worker.stop()

    def _next(self) -> str:
        return signal.Signals(os.read(self._pipe, 1)[0]).name
