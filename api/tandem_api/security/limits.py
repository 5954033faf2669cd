"""What is taken from clients: hosts, body sizes, patience, writes per user; and the headers that all answers carry."""

from __future__ import annotations

import asyncio
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem_api.problems import Problem
from tandem_api.settings import Settings

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Of every answer that does not set its own."""
HTML_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; sandbox"
)
"""Content-Security-Policy of reports: they hold styles and pictures, and no script."""
CONNECTIONS = 2000
"""At once; requests of those beyond are answered 503."""
DRAINED, DRAINED_S = 1 << 20, 2.0
"""Bytes and seconds of a refused body that are still taken: a client that sends, while its connection is closed before
it, may never see the answer.
"""
CROWDED_S = 5
"""What they are told to wait."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_BODILESS = ("GET", "HEAD", "OPTIONS")


class SecurityHeaders:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)


class Door:
    """Turns away what must not come in: too many connections, other hosts (a rebound DNS name), other machines, bodies
    that are too large or too slow.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        settings, headers = self.settings, Headers(scope=scope)
        if scope["app"].state.connections() > CONNECTIONS:
            busy = {"Retry-After": str(CROWDED_S), "Connection": "close"}
            raise Problem(503, "busy", f"there are more than {CONNECTIONS} connections", headers=busy)
        if settings.loopback_only and not _loopback(scope):
            raise Problem(403, "not-this-machine", "only this machine is answered")
        if settings.hosts and _host(headers.get("host", "")) not in settings.hosts:
            raise Problem(421, "host", "this server does not answer under that name")
        if b"\x00" in scope.get("query_string", b"") or "\x00" in scope["path"] or "%00" in _query(scope):
            raise Problem(422, "validation", "a NUL character is in the address")
        length = headers.get("content-length")
        if length is not None and length.isdigit() and int(length) > settings.body_limit:
            if "expect" not in headers:  # else it sends nothing before it is asked to
                await _drain(receive)
            raise self._too_large()
        if scope["method"] in _BODILESS:
            await self.app(scope, receive, send)
            return
        body = _Body(receive, settings.body_limit, settings.body_seconds, self._too_large())
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            if body.refused is not None and not started:
                return  # whatever the layers below made of a body that was cut off
            started = True
            await send(message)

        try:
            await self.app(scope, body, watch)
        except Exception:
            if body.refused is None or started:
                raise
        if body.refused is not None and not started:
            if body.refused.status == 413:
                await _drain(receive)
            raise body.refused

    def _too_large(self) -> Problem:
        limit = self.settings.body_limit
        return Problem(413, "too-large", f"the body is larger than {limit} bytes", headers={"Connection": "close"})


async def _drain(receive: Receive) -> None:
    """Take what a client still sends, within bounds."""
    left = DRAINED
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAINED_S):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


class _Body:
    """Receives a request's body within its limits; what comes after it (the client's leaving) passes."""

    def __init__(self, receive: Receive, limit: int, seconds: float, too_large: Problem) -> None:
        self._receive, self._left, self._seconds, self._too_large = receive, limit, seconds, too_large
        self._deadline: float | None = None
        self.refused: Problem | None = None
        """Why the body is not taken."""
        self._whole = False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            close = {"Connection": "close"}
            self.refused = Problem(408, "too-slow", "the body did not come in time", headers=close)
            raise self.refused from None
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._left < 0:
                self.refused = self._too_large
                raise self.refused
        return message


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class Rate:
    """A token bucket for each of a bounded number of names.

    Args:
        burst: at once.
        per_minute: in the long run.
        clock: monotonic seconds.
        largest: names remembered; the one that came longest ago goes first.
    """

    def __init__(self, burst: int, per_minute: float, clock: Callable[[], float], largest: int = 4096) -> None:
        self._burst, self._per_s, self._clock, self._largest = burst, per_minute / 60, clock, largest
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, name: str) -> float:
        """Take one; 0 if there was one, else how many seconds to wait for it."""
        bucket = self._now(name)
        if bucket.level >= 1:
            bucket.level -= 1
            return 0.0
        return (1 - bucket.level) / self._per_s

    def empty(self, name: str) -> float:
        """As `take`, but takes none."""
        bucket = self._now(name)
        return 0.0 if bucket.level >= 1 else (1 - bucket.level) / self._per_s

    def _now(self, name: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.pop(name, None) or _Bucket(float(self._burst), now)
        bucket.level = min(self._burst, bucket.level + max(0.0, now - bucket.at) * self._per_s)
        bucket.at = now
        self._buckets[name] = bucket
        while len(self._buckets) > self._largest:
            self._buckets.popitem(last=False)
        return bucket


def too_many(seconds: float, detail: str) -> Problem:
    return Problem(429, "too-many", detail, headers={"Retry-After": str(max(1, math.ceil(seconds)))})


def loopback_hosts(names: Iterable[str] = ()) -> list[str]:
    """Host names under which a server on the loopback device may be reached."""
    return [*LOOPBACK_HOSTS, *names]


def _loopback(scope: Scope) -> bool:
    client = scope.get("client")
    if client is None:
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def _host(value: str) -> str:
    """Without the port."""
    if value.startswith("["):
        return value[: value.find("]") + 1].lower()
    return value.partition(":")[0].lower()


def _query(scope: Scope) -> str:
    return bytes(scope.get("query_string", b"")).decode("latin-1")
