"""How the service is; without a token, and without the database but for ``/readyz``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import tandem
from tandem_api.answers.catalogue import Alive
from tandem_api.parts import AppParts, Json
from tandem_api.problems import away
from tandem_api.routes.common import open_to_all

router = APIRouter(tags=["health"])
_TEXT: dict[str, Any] = {
    "description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}
}  # fmt: skip


@router.get("/healthz", response_model=Alive, responses=open_to_all(), openapi_extra={"security": []})
async def alive(parts: AppParts) -> Response:
    """The process answers."""
    return Json({"status": "ok", "mode": parts.launcher.mode, "version": tandem.__version__})


@router.get("/readyz", response_model=Alive, responses=open_to_all(), openapi_extra={"security": []})
async def ready(parts: AppParts) -> Response:
    """Reads and launches both work: the database answers with this version's schema, and so does whoever runs pairs."""
    for why in (await parts.store.wrong(), parts.launcher.wrong()):
        if why is not None:
            raise away(why, "not-ready")
    return Json({"status": "ok", "mode": parts.launcher.mode, "version": tandem.__version__})


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: _TEXT, **open_to_all()},
    openapi_extra={"security": []},
)
async def metrics(parts: AppParts) -> Response:
    """Of this process, for Prometheus."""
    text = await asyncio.to_thread(parts.metrics.exposition, parts)
    return Response(text, media_type=parts.metrics.media_type)
