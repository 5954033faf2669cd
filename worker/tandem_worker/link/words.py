"""A peer's words made harmless. Pure: the peer is assumed faulty, and what it says goes to logs and records."""

from __future__ import annotations

import re

from tandem.vocabulary import REGULAR_ENDS


def printable(text: str, limit: int = 200) -> str:
    """For a log or terminal: one line, no control characters, at most ``limit`` long."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text[: 4 * limit].split()))[:limit]


def peer_reason(reason: str) -> str:
    """A peer's reason for leaving as a stable name; what is none, or claims a regular end, is ``peer_left``."""
    named = re.fullmatch(r"[a-z][a-z0-9_]{0,60}(:[A-Za-z0-9_.,;\[\] -]{1,80})?", reason)
    return reason if named and reason not in REGULAR_ENDS else "peer_left"
