"""What the commands share: consoles, the database that they read, and how a user names a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.errors import DatabaseError
from tandem.vocabulary import EXIT_INCONCLUSIVE, EXIT_MATCH, EXIT_MISMATCH, Verdict

if TYPE_CHECKING:
    from rich.console import Console
    from sqlalchemy import Engine

    from tandem.records import RunRecords

DbOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="TANDEM_DB",
        metavar="URL",
        help="PostgreSQL to use (postgresql://user:password@host/name); without it Tandem's own, embedded one.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Id of a run, any unique beginning of it, or 'last'.", show_default=False)
]


def console(*, stderr: bool = False) -> Console:
    """A console that never reads untrusted text as markup (print with ``markup=False``)."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def say(text: str = "") -> None:
    """One line for people on standard output, as it is."""
    print(text)


def note(text: str) -> None:
    """One line for people on standard error; keeps standard output for data."""
    print(text, file=sys.stderr)


def emit_json(value: Any) -> None:
    """One JSON object on standard output, indented; NaN and infinity (not JSON) become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


@contextmanager
def database(url: str | None) -> Iterator[Engine]:
    """The database to read: ``url``, checked for its version and schema, or the embedded one (brought to the head).

    What earlier commands left behind comes first: their spool is delivered, the runs of dead ones are closed.

    Raises:
        DatabaseError: it cannot be reached, is too old, or has another schema.
    """
    with database_url(url) as usable:
        from sqlalchemy.exc import DBAPIError

        from tandem.db.engine import connect, unreachable
        from tandem.recovery import recover

        engine = connect(usable)
        try:
            try:
                recover(engine, usable)
            except DatabaseError as error:  # a role that may only read, for example
                note(f"note: what earlier runs left in the spool could not be delivered: {error}")
            yield engine
        except DBAPIError as error:
            raise unreachable(usable, error) from error
        finally:
            engine.dispose()


@contextmanager
def database_url(url: str | None) -> Iterator[str]:
    """As `database`, but the URL: for what opens its own connections."""
    if url:
        from tandem.db.check import check

        check(url)
        yield url
        return
    from tandem.db.embedded import embedded_database

    with embedded_database() as embedded:
        yield embedded


def load(engine: Engine, name: str) -> RunRecords:
    """The records of the run that ``name`` (id, unique beginning, or ``last``) means.

    Raises:
        UsageError: no run or several runs have that name.
    """
    from tandem.db.queries import find_run, load_run

    return load_run(engine, find_run(engine, name))


def exit_code(verdict: str | None) -> int:
    """0 match, 1 mismatch, 2 anything else."""
    codes: dict[str, int] = {Verdict.MATCH: EXIT_MATCH, Verdict.MISMATCH: EXIT_MISMATCH}
    return codes.get(verdict or "", EXIT_INCONCLUSIVE)
