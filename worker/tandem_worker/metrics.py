"""What the reference tells Prometheus of its pair while it runs; the suspect tells nothing.

Everything is read at the scrape, from values that the engine replaces whole after each step: counting costs the step
no lock. No label names a run, an attempt, a pod, a step or a tensor (facts live in PostgreSQL); the series end with
the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem import __version__
from tandem.progress import ProgressEvent
from tandem.records import ClassCounts
from tandem.serve import exposition, serve
from tandem.vocabulary import ControlName, Role
from tandem_worker.link.state import Activity
from tandem_worker.lockstep.tally import NOTHING, STEP_BOUNDS_S, RunTally

PAIR = ("node", "reference", "workload", "kind", "synthetic")
"""Labels of every series; ``node`` is the node under test."""
CONTROLS = tuple(name for name in ControlName if name not in (ControlName.RESUMED, ControlName.CLOSING))
"""Those that can fail while a pair runs."""


@dataclass(frozen=True, slots=True)
class PairLabels:
    """What the series of a pair are told apart by."""

    node: str
    """Under test."""
    reference: str
    workload: str
    kind: str
    synthetic: bool
    """Whether faults are injected: no alert looks at such a pair."""

    def values(self) -> list[str]:
        return [self.node, self.reference, self.workload, self.kind, str(self.synthetic).lower()]


@dataclass(frozen=True, slots=True)
class Look:
    """A pair at one moment."""

    event: ProgressEvent
    activity: Activity
    now: float
    """UTC seconds, of the clock that stamps the steps."""
    total: RunTally = field(default_factory=RunTally)
    failures: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Control and side -> how often it failed."""
    places: frozenset[tuple[str, str]] = frozenset()
    """Phase and module of every site; empty while nothing is compiled."""


class PairCollector(Collector):
    """The families of one pair.

    Args:
        labels: of the pair.
        look: how it stands now; called by every scrape, in a thread of its own.
    """

    def __init__(self, labels: PairLabels, look: Callable[[], Look]) -> None:
        self._labels, self._look = labels, look

    def collect(self) -> Iterator[Metric]:
        look = self._look()
        yield from self._state(look)
        yield from self._compared(look)
        yield from self._steps(look)
        yield from self._records(look)

    def _state(self, look: Look) -> Iterator[Metric]:
        build = GaugeMetricFamily("tandem_build_info", "Version of Tandem.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        state = GaugeMetricFamily(
            "tandem_pair_activity", "1 for what the reference does now, 0 for all else.", labels=[*PAIR, "activity"]
        )
        for activity in Activity:
            state.add_metric([*self._labels.values(), activity], activity is look.activity)
        yield state
        failed = CounterMetricFamily(
            "tandem_pair_control_failures", "Controls that failed, by the side that failed them.",
            labels=[*PAIR, "role", "control"],
        )  # fmt: skip
        for role in Role:
            for name in CONTROLS:
                failed.add_metric([*self._labels.values(), role, name], look.failures.get((name, role), 0))
        yield failed

    def _compared(self, look: Look) -> Iterator[Metric]:
        names = [*PAIR, "role", "phase", "module"]
        families = [
            CounterMetricFamily("tandem_pair_sites_compared", "Tensors compared, site x rank.", labels=names),
            CounterMetricFamily("tandem_pair_elements_compared", "Elements compared.", labels=names),
            CounterMetricFamily(
                "tandem_pair_sites_mismatched", "Tensors that differed although their inputs were equal.", labels=names
            ),
            CounterMetricFamily("tandem_pair_elements_mismatched", "Elements that differed in them.", labels=names),
        ]
        counted = look.total.places
        for place in sorted(look.places | counted.keys()):
            for family, value in zip(families, _values(counted.get(place, NOTHING)), strict=True):
                family.add_metric([*self._labels.values(), Role.SUSPECT, *place], value)
        yield from families
        yield self._counter(
            "other_findings", "Findings with another cause: changed kept inputs, digests.", look.total.other_findings
        )

    def _steps(self, look: Look) -> Iterator[Metric]:
        total = look.total
        times = HistogramMetricFamily(
            "tandem_pair_step_seconds", "Time of a step on the reference, waits included.", labels=PAIR
        )
        bounds = [*(str(float(bound)) for bound in STEP_BOUNDS_S), "+Inf"]
        counts = accumulate(total.step_times)
        times.add_metric(self._labels.values(), list(zip(bounds, counts, strict=True)), total.step_seconds)
        yield times
        yield self._counter("steps", "Optimizer steps compared.", max(total.steps - 1, 0))
        yield self._counter("busy_seconds", "Time of steps in which the reference did not wait.", total.busy_seconds)
        yield self._counter("link_bytes", "Bytes on the link during steps, both ways.", total.link_bytes)
        yield self._counter(
            "full_exchange_bytes", "Bytes that exchanging every tensor would have moved.", total.full_bytes
        )
        yield self._gauge("window_sites", "Most unconfirmed sites of the step.", look.event.window_used)
        yield self._gauge("window_limit_sites", "Most that are allowed now; 0: none.", look.event.window_limit)
        if look.event.phase == "step":
            # Before the first step and after the last there is none that could be late.
            yield self._gauge(
                "last_step_age_seconds", "Time since a step was finished.", max(0.0, look.now - total.finished_at)
            )

    def _records(self, look: Look) -> Iterator[Metric]:
        event = look.event
        waiting = event.records_put - event.records_acknowledged
        yield self._gauge("records_waiting", "Records that PostgreSQL has not yet.", waiting)
        yield self._gauge(
            "spool_records", "Of these, in the spool because PostgreSQL does not answer.", event.records_spooled
        )

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tandem_pair_{name}", about, labels=PAIR)
        family.add_metric(self._labels.values(), value)
        return family

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tandem_pair_{name}", about, labels=PAIR)
        family.add_metric(self._labels.values(), value)
        return family


def _values(counts: ClassCounts) -> tuple[int, int, int, int]:
    return counts.sites, counts.elements, counts.mismatched_sites, counts.mismatched_elements


def export(
    port: int, labels: PairLabels, look: Callable[[], Look], log: Callable[[str], None], host: str = ""
) -> int | None:
    """Answer scrapes at ``/metrics``; where that cannot be, the run goes on without.

    Args:
        port: to listen on; 0: any.
        labels: of the pair.
        look: how it stands.
        log: told in one line what went wrong.
        host: address to listen on; empty: all.

    Returns:
        The port, None if it cannot listen.
    """
    registry = CollectorRegistry()
    registry.register(PairCollector(labels, look))
    try:
        return serve(port, {"/metrics": exposition(registry)}, host).server_port
    except (OSError, OverflowError) as error:
        log(f"no metrics: port {port} cannot be listened on ({error}); the run goes on without")
        return None
