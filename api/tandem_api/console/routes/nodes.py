"""One node: what is wrong with it, and the decision that what was found counts no more."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.responses import Response

from tandem.db.nodes import read_next
from tandem.nodes.assess import Ended, Wanted
from tandem.report import node_page
from tandem_api.answers.nodes import Clear
from tandem_api.console import shell
from tandem_api.console.shell import Page, answer, back, fields, may_send, viewer
from tandem_api.parts import AppParts, CanGet
from tandem_api.problems import invalid
from tandem_api.reads.nodes import load_node
from tandem_api.routes.common import NodeName
from tandem_api.routes.nodes import clear
from tandem_api.security.authenticate import User

router = APIRouter(route_class=Page)
MODEL = "small"
"""Of the next run, where the node has none yet."""


@router.get("/console/nodes/{name:path}")
async def node(request: Request, parts: AppParts, user: CanGet, name: NodeName) -> Response:
    """The node's profile, charts and history, and what may be done."""
    seen = await viewer(request, user)
    html = await parts.store.whole(_page, name, {"viewer": seen, "here": request.url.path, "mode": parts.launcher.mode})
    return answer(request, "console/made.html.j2", html=html)


@router.post("/console/nodes/{name:path}/clear")
async def clear_node(
    request: Request,
    parts: AppParts,
    name: NodeName,
    user: User = Depends(may_send("update")),  # noqa: B008 - the framework's way
) -> Response:
    """Record the decision."""
    try:
        decision = Clear(reason=dict(await fields(request)).get("reason", ""))
    except ValidationError:
        raise invalid("reason", "say in 1 to 2,000 characters why: it is kept for ever") from None
    await clear(parts, user, name, decision)
    return back(request, f"/console/nodes/{quote(name)}#decisions")


def _page(conn: Any, name: str, around: dict[str, Any]) -> str:
    profile = load_node(conn, name)
    model = profile.runs[0].facts.model if profile.runs else MODEL
    wanted: Wanted | Ended = read_next(conn, name, model)
    return shell.text(
        "node.html.j2", layout="console/node.html.j2", sections=node_page.SECTIONS, model=model,
        wanted=wanted if isinstance(wanted, Wanted) else None, ended=wanted if isinstance(wanted, Ended) else None,
        **node_page.values(profile), **around,
    )  # fmt: skip
