"""Sessions of the web console: a browser cannot send a bearer header when it opens a page.

Signing in makes a cookie from the token: nothing is kept in the server, so that a restart, or another replica, knows
every session. The local token, which never ends, is not in the cookie: the server has it, and the cookie proves by an
HMAC that its bearer had it once. A cluster's token, which is short-lived and made for Tandem alone, is in the cookie,
and is reviewed at every request like one in a header.

A cookie alone never writes: the request must come from a page of this very origin and carry the session's CSRF token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from tandem_api.problems import Problem
from tandem_api.security.authenticate import LONGEST_TOKEN, usable
from tandem_api.security.cluster import expiry

LIFETIME_S = 8 * 3600.0
"""Longest session; a token that ends earlier ends it."""
LONGEST = 3800
"""Characters of a cookie's value: browsers drop cookies of more than 4096 bytes."""
CSRF_HEADER = "X-Tandem-CSRF"
SECURE_COOKIE = "__Host-tandem-session"
"""Where the browser speaks HTTPS."""


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that has signed in."""

    token: str
    """The bearer token that it stands for."""
    csrf: str
    """What every write of the session must carry; nobody without the cookie can tell it."""


class Sessions:
    """Args:
    secret: the one token of this machine; None: cookies carry the token.
    clock: UTC seconds.
    """

    def __init__(self, secret: str | None, clock: Callable[[], float]) -> None:
        self._secret, self._clock = secret, clock

    def begin(self, token: str, request: Request, response: Response) -> None:
        """Set the cookie of a token that was found good.

        Raises:
            Problem: 422: no cookie can hold it.
        """
        now = self._clock()
        ends = min(now + LIFETIME_S, expiry(token) or now + LIFETIME_S)
        nonce = secrets.token_hex(16)
        parts = [str(int(ends)), nonce, _mac(token, f"session {int(ends)} {nonce}")]
        if self._secret is None:
            parts.append(base64.urlsafe_b64encode(token.encode()).decode().rstrip("="))
        value = ".".join(parts)
        if len(value) > LONGEST:
            raise Problem(422, "validation", "the token is too long for a browser's session: use one with fewer claims")
        secure = https(request)
        response.set_cookie(
            cookie_name(request, secure=secure), value, max_age=max(1, int(ends - now)), path="/", secure=secure,
            httponly=True, samesite="strict",
        )  # fmt: skip

    def end(self, request: Request, response: Response) -> None:
        """Remove the cookie."""
        for secure in (True, False):
            if (name := cookie_name(request, secure=secure)) in request.cookies:
                response.delete_cookie(name, path="/", secure=secure, httponly=True, samesite="strict")

    def of(self, request: Request) -> Session | None:
        """The session of a request; None without a cookie, or where its time is over.

        Raises:
            ValueError: it is none that this server, or another replica, has made.
        """
        value = request.cookies.get(cookie_name(request, secure=True))
        value = value or request.cookies.get(cookie_name(request, secure=False))
        if not value:
            return None
        parts = value.split(".")
        if len(parts) != (3 if self._secret is not None else 4) or len(value) > LONGEST:
            raise ValueError("no session")
        ends, nonce, mac = parts[:3]
        token = self._secret if self._secret is not None else _decoded(parts[3])
        if not hmac.compare_digest(_mac(token, f"session {ends} {nonce}").encode(), mac.encode()):
            raise ValueError("no session")
        if int(ends) <= self._clock():
            return None
        return Session(token, _mac(token, f"csrf {ends} {nonce}"))


def cookie_name(request: Request, *, secure: bool) -> str:
    """Of the session. Browsers send a host's cookies to all its ports, so servers on one machine need several names."""
    if secure:
        return SECURE_COOKIE
    port = urlsplit(f"//{request.headers.get('host', '')}").netloc.rpartition(":")[2]
    return f"tandem-session-{port if port.isdigit() else 80}"


def https(request: Request) -> bool:
    """Whether the browser speaks HTTPS, be it with a proxy before this server: its own Origin says so."""
    return request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")


def own_url(request: Request) -> str:
    """Where the browser finds this server. Opening a page sends no Origin, so a cookie that only HTTPS sets tells."""
    url = request.base_url
    if https(request) or cookie_name(request, secure=True) in request.cookies:
        url = url.replace(scheme="https")
    return str(url).rstrip("/")


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of this very origin makes the request; without a word of it: no."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None and site != "same-origin":
        return False
    if origin is None or origin == "null":
        return site == "same-origin"
    return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


def check_write(request: Request, session: Session, given: str) -> None:
    """Refuse a write of a session that another site could have made.

    Args:
        request: that writes.
        session: whose it is.
        given: CSRF token that it carries, "" for none.

    Raises:
        Problem: 403.
    """
    if not same_origin(request.headers):
        raise foreign()
    if not hmac.compare_digest(given.encode("utf-8", "replace"), session.csrf.encode()):
        raise Problem(403, "csrf", f"a session writes only with its {CSRF_HEADER}: load the page again")


def foreign() -> Problem:
    return Problem(403, "csrf", "the request does not come from a page of this server")


def _mac(token: str, text: str) -> str:
    return hmac.new(token.encode(), f"tandem {text}".encode(), hashlib.sha256).hexdigest()


def _decoded(text: str) -> str:
    try:
        token = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError):
        raise ValueError("no session") from None
    if not usable(token) or len(token) > LONGEST_TOKEN:
        raise ValueError("no session")
    return token
