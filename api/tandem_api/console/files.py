"""The console's files that are the same for everybody: styles, its own scripts, and the script library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem.report.page import style
from tandem_api.console.build import FILES, VENDOR, built
from tandem_api.problems import Problem

STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
NOT_BUILT = "the console's script library was not built: run `python -m tandem_api.console.build` in a checkout"


@dataclass(frozen=True, slots=True)
class File:
    """One file, held in memory."""

    content: bytes
    media_type: str
    tag: str
    """Changes with the content."""


@cache
def files() -> dict[str, File]:
    """Every file by its name; names that are not here have no file, however they are spelled.

    Raises:
        Problem: 503: the script library was not built.
    """
    if not built(VENDOR):
        raise Problem(503, "console-not-built", NOT_BUILT)
    found = {"report.css": style().encode()}
    for path in sorted(STATIC.iterdir()):
        if path.suffix in TYPES:
            found[path.name] = path.read_bytes()
    found |= {name: (VENDOR / name).read_bytes() for name in FILES.values()}
    return {
        name: File(content, TYPES[Path(name).suffix], hashlib.sha256(content).hexdigest()[:16])
        for name, content in found.items()
    }


def address(name: str) -> str:
    """Where a page finds a file: another content has another address, so that browsers may keep it."""
    return f"/console/static/{files()[name].tag}/{name}"
