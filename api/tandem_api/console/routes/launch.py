"""Beginning a run: who would be compared with whom and why, what to run, and the same for programs."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tandem.faults.files import shipped_names
from tandem.spec import preset_names
from tandem_api.console import forms
from tandem_api.console.shell import Page, answer, back, fields, may_send, viewer
from tandem_api.launch.cluster import pairrun
from tandem_api.launch.launcher import Order, check
from tandem_api.parts import AppParts, CanList, Parts
from tandem_api.problems import Problem
from tandem_api.routes.runs import begin
from tandem_api.security.authenticate import User
from tandem_api.security.sessions import own_url

router = APIRouter(route_class=Page)
NONCE = "nonce"
"""Field that makes a second click the same launch."""
_LONGEST_NONCE = 64


@router.get("/console/launch")
async def form(request: Request, parts: AppParts, user: CanList) -> Response:
    """The form; its fields can be given in the address, as links to the next run of a node do."""
    given = [(name, value[:4096]) for name, value in request.query_params.items()][:50]
    return await _form(request, parts, user, given, told=None)


@router.post("/console/launch/preview")
async def preview(request: Request, parts: AppParts, user: CanList) -> Response:  # noqa: ARG001 - who may look
    """What the form would send, and what is wrong with it."""
    shown = _read(request, parts, await fields(request))[2]
    return answer(request, "console/equivalent.html.j2", **shown)


@router.post("/console/launch")
async def launch(
    request: Request,
    parts: AppParts,
    user: User = Depends(may_send("create")),  # noqa: B008 - the framework's way
) -> Response:
    """Begin the run and show it."""
    given = await fields(request)
    order, _, shown = _read(request, parts, given)
    if order is None or shown["wrong"]:
        return await _form(request, parts, user, given, told=shown, status=422)
    nonce = dict(given).get(NONCE, "")[:_LONGEST_NONCE]
    key = f"console-{nonce}-{order.digest[:32]}" if nonce.isascii() and nonce.isalnum() else None
    try:
        made, _ = await begin(parts, user, order, key)
    except Problem as problem:
        if problem.status != 422:
            raise
        _add(shown, problem)
        return await _form(request, parts, user, given, told=shown, status=422)
    return back(request, f"/console/runs/{made.run_id}")


async def _form(
    request: Request,
    parts: Parts,
    user: User,
    given: list[tuple[str, str]],
    *,
    told: dict[str, Any] | None,
    status: int = 200,
) -> Response:
    found, problem = [], None
    try:
        found = await parts.launcher.candidates()
    except Problem as error:
        problem = error
    controls = forms.controls(preset_names(), shipped_names())
    values = {control.name: control.default for control in controls} | dict(given)
    if told is None:
        told = _read(request, parts, list(values.items()))[2]
        told["wrong"] = {}  # nobody has typed anything yet
    return answer(
        request, "console/launch.html.j2", status, viewer=await viewer(request, user), candidates=found,
        problem=problem, controls=controls, values=values, first=forms.FIRST, nonce=secrets.token_hex(16),
        told=told, submitted=status != 200,
    )  # fmt: skip


def _read(
    request: Request, parts: Parts, given: list[tuple[str, str]]
) -> tuple[Order | None, dict[str, Any], dict[str, Any]]:
    """The order of a form, its body, and what is shown of both."""
    shown: dict[str, Any] = {"wrong": {}, "yaml": "", "curl": "", "of_cluster": parts.launcher.mode == "cluster"}
    try:
        body = forms.order(given)
    except ValueError as error:
        field, message = error.args
        shown["wrong"][field] = message
        return None, {}, shown
    order, shown["wrong"] = forms.read(body)
    shown["curl"] = forms.curl(own_url(request), body)
    shown["yaml"] = forms.spec_yaml(body)
    if order is None:
        return None, body, shown
    try:
        check(order, parts.launcher.mode)
        if shown["of_cluster"]:
            made = pairrun(order, parts.settings.namespace, by="", key=None)
            shown["yaml"] = forms.object_yaml(made)
    except Problem as problem:
        _add(shown, problem)
    return order, body, shown


def _add(shown: dict[str, Any], problem: Problem) -> None:
    for error in problem.errors or [{"where": "", "message": problem.detail}]:
        shown["wrong"].setdefault(forms.place(error["where"]), error["message"])
