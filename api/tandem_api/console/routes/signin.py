"""Signing in with a token, and out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from tandem_api.console.shell import HEADERS, SIGN_IN, Page, answer, csrf_field, fields, own_path
from tandem_api.parts import AppParts, known, session_of
from tandem_api.problems import Problem
from tandem_api.security.authenticate import unauthenticated
from tandem_api.security.sessions import check_write, foreign, same_origin

router = APIRouter(route_class=Page)
Next = Annotated[str, Query(max_length=2000)]


@router.get(SIGN_IN)
async def form(request: Request, next: Next = "/") -> Response:
    """The form that takes a token."""
    return answer(request, "console/signin.html.j2", next=own_path(next), wrong="")


@router.post(SIGN_IN)
async def sign_in(request: Request, parts: AppParts) -> Response:
    """Check the token and begin a session."""
    if not same_origin(request.headers):
        raise foreign()
    given = dict(await fields(request))
    target = own_path(given.get("next"))
    token = given.get("token", "").strip()
    try:
        if not token:
            raise unauthenticated("a token is needed")
        await known(request, token)
        out = RedirectResponse(target, 303, HEADERS)
        parts.sessions.begin(token, request, out)
        return out
    except Problem as problem:
        return answer(
            request, "console/signin.html.j2", problem.status, problem.headers, next=target, wrong=problem.detail
        )


@router.post("/console/sign-out")
async def sign_out(request: Request, parts: AppParts) -> Response:
    """End the session."""
    session = session_of(request)
    out = RedirectResponse(SIGN_IN, 303, HEADERS)
    if session is not None:
        check_write(request, session, await csrf_field(request))
        parts.sessions.end(request, out)
    return out
