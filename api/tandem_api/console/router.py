"""All pages of the console."""

from __future__ import annotations

from fastapi import APIRouter

from tandem_api.console.routes import fleet, launch, nodes, runs, signin, static

router = APIRouter(include_in_schema=False)
for area in (signin, static, fleet, runs, launch, nodes):
    router.include_router(area.router)
router.include_router(static.elsewhere)
