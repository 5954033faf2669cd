"""``tandem db``: the database that keeps the records."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import DbOption, JsonOption, database, emit_json, note, say
from tandem.errors import DatabaseError, UsageError
from tandem.formats import plural

WAIT_S = 1.0
"""Between two looks at a database that is not ready."""

app = typer.Typer(
    help="Manage the database that keeps the records.",
    no_args_is_help=True,
)


DbFileOption = Annotated[
    Path | None,
    typer.Option(
        "--db-file",
        envvar="TANDEM_DB_FILE",
        metavar="FILE",
        help="File with the URL of the PostgreSQL, so that no password is an argument.",
        show_default=False,
    ),
]


def url_of(db: str | None, db_file: Path | None) -> str | None:
    """The URL that is meant; one that is given outright wins over a file.

    Raises:
        DatabaseError: the file cannot be read or holds none.
    """
    from tandem.db.engine import url_in

    return db if db or db_file is None else url_in(db_file)


@app.command()
def upgrade(db: DbOption = None, db_file: DbFileOption = None) -> None:
    """Bring the schema of the database to the newest version (safe to repeat)."""
    from tandem.db.migrate import head
    from tandem.db.migrate import upgrade as migrate

    if url := url_of(db, db_file):
        migrate(url)
    else:
        from tandem.db.embedded import embedded_database

        with embedded_database():
            pass
    say(f"schema at {head()}")


@app.command()
def wait(
    db: DbOption = None,
    db_file: DbFileOption = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Give up after this long.")] = 300.0,
) -> None:
    """Wait until the database answers and has the schema that this version of Tandem needs."""
    from tandem.db.check import check
    from tandem.db.migrate import head

    url = url_of(db, db_file)
    if url is None:
        raise UsageError(
            "nothing to wait for: name the database with --db-file or --db; the embedded one needs no wait"
        )
    until, told = time.monotonic() + timeout, ""
    while True:
        try:
            check(url)
        except DatabaseError as error:
            if time.monotonic() >= until:
                raise
            if str(error) != told:
                told = str(error)
                note(f"waiting: {told}")
            time.sleep(min(WAIT_S, max(0.0, until - time.monotonic())))
        else:
            say(f"schema at {head()}")
            return


@app.command()
def prune(
    older_than: Annotated[
        int, typer.Option(min=0, max=36_500, metavar="DAYS", help="Drop months that ended before so many days ago.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be dropped.")] = False,
    db: DbOption = None,
) -> None:
    """Drop the large rows of old runs, by whole months; runs, attempts, controls and roll-ups stay."""
    from datetime import UTC, datetime, timedelta

    from tandem.db.partitions import drop_partitions_older_than, expired

    before = datetime.now(UTC) - timedelta(days=older_than)
    with database(db) as engine:
        found = expired(engine, before)
        tables = list(found.tables) if dry_run else drop_partitions_older_than(engine, before)
    for table in tables:
        say(f"{'would drop' if dry_run else 'dropped'} {table}")
    say(f"{plural(len(tables), 'table')}, with the rows of {plural(found.runs, 'run')}")


@app.command()
def start() -> None:
    """Start the embedded PostgreSQL and keep it running until `tandem db stop`."""
    from tandem.db import embedded

    say(embedded.start(hold=True).url)


@app.command()
def stop(
    force: Annotated[bool, typer.Option("--force", help="Also while other commands use it.")] = False,
) -> None:
    """Stop the embedded PostgreSQL."""
    from tandem.db import embedded

    say("still running" if embedded.stop(force=force).running else "stopped")


@app.command()
def status(json: JsonOption = False) -> None:
    """Say whether the embedded PostgreSQL runs, where its data are, and who uses it."""
    from tandem.db import embedded

    facts = asdict(embedded.status())
    if json:
        emit_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        say(f"{name.replace('_', ' ').ljust(width)}  {value}")


@app.command()
def url() -> None:
    """Print the URL of the embedded PostgreSQL, for psql and other tools (it must run: `tandem db start`)."""
    from tandem.db import embedded

    say(embedded.url())
