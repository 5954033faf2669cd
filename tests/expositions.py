"""What each process tells Prometheus, made by its own code without the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from clusters import Run, started, world
from tandem.metrics_fleet import FleetFacts, FleetGauges, RunCounts
from tandem.progress import ProgressEvent
from tandem.vocabulary import Kind, Module, NodeVerdict, Phase, Workload
from tandem_api.metrics import Metrics as ApiMetrics
from tandem_controller.metrics import Metrics
from tandem_worker.link.state import Activity
from tandem_worker.lockstep.tally import RunTally
from tandem_worker.metrics import Look, PairCollector, PairLabels

SICK = PairLabels("sick", "well", Workload.SUBMODULE, Kind.SUSPECT, synthetic=False)


def pair(labels: PairLabels = SICK) -> Iterable[Metric]:
    """A reference worker's."""
    places = frozenset({(Phase.FWD, Module.FFN), (Phase.BWD, Module.FFN)})
    look = Look(ProgressEvent(phase="step"), Activity.COMPUTING, 0.0, RunTally(), {}, places)
    return PairCollector(labels, lambda: look).collect()


def pairs() -> Iterator[Metric]:
    """Those of references of every workload, kind and origin of the findings."""
    for workload, kind, synthetic in product(Workload, Kind, (False, True)):
        yield from pair(PairLabels("sick", "well", workload, kind, synthetic=synthetic))


def controller() -> Iterable[Metric]:
    metrics, waits = Metrics(), Run(nodes=world())
    waits.plan()
    metrics.observe(lambda: 0, lambda: [started().look().status, waits.look().status])
    return metrics.registry.collect()


def fleet() -> Iterable[Metric]:
    """The API's, of the fleet."""
    gauges = FleetGauges()
    named = [("sick", str(verdict)) for verdict in (NodeVerdict.CORRUPTING, NodeVerdict.SUSPECTED)]
    gauges.show(FleetFacts({}, named, RunCounts(inconclusive={"other": 1})))
    registry = CollectorRegistry()
    registry.register(gauges)
    return registry.collect()


def api() -> Iterable[Metric]:
    """The API's, of itself."""
    metrics = ApiMetrics()
    metrics.requests.labels("GET", "/healthz", "200").inc()
    metrics.seconds.labels("/healthz").observe(1)
    return metrics.registry.collect()
