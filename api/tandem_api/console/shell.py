"""Around every page: who looks, what they may do, how it is rendered, and what an error looks like."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import jinja2
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import HTMLResponse, RedirectResponse, Response

import tandem
from tandem.errors import TandemError
from tandem.paper import published
from tandem.report import page
from tandem_api.console.files import address, files
from tandem_api.parts import WRITES, may, parts_of, session_of
from tandem_api.problems import Problem, invalid, of_error, of_validation
from tandem_api.security.authenticate import ANONYMOUS, User

POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy of pages: nothing from elsewhere, no script or style in the page itself."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",  # with none at all, a form's Origin would be "null"
    "Vary": "HX-Request",
}
SIGN_IN = "/console/sign-in"
CSRF_FIELD = "csrf"
_FORM = re.compile(r"application/x-www-form-urlencoded\s*(;|$)", re.IGNORECASE)
_MOST_FIELDS = 200


@dataclass(frozen=True, slots=True)
class Viewer:
    """Whoever looks at a page."""

    user: User
    session: bool
    """Signed in by a cookie, and may sign out."""
    csrf: str
    rights: frozenset[str]
    """Verbs on PairRuns that change something: what is not here is not offered."""


async def viewer(request: Request, user: User) -> Viewer:
    """Who looks, and what they may change.

    Raises:
        Problem: 503: it cannot be told now.
    """
    session = session_of(request)
    rights = set()
    if user != ANONYMOUS:
        rights = {verb for verb in WRITES if await parts_of(request).authenticator.allowed(user, verb)}
    return Viewer(user, session is not None, session.csrf if session else "", frozenset(rights))


def fragment(request: Request) -> bool:
    """Whether a script asks for a part of a page."""
    return request.headers.get("hx-request") == "true"


@cache
def environment() -> jinja2.Environment:
    """The console's templates beside those of the reports, with one way to write numbers."""
    reports = page.environment()
    assert reports.loader is not None
    mine = jinja2.PrefixLoader({"console": jinja2.PackageLoader("tandem_api.console")})
    made = reports.overlay(loader=jinja2.ChoiceLoader([mine, reports.loader]))
    made.globals.update(static=address, published=published, version=tandem.__version__)
    return made


def text(template: str, **values: Any) -> str:
    """A template as text; for parts of pages that are made in threads and kept."""
    return environment().get_template(template).render(**values)


def answer(
    request: Request, template: str, status: int = 200, headers: Mapping[str, str] | None = None, **values: Any
) -> Response:
    """A page, or a part of one."""
    files()  # without its scripts the console would look whole and do nothing
    parts = parts_of(request)
    values = {"viewer": None, "here": request.url.path, "mode": parts.launcher.mode, **values}
    return HTMLResponse(text(template, **values), status, {**HEADERS, **(headers or {})})


def back(request: Request, path: str) -> Response:
    """After a write: show what came of it."""
    if fragment(request):
        return Response(status_code=204, headers={**HEADERS, "HX-Redirect": path})
    return RedirectResponse(path, 303, HEADERS)


def own_path(path: str | None) -> str:
    """A path of this server to go on to; ``/`` for anything that could lead elsewhere."""
    if not path or not path.startswith("/") or path[1:2] in ("/", "\\") or not path.isprintable():
        return "/"
    try:
        parts = urlsplit(path)
    except ValueError:
        return "/"
    return "/" if parts.scheme or parts.netloc or "\\" in path or path.startswith(SIGN_IN) else path


async def fields(request: Request) -> list[tuple[str, str]]:
    """Fields of a form that was sent.

    Raises:
        Problem: 422: it is none.
    """
    if not _FORM.match(request.headers.get("content-type", "")):
        raise invalid("body", "is no form")
    body = await request.body()
    try:
        return parse_qsl(body.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise invalid("body", "is no form that can be read") from None


async def csrf_field(request: Request) -> str:
    """The CSRF token of a form, or of a script's header."""
    return dict(await fields(request)).get(CSRF_FIELD, "")


def may_send(verb: str) -> Callable[..., Awaitable[User]]:
    """As `may`, for forms."""
    return may(verb, csrf=csrf_field)


class Page(APIRoute):
    """A route whose errors are pages, and which sends whoever is not signed in to the form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Problem as problem:
                return refused(request, problem)
            except TandemError as error:
                return refused(request, of_error(error))
            except RequestValidationError as error:
                return refused(request, of_validation(error))

        return handle


def refused(request: Request, problem: Problem) -> Response:
    """What an error is in the console."""
    if problem.name == "console-not-built":
        return HTMLResponse(f"<!doctype html><title>Tandem</title><p>{problem.detail}", problem.status, HEADERS)
    if problem.status == 401:
        return _to_form(request)
    values = {"problem": problem, "asks": request.method == "GET"}  # a form is not sent once more by itself
    template = "console/alert.html.j2" if fragment(request) else "console/error.html.j2"
    return answer(request, template, problem.status, problem.headers, **values)


def _to_form(request: Request) -> Response:
    asked = request.headers.get("hx-current-url", "") if fragment(request) else str(request.url)
    parts = urlsplit(asked)
    path = own_path(parts.path + (f"?{parts.query}" if parts.query else ""))
    if request.method != "GET" and not fragment(request):
        path = "/"
    target = SIGN_IN if path == "/" else f"{SIGN_IN}?{urlencode({'next': path})}"
    if fragment(request):
        out = Response(status_code=401, headers={**HEADERS, "HX-Redirect": target})
    else:
        out = cast(Response, RedirectResponse(target, 303, HEADERS))
    parts_of(request).sessions.end(request, out)
    return out
