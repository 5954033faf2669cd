"""Everything that is answered, one router for each area."""

from __future__ import annotations

from fastapi import APIRouter

from tandem_api.console import router as console
from tandem_api.routes import candidates, catalogue, docs, events, export, health, nodes, runs

ROUTERS: tuple[APIRouter, ...] = (
    runs.router, events.router, export.router, nodes.router, candidates.router, catalogue.router, health.router,
    docs.router, console.router,
)  # fmt: skip
