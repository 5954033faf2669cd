"""Keyset pages: a token names the last row of the page before, and the question that it belongs to. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem_api.problems import Problem

DEFAULT, LARGEST = 100, 1000
"""Rows of a page."""
_MAX_TOKEN = 2048


def token(question: Mapping[str, Any], last: Sequence[Any]) -> str:
    """The token of the page after the row with the key ``last``.

    Args:
        question: path and filters: a token of another question is refused.
        last: key of the row, plain values.
    """
    raw = msgspec.json.encode([_mark(question), list(last)])
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def key(question: Mapping[str, Any], text: str | None, kinds: Sequence[type]) -> list[Any] | None:
    """The key that a token names; None without a token.

    Args:
        question: as for `token`.
        text: from the client.
        kinds: type of each part of the key.

    Raises:
        Problem: 400; it is no token, or one of another question.
    """
    if text is None:
        return None
    refused = Problem(400, "page-token", "page_token is none of this list: leave it out to begin anew")
    try:
        if len(text) > _MAX_TOKEN:
            raise refused
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        mark, last = msgspec.json.decode(raw, type=tuple[str, list[Any]])
    except (binascii.Error, ValueError, UnicodeError, msgspec.MsgspecError):
        raise refused from None
    fits = len(last) == len(kinds) and all(
        isinstance(part, kind) and not isinstance(part, bool) for part, kind in zip(last, kinds, strict=True)
    )
    if mark != _mark(question) or not fits:
        raise refused
    if any(isinstance(part, int) and not -(2**63) <= part < 2**63 for part in last):
        raise refused
    if any("\x00" in part for part in last if isinstance(part, str)):
        raise refused
    return last


def _mark(question: Mapping[str, Any]) -> str:
    plain = {name: str(value) for name, value in question.items() if value is not None}
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()[:16]
