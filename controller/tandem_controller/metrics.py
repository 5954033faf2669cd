"""The controller's own metrics. Labels are bounded: no run, pod or node name."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem import __version__
from tandem.pairrun import names
from tandem.pairrun.status import PairRunStatus

STATES = ("waiting", "starting", "running", "suspended", "backoff", "match", "mismatch", "inconclusive")


class Metrics:
    """One registry for one controller."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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
        self.leading = Gauge("tandem_controller_leading", "1 while this replica leads.", registry=self.registry)
        self.database_up = Gauge(
            "tandem_controller_database_up", "1 if PostgreSQL answered last time.", registry=self.registry
        )
        info = Gauge("tandem_build_info", "Version of Tandem.", ["version"], registry=self.registry)
        info.labels(__version__).set(1)

    def observe(self, depth: Callable[[], int], statuses: Callable[[], Iterable[PairRunStatus]]) -> None:
        """Read the queue's depth and the runs by state at each scrape."""
        self.registry.register(_Scrape(depth, statuses))


class _Scrape(Collector):
    def __init__(self, depth: Callable[[], int], statuses: Callable[[], Iterable[PairRunStatus]]) -> None:
        self._depth, self._statuses = depth, statuses

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("tandem_controller_queue_depth", "Keys that wait for a worker.", self._depth())
        runs = GaugeMetricFamily("tandem_controller_runs", "PairRuns by state.", labels=["state"])
        tally = Tally(map(state_of, self._statuses()))
        for state in STATES:
            runs.add_metric([state], tally.get(state, 0))
        yield runs


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
