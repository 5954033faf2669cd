"""What the reports share: the templates' environment, and how a page becomes a file.

A page is one HTML file that needs nothing else and runs no script. Every string of a run is untrusted (the suspect's
own among them): the templates escape all of them, `formats.clean` takes out control and direction characters, and a
content security policy forbids whatever would get through.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import formats
from tandem.errors import SetupError
from tandem.paper import published
from tandem.report.figures import number
from tandem.runs import tables
from tandem.runs.parts import MapRow

if TYPE_CHECKING:
    import jinja2

SHADES = 5
"""Of a heat map; ``style.css`` has a class for each."""


def html(template: str, sections: Sequence[tuple[str, str]], **values: Any) -> str:
    """A page as text.

    Args:
        template: its name in this package.
        sections: (id, title) of each section, for the line of links.
        values: what the template shows.
    """
    return (
        environment()
        .get_template(template)
        .render(style=style(), sections=sections, version=version("tandem-sdc"), published=published, **values)
    )


def style() -> str:
    """The style sheet of all pages."""
    return resources.files("tandem.report").joinpath("style.css").read_text(encoding="utf-8")


def write(text: str, path: Path) -> Path:
    """Write a page to ``path``; the file appears only when it is complete.

    Raises:
        SetupError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}: choose another file with -o") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return path


def columns(rows: Sequence[MapRow]) -> list[tuple[int, str]]:
    """(number, title) of a map's columns: "no layer" if it occurs, then every one up to the last that mismatched."""
    seen = {number for row in rows for number in row.cells}
    most = max(seen, default=-1)
    # A clean layer between two bad ones is part of the picture, unless the model is so deep that the map would not fit.
    inner = range(most + 1) if most < 64 else sorted(seen - {-1})
    return [(n, "–" if n < 0 else str(n)) for n in (*sorted(seen & {-1}), *inner)]


def shades(rows: Sequence[MapRow]) -> dict[tuple[int, int], int]:
    """(line of the map, column) -> shade 1..SHADES on a logarithmic scale of mismatching elements."""
    most = max((n for row in rows for _, n in row.cells.values()), default=0)
    return {
        (i, column): max(1, round(SHADES * (n.bit_length() / max(1, most.bit_length()))))
        for i, row in enumerate(rows)
        for column, (_, n) in row.cells.items()
    }


REPLAYS = {
    "transient": "all right",
    "intermittent": "right in part",
    "persistent": "wrong, with the same bits",
    "erratic": "wrong, with other bits",
    "not_replayed": "outside the budget",
}
"""Replay class -> what the suspect's replays on the same inputs were."""


def replay_rows(replays: dict[str, int]) -> list[tuple[str, str, str]]:
    """Class, tensors, meaning."""
    return [(name.replace("_", " "), formats.count(n), REPLAYS.get(name, "")) for name, n in replays.items()]


def count_rows(counts: dict[Any, Any]) -> list[tuple[str, ...]]:
    """Name and count, or counts, as text."""
    return [
        (formats.clean(name), *(formats.count(n) for n in (value if isinstance(value, tuple) else (value,))))
        for name, value in counts.items()
    ]


@cache
def environment() -> jinja2.Environment:
    """Templates, and how they write numbers; the web console puts the same sections into pages of its own."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("tandem.report", package_path=""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        clean=formats.clean,
        count=formats.count,
        short=formats.short,
        sci=formats.scientific,
        when=formats.when,
        pct=formats.percent,
        number=number,
        severity=tables.severity,
        leaf_row=lambda item: (formats.clean(item[0]), formats.scientific(item[1])),
        words=lambda text: str(text).replace("_", " "),
    )
    made.globals.update(place=tables.place, frequency=tables.frequency)
    return made
