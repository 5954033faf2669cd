"""Service account tokens, signed anew by the key of a cluster that the tests started."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any


def part(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def claims_of(token: str) -> dict[str, Any]:
    body = token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return found


def forged(token: str, **claims: Any) -> str:
    """The same token with other claims, its signature as it was."""
    head, _, signature = token.split(".")
    return ".".join([head, part(json.dumps(claims_of(token) | claims).encode()), signature])


def signed(token: str, key: Path, **claims: Any) -> str:
    """The same token with other claims and a right signature.

    Args:
        token: a real one, of which the header stays.
        key: the cluster's P-256 key (PEM).
        claims: instead of its own.
    """
    text = ".".join([token.split(".", maxsplit=1)[0], part(json.dumps(claims_of(token) | claims).encode())])
    words = ["openssl", "dgst", "-sha256", "-sign", str(key)]
    der = subprocess.run(words, input=text.encode(), capture_output=True, check=True).stdout
    return f"{text}.{part(_raw(der))}"


def _raw(der: bytes) -> bytes:
    """An ECDSA signature as JWTs have it (RFC 7518, 3.4): r and s, 32 bytes each; from DER, two integers."""
    assert der[:1] == b"\x30"
    out, at = b"", 2
    for _ in range(2):
        assert der[at] == 2
        length = der[at + 1]
        out += int.from_bytes(der[at + 2 : at + 2 + length], "big").to_bytes(32, "big")
        at += 2 + length
    return out
