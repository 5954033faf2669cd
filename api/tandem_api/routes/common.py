"""What routers share: the answers that every route may give, and the usual parameters."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import Path, Query

from tandem_api import pages
from tandem_api.problems import MEDIA, ProblemDetails

_WHY = {
    400: "The body is not JSON, or the page token is none of this list.",
    401: "No token, or one that is not valid here.",
    403: "The cluster does not grant the verb on pairruns.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "It is too late for that.",
    413: "The body is too large.",
    422: "Something in the request cannot be used; `errors` says what.",
    429: "Too many writes, or refused tokens: wait as long as Retry-After says.",
    500: "An error of the API itself; its log has the trace under the number that is told.",
    503: "Something that is needed is away: ask again after Retry-After seconds.",
    504: "The database took too long.",
    507: "The disk is full.",
}
_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of a route's errors; those that every route may give are added."""
    out: dict[int | str, dict[str, Any]] = {}
    for status in sorted({401, 403, 422, 429, 500, *statuses}):
        out[status] = {
            "description": _WHY[status],
            "content": {MEDIA: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}},
        }
        if status in (429, 503):
            out[status]["headers"] = _RETRY
    return out


HTML: dict[str, Any] = {
    "description": "One self-contained HTML file.", "content": {"text/html": {"schema": {"type": "string"}}}
}  # fmt: skip
READ = (503, 504)
"""Of what asks the database."""
WRITE = (400, 408, 413, 503)
"""Of what takes a body and changes something."""

__all__ = ["HTML", "READ", "WRITE", "Limit", "ProblemDetails", "RunId", "Token", "problems"]

RunId = Annotated[UUID, Path(description="Id of the run.", examples=["0199a1b2-3c4d-7e5f-8a6b-7c8d9e0f1a2b"])]
Limit = Annotated[int, Query(ge=1, le=pages.LARGEST, description="Most rows of the page.")]
Token = Annotated[
    str | None,
    Query(max_length=4096, description="`next_page_token` of the page before; the filters must be the same."),
]
NodeName = Annotated[
    str, Path(min_length=1, max_length=253, description="Name of the node.", examples=["gpu-17"])
]  # fmt: skip
