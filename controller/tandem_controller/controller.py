"""The running controller: watches, a queue, workers, the poll of the database. Acts only while it leads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from tandem.db.fence import Fence, Fenced
from tandem.errors import TandemError
from tandem.kube.client import Kube, Object
from tandem.kube.informer import key_of
from tandem.pairing.policy import Policy
from tandem.pairrun import names
from tandem_controller.cache import EVERY_RUN, Caches
from tandem_controller.facts import FactStore
from tandem_controller.metrics import Metrics
from tandem_controller.observed import Facts
from tandem_controller.parts import Parts
from tandem_controller.reconcile import Reconciler
from tandem_controller.refusals import PodRefusals
from tandem_controller.settings import Settings
from tandem_controller.verdicts import Verdicts
from tandem_controller.workqueue import WorkQueue
from tandem_controller.world import Nodes, PodSnapshot

log = logging.getLogger("tandem.controller")
COMPLAIN_S = 60.0
"""How often it is said what the controller waits for before it can work."""
QUIET_S = 120.0
"""Beyond a resync: how long no event and no list may arrive before the process counts as dead."""
SWEEP_S = 60.0
"""How often runs of vanished PairRuns are looked for."""


class Controller:
    """One term of one leader.

    Args:
        kube: the cluster.
        engine: PostgreSQL; may be away.
        token: fencing token of the term.
        cluster: UID of the cluster: its runs are told from those of others in the same database.
        policy: what pairing reads from nodes.
        settings: of the installation.
        metrics: shared by all terms of the process.
        leads: whether this process may act now.
        ended: called once, with the reason, when the term is over: the process must end.
    """

    def __init__(
        self,
        kube: Kube,
        engine: Engine,
        token: int,
        cluster: str,
        policy: Policy,
        settings: Settings,
        metrics: Metrics,
        leads: Callable[[], bool],
        ended: Callable[[str], None],
    ) -> None:
        self.settings, self.metrics, self._leads, self._ended = settings, metrics, leads, ended
        self.queue = WorkQueue()
        self.caches = Caches(kube, settings, self.queue.add, self._watch_failed)
        self.facts = FactStore(engine)
        self.verdicts = Verdicts(engine, Fence(engine, names.LEASE, token), cluster, settings.namespace)
        self._parts = Parts(
            kube=kube, caches=self.caches, facts=self.facts, verdicts=self.verdicts, policy=policy, settings=settings,
            metrics=metrics, snapshot=PodSnapshot(kube, settings.pairing_seconds / 2), nodes=Nodes(),
            refusals=PodRefusals(kube),
        )  # fmt: skip
        self._reconciler = Reconciler(self._parts)
        self._stopping = threading.Event()
        self._looked: set[str] = set()
        """Keys of the PairRuns that this leader has reconciled once."""
        self._threads: list[threading.Thread] = []
        metrics.observe(
            self.queue.__len__, lambda: map(self.caches.status, self.caches.pairruns()),
            lambda: sum(not informer.synced or informer.refused is not None for informer in self.caches.informers),
            lambda: len({key_of(obj) for obj in self.caches.pairruns()} - self._looked),
        )  # fmt: skip

    def start(self) -> None:
        """Follow the cluster, then work. Returns once the caches are filled, or the controller is stopped.

        However long that takes: a process that ends does not get the right that is missing, and `blind` says what is.
        """
        for informer in self.caches.informers:
            informer.start()
        said = time.monotonic()
        for informer in self.caches.informers:
            while not informer.wait_synced(0.5):
                if self._stopping.is_set():
                    return
                if time.monotonic() - said > COMPLAIN_S:
                    said = time.monotonic()
                    log.error("waiting: %s", self.blind())
        if self._stopping.is_set():
            return
        self.facts.refresh(self._live())
        for index in range(self.settings.workers):
            self._spawn(self._work, f"worker-{index}")
        self._spawn(self._poll, "facts")
        self.metrics.leading.set(1)
        log.info("leading: %d PairRuns", len(self.caches.pairruns()))

    def stop(self) -> None:
        """Finish what is under way, and no more."""
        self._stopping.set()
        self.queue.close()
        for thread in self._threads:
            thread.join(60)
        for informer in self.caches.informers:
            informer.stop()

    def blind(self) -> str | None:
        """What of the cluster is not seen, so that there is no work or it rests on old news; None while all is."""
        for informer in self.caches.informers:
            if not informer.synced:
                return f"{informer.path} could not be listed yet: {informer.error or 'no answer'}"
            if informer.refused is not None:
                return f"{informer.path} is no longer followed: {informer.refused}"
        return None

    def wrong(self) -> str | None:
        """What makes this process count as dead; None while it is well."""
        limit = self.settings.resync_seconds + QUIET_S
        for informer in self.caches.informers:
            quiet = time.monotonic() - informer.last_heard
            if quiet > limit:
                return f"nothing was heard of {informer.path} for {quiet:.0f} s: {informer.error or 'no error'}"
        dead = [t.name for t in self._threads if not t.is_alive()]
        return f"threads have ended: {', '.join(dead)}" if dead and not self._stopping.is_set() else None

    # -- threads -----------------------------------------------------------------------------------

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (key := self.queue.take()) is not None:
            try:
                if not self._leads():
                    self._end("this replica no longer leads")
                    return
                self._one(key)
            finally:
                self.queue.done(key)

    def _one(self, key: str) -> None:
        """One reconcile; whatever goes wrong with one PairRun never stops the others."""
        if key == EVERY_RUN:
            for obj in self.caches.pairruns():
                if not self.caches.status(obj).holds(names.FINISHED):
                    self.queue.add(key_of(obj))
            return
        try:
            with self.metrics.reconcile_seconds.time():
                after = self._reconciler.reconcile(key)
        except Fenced as error:
            self._end(str(error))
        except Exception as error:
            self.metrics.reconcile_errors.inc()
            known = isinstance(error, TandemError)
            wait = self.queue.failed(key)
            log.warning("%s: %s; again in %.1f s", key, error, wait, exc_info=None if known else error)
        else:
            self.queue.succeeded(key)
            (self._looked.add if self.caches.pairrun(key) is not None else self._looked.discard)(key)
            if after is not None:
                self.queue.add_after(key, after)

    def _poll(self) -> None:
        """Ask PostgreSQL about the live runs now and then; look again at those for which it matters."""
        last_error, swept = self.facts.error, 0.0
        while not self._stopping.wait(self.settings.facts_seconds):
            live = self._live()
            before = {run_id: self.facts.known(run_id) for run_id in live}
            changed = self.facts.refresh(live)
            error = self.facts.error
            self.metrics.database_up.set(error is None)
            if (error is None) != (last_error is None):
                log.warning("PostgreSQL: %s", error or "answers again")
                changed = {run_id: self.facts.of(run_id) for run_id in live}
                before = {}
            last_error = error
            for run_id, facts in changed.items():
                if run_id in live and _matters(before.get(run_id), facts):
                    self.queue.add(key_of(live[run_id]))
                elif run_id in live:
                    self.queue.add_after(key_of(live[run_id]), self.settings.progress_seconds)
            if error is None and time.monotonic() - swept > SWEEP_S:
                swept = time.monotonic()
                self._sweep()

    def _live(self) -> dict[UUID, Object]:
        """Run id -> PairRun, of those that have not finished."""
        return {
            names.run_id_of(obj["metadata"]["uid"], obj["metadata"]["creationTimestamp"]): obj
            for obj in self.caches.pairruns()
            if not self.caches.status(obj).holds(names.FINISHED)
        }

    def _sweep(self) -> None:
        """Runs whose PairRun was deleted: close them with what is stored."""
        live = {obj["metadata"]["uid"] for obj in self.caches.pairruns()}
        try:
            for run_id, attempts in self.verdicts.left_behind(live):
                for number in attempts:
                    self.verdicts.close(run_id, number, "pairrun_deleted")
                self.verdicts.judge(run_id)
                self.facts.forget(run_id)
                log.info("run %s: its PairRun was deleted; closed", run_id)
        except Fenced as error:
            self._end(str(error))
        except TandemError as error:
            log.warning("runs of deleted PairRuns could not be closed: %s", error)

    def _watch_failed(self, line: str) -> None:
        self.metrics.watch_errors.inc()
        log.warning("%s", line)

    def _end(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._ended(reason)


def _matters(before: Facts | None, now: Facts) -> bool:
    """Whether a change wants an answer at once; progress alone can wait for its turn."""
    if before is None:
        return True
    old = (before.reachable, before.run_stored, before.attempts, before.judgement, before.live.first)
    return old != (now.reachable, now.run_stored, now.attempts, now.judgement, now.live.first)
