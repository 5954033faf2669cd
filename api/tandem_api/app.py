"""The application, put together from its parts; whoever has other parts (a test) composes it likewise."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, Depends, FastAPI

import tandem
from tandem_api import openapi, problems
from tandem_api.console.summaries import Reports
from tandem_api.launch.launcher import Launcher
from tandem_api.live.hub import Hub
from tandem_api.metrics import Counting, Metrics
from tandem_api.parts import Parts, only_known_parameters
from tandem_api.reads.fleet import Fleet
from tandem_api.reads.nodes import Nodes
from tandem_api.reads.store import Store
from tandem_api.routers import ROUTERS
from tandem_api.security.authenticate import Authenticator
from tandem_api.security.limits import Door, Rate, SecurityHeaders
from tandem_api.security.sessions import Sessions
from tandem_api.settings import Settings

STRANGERS = (30, 60)
"""Refused tokens of one address: at once, and a minute in the long run."""

FLEET_KEPT_S = 10.0
"""How long an answer about the fleet is kept for scrapes."""


def create_app(
    settings: Settings,
    store: Store,
    launcher: Launcher,
    authenticator: Authenticator,
    clock: Callable[[], float] = time.time,
    *,
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """The application; its lifespan starts launcher and live streams, and closes all that it was given.

    Args:
        settings: limits and names.
        store: the database.
        launcher: how runs begin.
        authenticator: who may ask.
        clock: UTC seconds.
        routers: further areas.
    """
    hub = Hub(store, launcher, settings.events)
    metrics = Metrics()
    metrics.watch(store, FLEET_KEPT_S)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await launcher.start()
        hub.start()
        try:
            yield
        finally:
            await hub.stop()
            await launcher.stop()
            await store.close()

    app = FastAPI(
        title="Tandem",
        version=tandem.__version__,
        summary=openapi.SUMMARY,
        description=openapi.DESCRIPTION,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_tags=openapi.TAGS,
        docs_url=None,  # its page loads scripts from elsewhere; ours needs none
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry={"tracing": False, "metrics": False},
    )
    app.state.parts = Parts(
        settings=settings, store=store, launcher=launcher, authenticator=authenticator, hub=hub,
        fleet=Fleet(store, settings.fleet_seconds, time.monotonic), nodes=Nodes(store), metrics=metrics,
        writes=Rate(settings.writes.burst, settings.writes.per_minute, time.monotonic),
        strangers=Rate(STRANGERS[0], STRANGERS[1], time.monotonic),
        sessions=Sessions(authenticator.secret, clock), clock=clock,
    )  # fmt: skip
    app.state.reports = Reports(store)
    app.state.connections = lambda: 0  # the server around it knows
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(only_known_parameters)])
    for router in routers:
        app.include_router(router)
    openapi.install(app)
    # The last one that is added is the outermost.
    app.add_middleware(Door, settings=settings)
    app.add_middleware(problems.Guard)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Counting, metrics=metrics)
    return app
