"""The fleet as Prometheus sees it: nodes by verdict, runs of the last day. Served by the API, one question for many
scrapes; needs prometheus-client.

While the database does not answer, the gauges are gone rather than old, and ``tandem_api_database_up`` is 0.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from tandem.db.nodes import FleetLine
from tandem.errors import TandemError
from tandem.vocabulary import NodeVerdict, Verdict, Workload

DAY_S = 86_400.0
NAMED = 1000
"""Nodes that are named at most, and reasons; more are only counted."""
REASONS = 50
OTHER = "other"
FIRST_S = 5.0
"""How long a scrape waits where nothing is known that may be shown."""

_RUNS = text(
    "SELECT r.workload, coalesce(r.verdict, '') AS verdict, CASE WHEN r.verdict = 'inconclusive' "
    "THEN split_part(r.reason, ':', 1) ELSE '' END AS reason, count(*) AS runs, "
    "coalesce(sum(p.device_seconds), 0) AS device_seconds, "
    "array_agg(DISTINCT r.suspect_node) FILTER (WHERE r.verdict IN ('match', 'mismatch')) AS tested "
    "FROM (SELECT run_id FROM runs WHERE run_id >= :since UNION SELECT run_id FROM attempts WHERE state = 'running') i "
    "JOIN runs r USING (run_id) LEFT JOIN run_profiles p USING (run_id) WHERE NOT r.synthetic GROUP BY 1, 2, 3"
)
"""A run's id begins with its time, so that the last day is a range of the primary key."""


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Real runs (without injected faults) that began in the last day."""

    live: Mapping[str, int] = field(default_factory=dict)
    """Workload -> runs without a verdict yet, whenever they began."""
    finished: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Workload and verdict -> runs."""
    inconclusive: Mapping[str, int] = field(default_factory=dict)
    """Reason -> runs."""
    tested: int = 0
    """Nodes with a conclusive run."""
    device_seconds: float = 0.0
    """Compared in them."""


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What the gauges are made of."""

    verdicts: Mapping[str, int]
    """Verdict -> nodes."""
    named: Sequence[tuple[str, str]]
    """Node and verdict of those that are corrupting or suspected, the firmer verdict first."""
    runs: RunCounts


def count_runs(conn: Connection, now: float) -> RunCounts:
    """The runs of the last day, in one query.

    Args:
        conn: the database.
        now: UTC seconds.

    Raises:
        SQLAlchemyError: the database failed.
    """
    since = UUID(int=int((now - DAY_S) * 1000) << 80)
    live: Counter[str] = Counter()
    finished: Counter[tuple[str, str]] = Counter()
    inconclusive: Counter[str] = Counter()
    tested: set[str] = set()
    seconds = 0.0
    for row in conn.execute(_RUNS, {"since": since}):
        tested.update(row.tested or ())
        seconds += float(row.device_seconds)
        if not row.verdict:
            live[row.workload] += row.runs
            continue
        finished[row.workload, row.verdict] += row.runs
        if row.verdict == Verdict.INCONCLUSIVE:
            inconclusive[row.reason or OTHER] += row.runs
    kept = Counter(dict(inconclusive.most_common(REASONS)))
    if rest := inconclusive.total() - kept.total():
        kept[OTHER] += rest
    return RunCounts(live, finished, kept, len(tested), seconds)


def fleet_facts(lines: Iterable[FleetLine], runs: RunCounts) -> FleetFacts:
    """The facts from the list of nodes (`tandem.db.nodes`) and the runs of the last day."""
    lines = list(lines)
    named = [
        (line.node, str(line.decided.verdict))
        for verdict in (NodeVerdict.CORRUPTING, NodeVerdict.SUSPECTED)
        for line in lines
        if line.decided.verdict is verdict
    ]
    return FleetFacts(Counter(str(line.decided.verdict) for line in lines), named, runs)


class FleetGauges(Collector):
    """What was last shown; nothing but ``tandem_api_database_up`` while that is nothing."""

    facts: FleetFacts | None = None

    def show(self, facts: FleetFacts | None) -> None:
        """Tell the next scrape; None: the database does not answer."""
        self.facts = facts

    def collect(self) -> Iterator[Metric]:
        facts = self.facts
        yield GaugeMetricFamily("tandem_api_database_up", "1 if PostgreSQL answered last time.", facts is not None)
        if facts is not None:
            yield from _nodes(facts)
            yield from _runs(facts.runs)


class FleetCollector(FleetGauges):
    """The same, asking by itself, behind the scrapes: a scrape is told what is known, and has the next one told newer
    facts. Only where what is known is too old to be shown it waits.

    Args:
        ask: how the fleet stands; raises `TandemError`, `SQLAlchemyError` or `OSError` where the database does not
            answer. Called in a thread of its own, never twice at once.
        kept_s: how long an answer, or a failure, is kept: so many scrapes cost one question.
        stale_s: an answer older than this is not shown.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], FleetFacts],
        kept_s: float = 15.0,
        stale_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._kept_s, self._stale_s, self._clock = ask, kept_s, stale_s, clock
        self._lock = threading.Lock()
        self._at: float | None = None
        """When what is shown was asked for."""
        self._asking: threading.Event | None = None
        """Set once the question under way is answered."""

    def collect(self) -> Iterator[Metric]:
        if self._age() >= self._stale_s:
            self._begin().wait(FIRST_S)
        with self._lock:
            if self._age() >= self._stale_s:
                self.show(None)
        yield from super().collect()
        # Behind the last series: a question is Python's work as well, and would slow down a scrape beside it.
        if self._age() >= self._kept_s:
            self._begin()

    @property
    def asking(self) -> bool:
        """Whether a question is under way."""
        return self._asking is not None

    def _age(self) -> float:
        return self._clock() - self._at if self._at is not None else float("inf")

    def _begin(self) -> threading.Event:
        """Have the question asked, if it is not under way; what is set once it is answered."""
        with self._lock:
            if self._asking is None:
                self._asking = threading.Event()
                threading.Thread(target=self._refresh, args=(self._asking,), name="fleet", daemon=True).start()
            return self._asking

    def _refresh(self, asking: threading.Event) -> None:
        began, facts = self._clock(), None
        try:
            facts = self._ask()
        except (TandemError, SQLAlchemyError, OSError):
            pass  # that it does not answer is what is shown
        finally:
            with self._lock:
                self.show(facts)
                self._at, self._asking = began, None
            asking.set()


