"""Nodes: what the records say of them, and the one decision that a person records."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import HTMLResponse, Response

from tandem.db.nodes import urgency
from tandem.db.profiles import record_clear
from tandem.errors import NothingToClearError, UsageError
from tandem.lists_json import fleet_counts, line_json
from tandem.report import node_page
from tandem.vocabulary import NodeVerdict
from tandem_api import pages
from tandem_api.answers.nodes import Clear, HistoryPage, NodeAnswer, NodePage
from tandem_api.launch.launcher import State
from tandem_api.parts import AppParts, CanGet, CanList, CanUpdate, Json, Parts
from tandem_api.problems import Problem, invalid, not_found
from tandem_api.reads.nodes import load_node
from tandem_api.routes.common import READ, REPORT, WRITE, Limit, NodeName, Token, html, problems
from tandem_api.routes.runs import launch_json
from tandem_api.security.authenticate import User

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


@router.get("", response_model=NodePage, responses=problems(400, *READ))
async def list_nodes(
    parts: AppParts,
    _: CanList,
    verdict: NodeVerdict | None = None,
    search: Annotated[str | None, Query(min_length=1, max_length=253, description="Part of the name.")] = None,
    page_size: Limit = pages.LARGEST,
    page_token: Token = None,
) -> Response:
    """The fleet: nodes that real runs name, those that need a person first at the top."""
    question = {"list": "nodes", "verdict": verdict, "search": search}
    last = pages.key(question, page_token, [int, float, str])
    lines = await parts.fleet.lines()
    counts = fleet_counts(lines)
    found = [x for x in lines if verdict in (None, x.decided.verdict) and (search is None or search in x.node)]
    if last is not None:
        found = [x for x in found if urgency(x) > tuple(last)]
    page = found[:page_size]
    token = pages.token(question, list(urgency(page[-1]))) if len(found) > page_size else None
    waiting = [launch_json(x) for x in parts.launcher.open() if x.state is State.PENDING] if last is None else []
    return Json({
        "counts": counts, "waiting": waiting, "nodes": [line_json(line) for line in page], "next_page_token": token
    })  # fmt: skip


@router.get("/{name}", response_model=NodeAnswer, responses=problems(404, *READ))
async def get_node(parts: AppParts, _: CanGet, name: NodeName) -> Response:
    """A node's profile: as `tandem node NAME --json`."""
    return await _profile(parts, name)


@router.get(
    "/{name}/report",
    response_class=HTMLResponse,
    responses={**REPORT, **problems(404, *READ)},
)
async def get_node_report(parts: AppParts, _: CanGet, name: NodeName) -> Response:
    """A node as one HTML file: as `tandem report NAME`."""
    return html(await parts.store.whole(_report, name))


@router.get("/{name}/history", response_model=HistoryPage, responses=problems(400, 404, *READ))
async def get_history(
    parts: AppParts, _: CanList, name: NodeName, page_size: Limit = pages.DEFAULT, page_token: Token = None
) -> Response:
    """Runs that name the node and decisions about it, the newest first."""
    question = {"list": "history", "node": name}
    last = pages.key(question, page_token, [float, str])
    items = (await parts.nodes.of(name)).history
    if last is not None:
        items = [item for item in items if item.key < tuple(last)]
    page = items[:page_size]
    token = pages.token(question, page[-1].key) if len(items) > page_size else None
    return Json({"node": name, "history": [item.line for item in page], "next_page_token": token})


@router.post("/{name}/clear", response_model=NodeAnswer, responses=problems(404, 409, 504, *WRITE))
async def clear_node(parts: AppParts, user: CanUpdate, name: NodeName, decision: Clear) -> Response:
    """Record that what was found on a node counts no more, and why: as `tandem node NAME clear`. Answers its profile
    afterwards.
    """
    await clear(parts, user, name, decision)
    return await _profile(parts, name)


async def clear(parts: Parts, user: User, name: str, decision: Clear) -> None:
    """Record a decision.

    Raises:
        Problem: 404, 409 or 422: it cannot be made.
    """
    if "\x00" in decision.reason:
        raise invalid("body.reason", "holds a NUL character")
    await parts.store.write(_clear, name, decision.reason, user.name)
    parts.fleet.forget()


async def _profile(parts: Parts, name: str) -> Response:
    return Response((await parts.nodes.of(name)).profile, media_type=Json.media_type)


def _report(conn: Any, name: str) -> str:
    return node_page.render(load_node(conn, name))


def _clear(conn: Any, name: str, reason: str, by: str) -> None:
    try:
        record_clear(conn, name, reason, by)
    except NothingToClearError as error:
        raise Problem(409, "nothing-to-clear", str(error)) from None
    except UsageError:
        raise not_found(f"node {name} in the records") from None
