"""Styles and scripts, for everybody; and addresses that are none."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem_api.console.files import files
from tandem_api.console.shell import Page
from tandem_api.problems import not_found

router = APIRouter(route_class=Page)
elsewhere = APIRouter(route_class=Page)
"""After all others."""
KEEP = "public, max-age=31536000, immutable"


@router.get("/console/static/{tag}/{name}")
async def static(tag: str, name: str) -> Response:
    """One file; its address changes with its content."""
    found = files().get(name)
    if found is None or found.tag != tag:
        raise not_found("such file")
    return Response(found.content, media_type=found.media_type, headers={"Cache-Control": KEEP})


@elsewhere.get("/console/{rest:path}")
async def nothing(request: Request, rest: str) -> Response:  # noqa: ARG001
    """An address of the console that is none."""
    raise not_found("such page")
