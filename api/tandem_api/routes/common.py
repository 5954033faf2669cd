"""What routers share: the answers that every route may give, and the usual parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from uuid import UUID

from fastapi import Path, Query
from starlette.responses import HTMLResponse

from tandem_api import pages
from tandem_api.problems import MEDIA
from tandem_api.security.limits import HTML_POLICY

_WHY = {
    400: "The body is not JSON, or the page token is none of this list.",
    401: "No token, or one that is not valid here.",
    403: "The cluster does not grant the verb on pairruns; a session's write lacks its CSRF token; or only clients on "
    "this machine are answered.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "It is too late for that.",
    413: "The body is too large.",
    421: "The server does not answer under that host name.",
    422: "Something in the request cannot be used; `errors` says what.",
    429: "Too many writes, or refused tokens: wait as long as Retry-After says.",
    500: "An error of the API itself; its log has the trace under the number that is told.",
    503: "Something that is needed is away: ask again after Retry-After seconds.",
    504: "The database took too long.",
    507: "The disk is full.",
}
_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


def problem(status: int) -> dict[str, Any]:
    """Documentation of one error."""
    out = {
        "description": _WHY[status],
        "content": {MEDIA: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
    }
    return out | {"headers": _RETRY} if status in (429, 503) else out


EVERYWHERE = (403, 413, 421, 422, 500, 503)
"""Also where no token is asked for: from the door, from too many connections, and from errors of the API itself."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of a route's errors; those that every route may give are added."""
    return open_to_all(401, 429, *statuses)


def open_to_all(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The same of a route that asks for no token."""
    return {status: problem(status) for status in sorted({*EVERYWHERE, *statuses})}


REPORT: dict[int | str, dict[str, Any]] = {
    200: {"description": "One self-contained HTML file.", "content": {"text/html": {}}}
}


def html(text: str, headers: Mapping[str, str] | None = None) -> HTMLResponse:
    """A page that may load and run nothing from elsewhere."""
    return HTMLResponse(text, headers={"Content-Security-Policy": HTML_POLICY, **(headers or {})})


READ = (504,)
"""Of what asks the database."""
WRITE = (400, 408)
"""Of what takes a body and changes something."""

RunId = Annotated[UUID, Path(description="Id of the run.", examples=["0199a1b2-3c4d-7e5f-8a6b-7c8d9e0f1a2b"])]
Limit = Annotated[int, Query(ge=1, le=pages.LARGEST, description="Most rows of the page.")]
Token = Annotated[
    str | None,
    Query(max_length=4096, description="`next_page_token` of the page before; the filters must be the same."),
]
NodeName = Annotated[
    str, Path(min_length=1, max_length=253, description="Name of the node.", examples=["gpu-17"])
]  # fmt: skip
