"""The controller's own metrics. Labels are bounded: no run, pod or node name."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem import __version__
from tandem.pairrun import names
from tandem.pairrun.status import PairRunStatus, seconds
from tandem.vocabulary import Kind, Verdict

LIVE = {
    "waiting": names.PAIRED, "starting": names.PAIRED, "running": names.RUNNING, "suspended": names.RUNNING,
    "backoff": names.PAIRED,
}  # fmt: skip
"""States of a PairRun that has no verdict -> the condition that says since when."""
STATES = (*LIVE, *Verdict)
REASONS = 50
"""Reasons that are told apart: a worker names its own, and the suspect's may be anything."""
OTHER = "other"
ALERTED = "reference_differs"
"""The reason that an alert waits for: told from 0 on, and by its name however many others came first."""


class Metrics:
    """One registry for one controller."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._reasons = {ALERTED}
        self._finished = Counter(
            "tandem_controller_runs_finished_total", "PairRuns that got their verdict.", ["kind", "verdict"],
            registry=self.registry,
        )  # fmt: skip
        for kind in Kind:
            for verdict in Verdict:
                self._finished.labels(kind, verdict)  # from 0, so that the first one is an increase
        self._inconclusive = Counter(
            "tandem_controller_runs_inconclusive_total", "Inconclusive PairRuns by reason.", ["reason"],
            registry=self.registry,
        )  # fmt: skip
        self._inconclusive.labels(ALERTED)
        self.reconcile_seconds = Histogram(
            "tandem_controller_reconcile_seconds", "Time of one reconcile.", registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )  # fmt: skip
        self.reconcile_errors = Counter(
            "tandem_controller_reconcile_errors_total", "Reconciles that failed and come again.", registry=self.registry
        )
        self.status_writes = Counter(
            "tandem_controller_status_writes_total", "Writes of a PairRun's status.", registry=self.registry
        )
        self.watch_errors = Counter(
            "tandem_controller_watch_errors_total", "Watches and lists that broke.", registry=self.registry
        )
        self.leading = Gauge(
            "tandem_controller_leading", "1 while this replica leads and works.", registry=self.registry
        )
        self.database_up = Gauge(
            "tandem_controller_database_up", "1 if PostgreSQL answered last time.", registry=self.registry
        )
        info = Gauge("tandem_build_info", "Version of Tandem.", ["version"], registry=self.registry)
        info.labels(__version__).set(1)

    def observe(
        self, depth: Callable[[], int], statuses: Callable[[], Iterable[PairRunStatus]],
        unseen: Callable[[], int] = lambda: 0, unlooked: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """Read the queue's depth, the runs by state and how much is not seen or not looked at yet at each scrape."""
        self.registry.register(_Scrape(depth, statuses, unseen, unlooked, self._clock))

    def finished(self, kind: str, status: PairRunStatus) -> None:
        """A PairRun got its verdict, or will never have one."""
        verdict = status.verdict or Verdict.INCONCLUSIVE
        self._finished.labels(kind, verdict).inc()
        if verdict == Verdict.INCONCLUSIVE:
            reason = status.reason.split(":", 1)[0] or OTHER
            if reason not in self._reasons and len(self._reasons) >= REASONS:
                reason = OTHER
            self._reasons.add(reason)
            self._inconclusive.labels(reason).inc()


class _Scrape(Collector):
    def __init__(
        self, depth: Callable[[], int], statuses: Callable[[], Iterable[PairRunStatus]], unseen: Callable[[], int],
        unlooked: Callable[[], int], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._depth, self._statuses, self._clock = depth, statuses, clock
        self._unseen, self._unlooked = unseen, unlooked

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("tandem_controller_queue_depth", "Keys that wait for a worker.", self._depth())
        yield GaugeMetricFamily(
            "tandem_controller_unseen_collections",
            "Collections that could not be listed yet, or that the API server refuses: the log names the right.",
            self._unseen(),
        )
        yield GaugeMetricFamily(
            "tandem_controller_unlooked_runs", "PairRuns that this leader has not looked at yet.", self._unlooked()
        )
        runs = GaugeMetricFamily("tandem_controller_runs", "PairRuns by state.", labels=["state"])
        seen = [(state_of(status), status) for status in self._statuses()]
        tally = Tally(state for state, _ in seen)
        for state in STATES:
            runs.add_metric([state], tally.get(state, 0))
        yield runs
        now = self._clock()
        oldest = GaugeMetricFamily(
            "tandem_controller_oldest_run_seconds", "How long the one longest in a state has been in it; 0: none is.",
            labels=["state"],
        )  # fmt: skip
        for state in LIVE:
            oldest.add_metric(
                [state], max((_age(now, since(s, state)) for name, s in seen if name == state), default=0)
            )
        yield oldest
        yield GaugeMetricFamily(
            "tandem_controller_oldest_progress_seconds",
            "Longest time since a running PairRun got further; 0: none runs.",
            max((_age(now, moved(s)) for name, s in seen if name == "running"), default=0),
        )  # fmt: skip
        unpaired = GaugeMetricFamily(
            "tandem_controller_unpaired_runs", "PairRuns without a partner, by reason.", labels=["reason"]
        )
        waiting = [s.condition(names.PAIRED) for name, s in seen if name in ("waiting", "backoff")]
        for reason, count in sorted(Tally(c.reason for c in waiting if c is not None).items()):
            unpaired.add_metric([reason], count)
        yield unpaired


def _age(now: float, then: float | None) -> float:
    return max(0.0, now - then) if then is not None else 0.0


def since(status: PairRunStatus, state: str) -> float | None:
    """When a PairRun came into the live state that it is in, UTC seconds; None if it does not say."""
    condition = status.condition(LIVE[state])
    return seconds(condition.last_transition_time) if condition is not None else None


def moved(status: PairRunStatus) -> float | None:
    """When a running PairRun last got further: its counts, or its pods' start."""
    times = (seconds(status.progress_at), since(status, "running"))
    return max((at for at in times if at is not None), default=None)


def state_of(status: PairRunStatus) -> str:
    """One word for where a run is."""
    if status.holds(names.FINISHED):
        return status.verdict or "inconclusive"
    if status.holds(names.RUNNING):
        return "running"
    running, paired = status.condition(names.RUNNING), status.condition(names.PAIRED)
    if running is not None and running.reason == "Suspended":
        return "suspended"
    if paired is not None and paired.reason == "BackOff":
        return "backoff"
    return "starting" if status.holds(names.PAIRED) else "waiting"
