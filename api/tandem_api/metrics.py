"""What the API counts for Prometheus; a registry of its own, so that two applications in one process do not meet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from sqlalchemy import Connection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tandem
from tandem.db.nodes import read_fleet
from tandem.errors import DatabaseError
from tandem.metrics_fleet import FleetCollector, FleetFacts, count_runs, fleet_facts
from tandem_api.problems import Problem

if TYPE_CHECKING:
    from tandem_api.parts import Parts
    from tandem_api.reads.store import Store

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Counters of one application."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Info("tandem_build", "Version of Tandem.", registry=self.registry).info(
            {"version": tandem.__version__, "service": "api"}
        )
        self.requests = Counter(
            "tandem_api_requests_total", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "tandem_api_request_duration_seconds",
            "Time to the end of the answer; streams are left out.",
            ["route"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.launches = Counter("tandem_api_launches_total", "Runs begun.", registry=self.registry)
        self.dropped = Counter(
            "tandem_api_event_clients_dropped_total", "Event streams whose client took nothing for too long.",
            registry=self.registry,
        )  # fmt: skip
        self.streams = Gauge("tandem_api_event_clients", "Open event streams.", registry=self.registry)

    def watch(self, store: Store, kept_s: float) -> None:
        """Tell of the fleet as well.

        Args:
            store: the database.
            kept_s: how long an answer is kept.
        """
        self.registry.register(FleetCollector(lambda: _fleet(store), kept_s))

    def exposition(self, parts: Parts) -> bytes:
        """The text that Prometheus reads; may wait for the database, so never in the event loop."""
        self.streams.set(parts.hub.clients)
        return generate_latest(self.registry)


def _fleet(store: Store) -> FleetFacts:
    try:
        return store.now(_facts)
    except Problem as problem:
        raise DatabaseError(problem.detail) from None


def _facts(conn: Connection) -> FleetFacts:
    """Both questions in one snapshot, so that no run is in one answer alone."""
    return fleet_facts(read_fleet(conn), count_runs(conn, time.time()))


class Counting:
    """Counts every request under its route's template: a path of its own would be a series of its own."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path_format", None) or "none"
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
            self.metrics.requests.labels(method, route, str(status or 499)).inc()
            if not route.endswith("/events"):
                self.metrics.seconds.labels(route).observe(time.perf_counter() - began)
