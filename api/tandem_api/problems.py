"""Every error as RFC 9457 ``application/problem+json``; no stack trace, no address and no password leaves."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import DatabaseError, TandemError, UsageError

log = logging.getLogger("tandem.api")
MEDIA = "application/problem+json"
RETRY_S = 5
"""What a client is told to wait while something is away."""


class FieldError(BaseModel):
    """One thing that is wrong with a request."""

    model_config = ConfigDict(extra="forbid")
    where: str = Field(examples=["body.spec.steps"], description="Which field, parameter or header.")
    message: str = Field(examples=["Input should be greater than 0"], description="What is wrong with it.")


class ProblemDetails(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:tandem:problem:not-found",
                    "title": "Not Found",
                    "status": 404,
                    "detail": "there is no run 0199a1b2-0000-7000-8000-000000000000",
                }
            ]
        },
    )
    type: str = Field(description="Stable name of the kind of problem, `urn:tandem:problem:...`.")
    title: str = Field(description="The status in words.")
    status: int = Field(description="The status, once more.")
    detail: str = Field(description="One line: the cause and, where there is one, the mend.")
    errors: list[FieldError] | None = Field(None, description="What is wrong, field by field (422 only).")


class Problem(Exception):  # noqa: N818 - RFC 9457's word
    """Ends a request with this answer.

    Args:
        status: HTTP status.
        name: of the kind of problem, a stable slug.
        detail: one line for people.
        headers: of the answer.
        errors: field errors.
    """

    def __init__(
        self,
        status: int,
        name: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: list[dict[str, str]] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.name, self.detail = status, name, detail
        self.headers, self.errors = dict(headers or {}), errors

    def response(self) -> Response:
        body: dict[str, Any] = {
            "type": f"urn:tandem:problem:{self.name}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": _printable(self.detail)[:2000],
        }
        if self.errors:
            body["errors"] = self.errors
        return Response(msgspec.json.encode(body), self.status, self.headers, media_type=MEDIA)


def not_found(what: str) -> Problem:
    return Problem(404, "not-found", f"there is no {what}")


def invalid(where: str, message: str) -> Problem:
    """One field that cannot be used."""
    return Problem(
        422, "validation", f"{where}: {message}", errors=[{"where": where, "message": _printable(message)[:500]}]
    )


def away(detail: str, name: str = "database-away") -> Problem:
    """Something that is needed does not answer; nothing was changed."""
    return Problem(503, name, detail, headers={"Retry-After": str(RETRY_S)})


def of_error(error: TandemError) -> Problem:
    """What an error of Tandem is to a client."""
    if isinstance(error, DatabaseError):
        log.warning("%s", error)  # it names the server, which is nobody's business outside
        return away("the database cannot be used now")
    if isinstance(error, UsageError):
        return Problem(422, "validation", str(error))
    log.warning("%s", error)
    return away("what this needs cannot be used now", "unavailable")


def install(app: FastAPI) -> None:
    """Answer every error of the routes with a problem."""

    @app.exception_handler(Problem)
    async def _problem(_: Request, error: Problem) -> Response:
        return error.response()

    @app.exception_handler(TandemError)
    async def _tandem(_: Request, error: TandemError) -> Response:
        return of_error(error).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        names = {400: "malformed-json", 404: "not-found", 405: "method-not-allowed"}
        name = names.get(error.status_code, "http")
        details = {
            400: "the body cannot be read",
            404: "there is nothing at this address",
            405: "this address does not take that method",
        }
        detail = details.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods(app, request.url.path))
        return Problem(error.status_code, name, detail, headers=headers).response()

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> Response:
        return of_validation(error).response()


def _methods(app: FastAPI, path: str) -> list[str]:
    """Methods that an address takes; the framework names those of the first route alone."""
    found = {
        method.upper()
        for template, item in app.openapi()["paths"].items()
        if re.fullmatch(re.sub(r"\\{[^/]+\\}", "[^/]+", re.escape(template)), path)
        for method in item
    }
    return sorted(found) or ["GET"]


def of_validation(error: RequestValidationError) -> Problem:
    """What a request that does not fit its route is to a client."""
    found = error.errors()
    if any(e["type"] == "json_invalid" for e in found):
        return Problem(400, "malformed-json", "the body is not JSON")
    errors = [
        {
            "where": _printable(".".join(str(part) for part in e["loc"]))[:200],
            "message": _printable(e["msg"].removeprefix("Value error, "))[:500],
        }
        for e in found[:20]
    ]
    first = errors[0]
    return Problem(422, "validation", f"{first['where']}: {first['message']}", errors=errors)


def _printable(text: str) -> str:
    """What a client sent may be part of a message: without what would drive a terminal."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


class Guard:
    """Outermost: an unforeseen error becomes a bare 500, and its trace goes to the log under a number."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except Problem as problem:  # of the layers below the routes' own handlers
            if started:
                raise
            await problem.response()(scope, receive, send)
        except Exception as error:
            if started and isinstance(error.__cause__, Problem):  # as the framework wraps it, once an answer has begun
                log.warning("%s %r was cut off: %s", scope["method"], scope["path"], error.__cause__.detail)
                return
            number = os.urandom(4).hex()
            log.exception("error %s at %s %r", number, scope["method"], scope["path"])
            if started:
                return  # the answer is cut off: all that is left to say
            detail = f"something went wrong in the API; its log has it as error {number}"
            await Problem(500, "internal", detail).response()(scope, receive, send)
