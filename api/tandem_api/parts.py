"""What the routes are given: the parts that `create_app` put together, and who asks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.responses import Response

from tandem_api.security.authenticate import (
    ANONYMOUS,
    Authenticator,
    User,
    forbidden,
    unauthenticated,
    usable,
)
from tandem_api.security.limits import Rate, too_many
from tandem_api.security.sessions import CSRF_HEADER, Session, Sessions, check_write
from tandem_api.settings import Settings

if TYPE_CHECKING:
    from tandem_api.launch.launcher import Launcher
    from tandem_api.live.hub import Hub
    from tandem_api.metrics import Metrics
    from tandem_api.reads.fleet import Fleet
    from tandem_api.reads.nodes import Nodes
    from tandem_api.reads.store import Store


@dataclass(frozen=True)
class Parts:
    """One composed application."""

    settings: Settings
    store: Store
    launcher: Launcher
    authenticator: Authenticator
    hub: Hub
    fleet: Fleet
    nodes: Nodes
    metrics: Metrics
    writes: Rate
    strangers: Rate
    """Refused tokens, by the client's address."""
    sessions: Sessions
    clock: Callable[[], float] = time.time


def parts_of(request: Request) -> Parts:
    return cast(Parts, request.app.state.parts)


async def _parts(request: Request) -> Parts:
    """As `parts_of`: FastAPI would call a plain function in a thread, for each request anew."""
    return parts_of(request)


AppParts = Annotated[Parts, Depends(_parts)]
_bearer = HTTPBearer(
    auto_error=False,
    description="In a cluster a token of Kubernetes for the audience `tandem` (`kubectl create token NAME --audience "
    "tandem`), whose rights on `pairruns` are asked for; on one machine the token in the file that `tandem serve` "
    "names.",
)
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
WRITES = ("create", "update", "delete")


def may(verb: str, *, csrf: Callable[[Request], Awaitable[str]] | None = None) -> Callable[..., Awaitable[User]]:
    """A dependency: who asks, if they may do that with PairRuns.

    Args:
        verb: ``get``, ``list``, ``create``, ``update`` or ``delete``.
        csrf: where a session's write has its CSRF token; default: the header.
    """
    writes = verb in WRITES

    async def who(request: Request, credentials: _Credentials) -> User:
        parts = parts_of(request)
        session = None
        if credentials is None:
            session = session_of(request)
            if session is None:
                if parts.settings.anonymous_reads and not writes and "authorization" not in request.headers:
                    return ANONYMOUS
                raise unauthenticated("a bearer token is needed")
        if session is not None and writes:
            given = request.headers.get(CSRF_HEADER, "") if csrf is None else await csrf(request)
            check_write(request, session, given)
        user = await known(request, session.token if session is not None else cast(Any, credentials).credentials)
        if not await parts.authenticator.allowed(user, verb):
            raise forbidden(user, verb)
        if writes and (wait := parts.writes.take(user.name)):
            raise too_many(wait, "too many writes: wait a little")
        return user

    return who


def session_of(request: Request) -> Session | None:
    """The session of a browser; None with an ``Authorization`` header, which alone counts then.

    Raises:
        Problem: 401: the cookie is forged; 429: too often.
    """
    if "authorization" in request.headers:
        return None
    parts = parts_of(request)
    try:
        return parts.sessions.of(request)
    except ValueError:
        _refuse(parts, request)
        raise unauthenticated("the session is not valid here: sign in again") from None


async def known(request: Request, token: str) -> User:
    """Whose token it is; refused ones count against the client's address, and are then not looked at for a while.

    Many share an address, all who come through one Ingress: whose token was good before is not kept waiting for what
    strangers do there.

    Raises:
        Problem: 401, 429, or 503: cannot be told now.
    """
    from tandem_api.problems import Problem

    parts = parts_of(request)
    if not usable(token):
        _refuse(parts, request)
        raise unauthenticated()
    if not parts.authenticator.met(token) and (wait := parts.strangers.empty(_address(request))):
        raise too_many(wait, "too many refused tokens from your address")
    try:
        return await parts.authenticator.authenticate(token)
    except Problem as problem:
        if problem.status == 401:
            parts.strangers.take(_address(request))
        raise


def _refuse(parts: Parts, request: Request) -> None:
    address = _address(request)
    if wait := parts.strangers.empty(address):
        raise too_many(wait, "too many refused tokens from your address")
    parts.strangers.take(address)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


async def only_known_parameters(request: Request) -> None:
    """Refuse query parameters that the address does not have: a filter with a slip would give the whole list.

    Raises:
        Problem: 422.
    """
    from tandem_api.problems import invalid

    path = getattr(request.scope.get("route"), "path_format", "")
    operation = request.app.openapi()["paths"].get(path, {}).get(request.method.lower())
    if operation is None:
        return
    known = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"}
    for name in request.query_params:
        if name not in known:
            raise invalid(f"query.{name}"[:100], "there is no such parameter")


_can_get = may("get")


async def may_still(request: Request, credentials: _Credentials) -> Callable[[], Awaitable[User]]:
    """A dependency: to be asked again by an answer that goes on for long; raises what the request would meet now."""
    return lambda: _can_get(request, credentials)


CanGet = Annotated[User, Depends(_can_get)]
StillCanGet = Annotated[Callable[[], Awaitable[User]], Depends(may_still)]
CanList = Annotated[User, Depends(may("list"))]
CanCreate = Annotated[User, Depends(may("create"))]
CanUpdate = Annotated[User, Depends(may("update"))]
CanDelete = Annotated[User, Depends(may("delete"))]


class Json(Response):
    """A body as one of the JSON mappings of `tandem` made it; NaN and infinity, which JSON lacks, become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)
