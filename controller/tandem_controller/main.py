"""``tandem controller``: reads the settings, takes part in the election, and ends when its term does."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from tandem.db.engine import connect, mounted_url
from tandem.db.fence import newest
from tandem.errors import TandemError
from tandem.kube.client import Kube
from tandem.kube.lease import Election
from tandem.pairing.policy import read_policy
from tandem.pairrun import names
from tandem.serve import check, exposition, serve
from tandem.spec import validate
from tandem.yaml_file import read_mapping
from tandem_controller.controller import Controller
from tandem_controller.metrics import Metrics
from tandem_controller.release import release
from tandem_controller.settings import Settings

log = logging.getLogger("tandem.controller")
HEALTH_PORT, METRICS_PORT = 8081, 8080
RETRY_S = 10.0
"""How often a leader asks again for what it lacks to begin."""
STANDBY_S = 60.0
"""How long a replica may hear nothing of the Lease: one that stands by has nothing else to hear of."""


def run(config: Path, policy: Path | None, *, uninstall: bool = False) -> int:
    """Run until told to stop, or until another replica leads; or, to uninstall, end live pairs and free the nodes.

    Returns:
        The exit code.

    Raises:
        TandemError: the settings, the cluster's address or the database's URL cannot be used.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    settings = validate(Settings, read_mapping(config, "settings"), f"settings {config}")
    rules = read_policy(read_mapping(policy, "policy") if policy is not None else {})
    kube = Kube.connect(namespace=settings.namespace)
    if uninstall:
        release(kube, settings.namespace)
        return 0
    engine = connect(mounted_url(), pool_size=settings.workers + 2)
    return Process(kube, engine, settings, rules).run()


class Process:
    """One replica: health and metrics from the start, the controller once it leads."""

    def __init__(
        self, kube: Kube, engine: Engine, settings: Settings, rules: Any, *, health: int = HEALTH_PORT,
        metrics: int = METRICS_PORT,
    ) -> None:  # fmt: skip
        self.kube, self.engine, self.settings, self.rules = kube, engine, settings, rules
        self.metrics = Metrics()
        self.controller: Controller | None = None
        self._waits = ""
        """What a leader lacks to begin; empty once it has."""
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        self._messages: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.election = Election(
            kube, names.LEASE, f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}",
            on_lead=self._lead, on_lost=lambda why: self._messages.put(("lost", why)),
            lease_s=float(settings.lease_seconds), floor=lambda: newest(engine, names.LEASE),
            on_error=lambda line: log.warning("election: %s", line),
        )  # fmt: skip
        self.servers = [
            serve(health, {"/healthz": check(self._wrong), "/readyz": check(self._unready)}),
            serve(metrics, {"/metrics": exposition(self.metrics.registry)}),
        ]

    def run(self) -> int:
        """Take part until told to stop (0), or until the term ends (1: the pod is started again)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._messages.put(("stop", "")))
        self.election.start()
        log.info("standing by in namespace %s", self.settings.namespace)
        what, why = self._messages.get()
        if what == "lost":
            log.error("%s: this process ends", why)
        self._stop()
        return 1 if what == "lost" else 0

    def _lead(self, token: int) -> None:
        """Begin to work, in a thread of the election's: what is missing may come while this process waits for it."""
        try:
            cluster = self._cluster()
            with self._starting:
                if self._stopping.is_set():
                    return
                self.controller = Controller(
                    self.kube, self.engine, token, cluster, self.rules, self.settings, self.metrics,
                    leads=lambda: self.election.leads, ended=lambda why: self._messages.put(("lost", why)),
                )  # fmt: skip
            self.controller.start()
        except Exception as error:  # nobody else would hear of it
            self._messages.put(("lost", f"the controller could not start: {type(error).__name__}: {error}"))

    def _cluster(self) -> str:
        """UID of the cluster, asked for until it is told."""
        while not self._stopping.is_set():
            try:
                found = str(self.kube.get("/api/v1/namespaces/kube-system")["metadata"]["uid"])
            except TandemError as error:
                self._waits = f"which cluster this is cannot be told: {error}"
                log.error("waiting: %s", self._waits)  # noqa: TRY400 - one line with cause and mend
                self._stopping.wait(RETRY_S)
            else:
                self._waits = ""
                return found
        return ""

    def _stop(self) -> None:
        """First stop acting, then give the Lease up."""
        self._stopping.set()
        with self._starting:
            if self.controller is not None:
                self.controller.stop()
        self.metrics.leading.set(0)
        self.election.stop()
        for server in self.servers:
            server.shutdown()
            server.server_close()
        self.engine.dispose()

    def _unready(self) -> str | None:
        """What keeps a leader from its work; a replica that stands by is ready to lead, if it may."""
        return self._waits or self.election.refused or (self.controller.blind() if self.controller else None)

    def _wrong(self) -> str | None:
        """What makes this process count as dead: an election that hangs, a leader's watches or threads that do."""
        if (quiet := self.election.quiet_s) > STANDBY_S:
            return f"nothing was heard of the Lease for {quiet:.0f} s"
        return self.controller.wrong() if self.controller is not None else None
