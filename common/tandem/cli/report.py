"""``tandem report RUN``: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import DbOption, RunArgument, database, load, note, say


def report(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Where to write it; '-' is standard output."),
    ] = None,
    db: DbOption = None,
) -> None:
    """Write a run as one self-contained HTML file."""
    from tandem.report.page import render, write

    with database(db) as engine:
        records = load(engine, run)
    if out == Path("-"):
        say(render(records))
        return
    path = write(records, out or Path(f"tandem-{records.run.run_id}.html"))
    if records.run.synthetic:
        note("the run is synthetic: its faults were injected")
    say(str(path))
