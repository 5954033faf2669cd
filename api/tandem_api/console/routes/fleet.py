"""The fleet: which nodes must not go back to work."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.lists_json import fleet_counts, line_json
from tandem.vocabulary import NodeVerdict
from tandem_api.console import views
from tandem_api.console.shell import Page, answer, fragment, viewer
from tandem_api.launch.launcher import State
from tandem_api.parts import AppParts, CanList, Parts
from tandem_api.problems import Problem
from tandem_api.routes.runs import launch_json

router = APIRouter(route_class=Page)
Verdict = Literal["", "corrupting", "suspected", "clean", "unknown"]
Sort = Literal["urgency", "node", "since", "last"]
assert {*NodeVerdict} == {"corrupting", "suspected", "clean", "unknown"}


@router.get("/")
async def fleet(
    request: Request,
    parts: AppParts,
    user: CanList,
    verdict: Verdict = "",
    search: Annotated[str, Query(max_length=253)] = "",
    sort: Sort = "urgency",
    number: Annotated[int, Query(ge=1, le=1_000_000, alias="page")] = 1,
) -> Response:
    """Every node that real runs name; those that need a person first at the top."""
    asked = {"verdict": verdict, "search": search.strip(), "sort": sort}
    try:
        found, problem = await _found(parts, asked, number), None
    except Problem as error:
        if error.status not in (503, 504):
            raise
        found, problem = None, error
    waiting = [launch_json(x) for x in parts.launcher.open() if x.state is State.PENDING]
    template = "console/fleet_part.html.j2" if fragment(request) else "console/fleet.html.j2"
    return answer(
        request, template, problem.status if problem else 200, problem.headers if problem else None,
        viewer=await viewer(request, user), found=found, problem=problem, asked=asked, waiting=waiting, views=views,
    )  # fmt: skip


async def _found(parts: Parts, asked: dict[str, str], number: int) -> dict[str, Any]:
    lines = await parts.fleet.lines()
    chosen = [
        line for line in map(line_json, lines)
        if asked["verdict"] in ("", line["verdict"]) and asked["search"] in line["node"]
    ]  # fmt: skip
    pages = max(1, -(-len(chosen) // views.PAGE))
    number = min(number, pages)
    return {
        "counts": fleet_counts(lines), "all": len(lines), "chosen": len(chosen), "page": number, "pages": pages,
        "nodes": views.sorted_fleet(chosen, asked["sort"])[(number - 1) * views.PAGE : number * views.PAGE],
    }  # fmt: skip