def _nodes(facts: FleetFacts) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("tandem_fleet_nodes", "Nodes that a real run names, by verdict.", labels=["verdict"])
    for verdict in NodeVerdict:
        nodes.add_metric([verdict], facts.verdicts.get(verdict, 0))
    yield nodes
    named = GaugeMetricFamily(
        "tandem_fleet_node_verdict", "1 for each node that is corrupting or suspected.", labels=["node", "verdict"]
    )
    for labels in facts.named[:NAMED]:
        named.add_metric(labels, 1)
    yield named


def _runs(runs: RunCounts) -> Iterator[Metric]:
    live = GaugeMetricFamily("tandem_fleet_live_runs", "Real runs without a verdict yet.", labels=["workload"])
    finished = GaugeMetricFamily(
        "tandem_fleet_day_runs", "Real runs that began in the last 24 h, by verdict.", labels=["workload", "verdict"]
    )
    for workload in Workload:
        live.add_metric([workload], runs.live.get(workload, 0))
        for verdict in Verdict:
            finished.add_metric([workload, verdict], runs.finished.get((workload, verdict), 0))
    reasons = GaugeMetricFamily(
        "tandem_fleet_day_inconclusive_runs", "The inconclusive ones among them, by reason.", labels=["reason"]
    )
    for reason, count in sorted(runs.inconclusive.items()):
        reasons.add_metric([reason], count)
    yield from (live, finished, reasons)
    yield GaugeMetricFamily("tandem_fleet_day_tested_nodes", "Nodes with a conclusive run among them.", runs.tested)
    yield GaugeMetricFamily("tandem_fleet_day_device_seconds", "Device time compared in them.", runs.device_seconds)
