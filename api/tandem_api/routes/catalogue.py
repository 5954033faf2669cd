"""What a run can be made of."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from tandem.faults.files import shipped_names
from tandem.spec import load_preset, preset_names
from tandem_api.answers.catalogue import FaultProfilesAnswer, PresetsAnswer
from tandem_api.parts import CanList, Json
from tandem_api.routes.common import problems

router = APIRouter(prefix="/v1", tags=["catalogue"])


@router.get("/presets", response_model=PresetsAnswer, responses=problems())
async def list_presets(_: CanList) -> Response:
    """Models with the training shape that fits them, the smallest first."""
    return Json(_presets())


@router.get("/fault-profiles", response_model=FaultProfilesAnswer, responses=problems())
async def list_fault_profiles(_: CanList) -> Response:
    """Recipes for injected corruption that ship with Tandem."""
    return Json(_profiles())


@cache
def _presets() -> dict[str, Any]:
    return {"presets": [{"name": n, "preset": load_preset(n).model_dump(mode="json")} for n in preset_names()]}


@cache
def _profiles() -> dict[str, Any]:
    folder = resources.files("tandem").joinpath("fault_profiles")
    found = [(name, folder.joinpath(f"{name}.toml").read_text(encoding="utf-8")) for name in shipped_names()]
    return {"fault_profiles": [{"name": n, "text": text, "profile": tomllib.loads(text)} for n, text in found]}
