"""Nodes that wait for a test, and who would be their partner."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.responses import Response

from tandem_api.answers.catalogue import CandidatesAnswer
from tandem_api.parts import AppParts, CanList, Json
from tandem_api.routes.common import problems

router = APIRouter(prefix="/v1/candidates", tags=["candidates"])


@router.get("", response_model=CandidatesAnswer, responses=problems())
async def list_candidates(parts: AppParts, _: CanList) -> Response:
    """Quarantined nodes and the references that would be picked now, with reasons: as `tandem candidates --json`."""
    found = await parts.launcher.candidates()
    return Json({"candidates": [asdict(candidate) for candidate in found]})
