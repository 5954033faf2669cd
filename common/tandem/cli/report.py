"""``tandem report RUN|NODE``: a run or a node as one HTML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.output import DbOption, database, load, note, say
from tandem.errors import RunNotFoundError, UsageError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from tandem.nodes.profile import NodeProfile
    from tandem.records import RunRecords


def report(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Id of a run, any unique beginning of it, or 'last'; else the name of a node.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Where to write it; '-' is standard output."),
    ] = None,
    db: DbOption = None,
) -> None:
    """Write a run or a node as one self-contained HTML file."""
    from tandem.nodes.profile import NodeProfile
    from tandem.report import node_page, run_page
    from tandem.report.draw import warm_up
    from tandem.report.page import write

    warm_up()
    with database(db) as engine:
        found = find(engine, name)
    if isinstance(found, NodeProfile):
        text, default = node_page.render(found), f"tandem-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.html"
    else:
        text, default = run_page.render(found), f"tandem-{found.run.run_id}.html"
    if out == Path("-"):
        say(text)
        return
    path = write(text, out or Path(default))
    if not isinstance(found, NodeProfile) and found.run.synthetic:
        note("the run is synthetic: its faults were injected")
    say(str(path))


def find(engine: Engine, name: str) -> RunRecords | NodeProfile:
    """The run that the name means, else the node; a name that could be both is a run's.

    Raises:
        UsageError: neither.
        DatabaseError: several runs, or the database failed.
    """
    from tandem.db.profiles import load_node

    try:
        return load(engine, name)
    except RunNotFoundError as error:
        no_run = str(error)
    try:
        return load_node(engine, name)
    except UsageError as error:
        raise UsageError(f"{error}; {no_run}" if re.fullmatch(r"[0-9a-fA-F-]+", name) else str(error)) from None
