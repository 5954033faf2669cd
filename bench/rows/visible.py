"""How long after a corrupting operation its row can be read by others."""

from __future__ import annotations

import tempfile
import threading
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from bench.devices import use_devices
from bench.options import Options
from bench.results import Row, row
from bench.rows.records import new_run
from bench.rows.sync import PROFILE
from bench.stats import quantile
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect, open_connection
from tandem.db.sink import Sink
from tandem.faults.injection import load_profile

POLL_S = 0.005
LAST_S = 10.0
"""How long the poller waits for the last rows."""
Key = tuple[int, int, int]
"""Step, site, rank."""


def measure(options: Options) -> list[Row]:
    """A whole pair in this process over the real link, its sink on the embedded database; every step corrupts."""
    use_devices(2 * options.tp)
    from pairs import run_pair
    from tandem_worker.session.reference import ReferenceSession
    from tandem_worker.session.suspect import SuspectSession

    with as_file(files("tandem").joinpath("fault_profiles", f"{PROFILE}.toml")) as path:
        profile = load_profile(path)
        spec = options.spec(steps=max(options.blocks, 1), kind="suspect", fault=path)
    done: dict[Key, float] = {}
    with embedded_database() as url, tempfile.TemporaryDirectory() as spool:
        engine = connect(url)
        run_id = new_run(engine)
        sink = Sink(url, Path(spool), run_id, 1)
        poller = Poller(url, run_id)

        def tamper(reference: ReferenceSession, suspect: SuspectSession) -> None:
            reference.ledger.sink, reference.ledger.run_id = sink, run_id
            suspect.inbox.queue = Stamped(suspect.inbox.queue, done)  # type: ignore[assignment]

        outcome = run_pair(spec, profile, tamper=tamper, timeout=1800.0)
        sink.close()
        poller.stop({key for key in done if key[0] > 0})
        with open_connection(url) as conn:
            query = "SELECT step, site, rank, extract(epoch FROM detected_at) FROM mismatches WHERE run_id = %s"
            detected = {(s, i, r): float(at) for s, i, r, at in conn.execute(query, [run_id])}
        engine.dispose()
    if outcome.errors or not detected:
        raise RuntimeError(f"the measured pair failed ({outcome.reason}): {outcome.errors}")
    if missing := set(detected) - set(done):
        raise RuntimeError(f"{len(missing)} rows belong to no corrupting operation, the first {min(missing)}")
    after = [poller.seen[key] - done[key] for key in detected]
    setting = options.setting(fault=PROFILE, poll_ms=1000 * POLL_S, replays=spec.replays)
    return [
        row(
            "visible.p99", "corrupt operation done to row visible, 99th percentile", quantile(after, 0.99), setting,
            unit="s", bound=1.0,
        ),
        row("visible.median", "the same, median", quantile(after), setting, unit="s"),
        row(
            "visible.detected", "row made by the reference to row visible, 99th percentile",
            quantile([poller.seen[key] - at for key, at in detected.items()], 0.99), setting, unit="s",
        ),
    ]  # fmt: skip


class Stamped:
    """The suspect's event queue, noting when the digests of each corrupted tensor reached the host.

    An operation that a roll-back discards is noted again when it runs again: the last time is the surviving one's.
    """

    def __init__(self, queue: Any, done: dict[Key, float]) -> None:
        self._queue, self._done = queue, done

    def put(self, event: Any) -> None:
        """Called by the thread that waits for the digests."""
        from tandem_worker.lockstep.inbox import DigestReady

        if isinstance(event, DigestReady) and (changed := event.execution.changed) is not None:
            now, execution = time.time(), event.execution
            for rank, output in np.argwhere(changed[:, :-1, 0] > 0).tolist():
                self._done[execution.step, execution.op.sites[output].number, rank] = now
        self._queue.put(event)

    def get(self, timeout: float | None = None) -> Any:
        return self._queue.get(timeout=timeout)

    def get_nowait(self) -> Any:
        return self._queue.get_nowait()


class Poller:
    """Another reader of the database, which notes when it first sees each row."""

    def __init__(self, url: str, run_id: UUID) -> None:
        self.seen: dict[Key, float] = {}
        self._url, self._run_id = url, run_id
        self._wanted: set[Key] | None = None
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    def stop(self, wanted: set[Key]) -> None:
        """Wait until these rows are seen, as far as they ever are."""
        self._wanted = wanted
        self._thread.join(LAST_S)

    def _run(self) -> None:
        newest = 0
        with open_connection(self._url) as conn:
            conn.autocommit = True
            query = "SELECT step, site, rank FROM mismatches WHERE run_id = %s AND step >= %s"
            while self._wanted is None or not self._wanted <= set(self.seen):
                found = conn.execute(query, [self._run_id, newest]).fetchall()
                now = time.time()
                for key in found:
                    self.seen.setdefault(key, now)
                newest = max([newest, *(step for step, _, _ in found)])
                time.sleep(POLL_S)
