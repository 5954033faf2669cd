"""Runs: the list, one of them live, its mismatches and its report."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from tandem.records import MismatchRecord
from tandem.vocabulary import Kind, Module, Phase, Verdict, Workload
from tandem_api.console import views
from tandem_api.console.shell import Page, answer, back, fragment, may_send, viewer
from tandem_api.console.summaries import Reports
from tandem_api.parts import AppParts, CanGet, CanList, Parts
from tandem_api.problems import Problem
from tandem_api.routes.common import RunId, Token
from tandem_api.routes.runs import launch_json, records_json, run_answer, runs_json
from tandem_api.security.authenticate import User

router = APIRouter(route_class=Page)
PAGE = 50
"""Rows of a page, of runs and of mismatches."""
CHOICES: dict[str, tuple[str, ...]] = {
    "workload": tuple(map(str, Workload)), "verdict": tuple(map(str, Verdict)), "state": ("running", "finished"),
    "kind": tuple(map(str, Kind)),
}  # fmt: skip
_RUN = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@router.get("/console/runs")
async def runs(
    request: Request,
    parts: AppParts,
    user: CanList,
    node: Annotated[str, Query(max_length=253)] = "",
    workload: Workload | Literal[""] = "",
    verdict: Verdict | Literal[""] = "",
    state: Literal["", "running", "finished"] = "",
    kind: Kind | Literal[""] = "",
    page_token: Token = None,
) -> Response:
    """Stored runs, the newest first, and on the first page what waits."""
    filters = {"node": node.strip(), "workload": workload, "verdict": verdict, "state": state, "kind": kind}
    asked = {name: str(value) for name, value in filters.items()}
    seen = await viewer(request, user)
    equal: dict[str, Any] = {name: value or None for name, value in filters.items()}
    found, problem = None, None
    try:
        found = await runs_json(parts, equal | {"synthetic": None}, None, None, PAGE, page_token)
    except Problem as error:
        if error.status not in (503, 504):
            raise
        problem = error
    launches = [launch_json(x) for x in parts.launcher.open()] if found is None else []
    following = None
    if found is not None and found["next_page_token"]:
        following = "?" + urlencode({**{k: v for k, v in asked.items() if v}, "page_token": found["next_page_token"]})
    template = "console/runs_part.html.j2" if fragment(request) else "console/runs.html.j2"
    return answer(
        request, template, problem.status if problem else 200, problem.headers if problem else None, viewer=seen,
        found=found, problem=problem, launches=launches, asked=asked, choices=CHOICES, following=following, views=views,
        first=page_token is None,
    )  # fmt: skip


@router.get("/console/runs/{run_id}")
async def run(request: Request, parts: AppParts, user: CanGet, run_id: RunId) -> Response:
    """One run: as it goes on, and at the end its report."""
    return await _shown(request, parts, user, run_id, "console/run.html.j2")


@router.get("/console/runs/{run_id}/now")
async def now(request: Request, parts: AppParts, user: CanGet, run_id: RunId) -> Response:
    """The head of the page, as it is now."""
    return await _shown(request, parts, user, run_id, "console/now.html.j2")


async def _shown(request: Request, parts: Parts, user: User, run_id: Any, template: str) -> Response:
    found, problem = await _run(parts, run_id)
    return answer(
        request, template, viewer=await viewer(request, user), run=str(run_id), problem=problem,
        now=views.now(found, parts.clock()), views=views,
    )  # fmt: skip


async def _run(parts: Parts, run_id: Any) -> tuple[dict[str, Any], Problem | None]:
    """The run; while the database is away, what the launcher knows of it."""
    try:
        return await run_answer(parts, run_id), None
    except Problem as problem:
        launch = await parts.launcher.known(run_id)
        if launch is None or problem.status not in (503, 504):
            raise
        return {"state": str(launch.state), "stored": None, "launch": launch_json(launch)}, problem


@router.get("/console/runs/{run_id}/report")
async def report(request: Request, parts: AppParts, _: CanGet, run_id: RunId) -> Response:
    """The report's sections, so far."""
    stored = (await run_answer(parts, run_id))["stored"]
    if stored is None:
        return answer(request, "console/nothing.html.j2", what="of this run yet")
    html = await cast(Reports, request.app.state.reports).of(run_id, over=stored["state"] == "finished")
    return answer(request, "console/made.html.j2", html=html)


@router.get("/console/runs/{run_id}/mismatches")
async def mismatches(
    request: Request,
    parts: AppParts,
    user: CanList,
    run_id: RunId,
    phase: Phase | Literal[""] = "",
    module: Module | Literal[""] = "",
    rank: Annotated[str, Query(pattern=r"^\d{0,6}$")] = "",
    page_token: Token = None,
) -> Response:
    """Tensors that differed, page by page: however many there are, a page stays small."""
    asked = {"phase": str(phase), "module": str(module), "rank": rank}
    equal = {"phase": phase or None, "module": module or None, "rank": int(rank) if rank else None}
    try:
        found = await records_json(
            parts, MismatchRecord, "mismatches", run_id, equal, (None, None), PAGE, page_token
        )  # fmt: skip
    except Problem as problem:
        if problem.status != 404 or await parts.launcher.known(run_id) is None:
            raise
        found = {"mismatches": [], "next_page_token": None}
    path = f"/console/runs/{run_id}/mismatches"
    chosen = {name: value for name, value in asked.items() if value}
    following = found["next_page_token"]
    template = "console/mismatches.html.j2" if fragment(request) else "console/mismatches_page.html.j2"
    return answer(
        request, template, viewer=await viewer(request, user), run=str(run_id), rows=found["mismatches"], asked=asked,
        first=page_token is None, beginning=f"{path}?{urlencode(chosen)}", choices=_SITE,
        following=f"{path}?{urlencode({**chosen, 'page_token': following})}" if following else None,
    )  # fmt: skip


@router.post("/console/runs/{run_id}/cancel")
async def cancel(
    request: Request,
    parts: AppParts,
    run_id: RunId,
    _: User = Depends(may_send("delete")),  # noqa: B008 - the framework's way
) -> Response:
    """Ask the run to end."""
    await parts.launcher.cancel(run_id)
    return back(request, f"/console/runs/{run_id}")


_SITE = {"phase": tuple(map(str, Phase)), "module": tuple(map(str, Module))}
