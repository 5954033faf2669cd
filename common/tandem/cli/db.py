"""``tandem db``: the database that keeps the records."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tandem.cli.output import DbOption, JsonOption, emit_json, say

app = typer.Typer(
    help="Manage the database that keeps the records.",
    no_args_is_help=True,
)


@app.command()
def upgrade(db: DbOption = None) -> None:
    """Bring the schema of the database to the newest version (safe to repeat)."""
    from tandem.db.migrate import head
    from tandem.db.migrate import upgrade as migrate

    if db:
        migrate(db)
    else:
        from tandem.db.embedded import embedded_database

        with embedded_database():
            pass
    say(f"schema at {head()}")


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
