"""``tandem export RUN``: a run's rows as CSV or Parquet files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import DbOption, RunArgument, database, say


class ExportFormat(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"


def export(
    run: RunArgument,
    format: Annotated[ExportFormat, typer.Option("--format", "-f", help="Kind of the files.")] = ExportFormat.CSV,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Folder for the files; tandem-RUN if not given."),
    ] = None,
    db: DbOption = None,
) -> None:
    """Write a run's rows as CSV or Parquet files.

    One file each for the run, its attempts, steps, step classes, mismatches, gradients, drifts, evaluations, controls,
    faults and closing records.
    """
    from tandem.db.queries import find_run
    from tandem.export import export_run

    with database(db) as engine:
        run_id = find_run(engine, run)
        counts = export_run(engine, run_id, out or Path(f"tandem-{run_id}"), format.value)
    for path, rows in counts.items():
        say(f"{path}: {rows:,} rows")
