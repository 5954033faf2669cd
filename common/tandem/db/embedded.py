"""The embedded PostgreSQL of this user: started by whoever comes first, stopped with its last user.

Commands that run at once share it. Each holds a lease (``tandem.db.leases``); the last one to leave stops
the server, unless ``tandem db start`` holds it. All changes happen under one lock file. If its users
are killed the server stays up until the next command ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tandem.db import leases, migrate
from tandem.db.engine import one_line, open_connection
from tandem.db.server import DATABASE, START_TIMEOUT_S, Server
from tandem.errors import DatabaseError
from tandem.home import home as default_home

START_TRIES = 3
"""Starts before a server that does not answer is an error."""
_LOCK_TIMEOUT_S = START_TIMEOUT_S + 60


@dataclass(frozen=True, slots=True)
class Status:
    """What the embedded database does now."""

    running: bool
    held: bool
    """Whether ``tandem db start`` keeps it up without users."""
    pid: int | None
    users: list[int]
    """Process ids of the commands that use it."""
    data: Path
    log: Path
    url: str
    """Where it answers while it runs; holds no secret."""


class _Place:
    """The files of the embedded database under one home."""

    def __init__(self, home: Path | None) -> None:
        folder = (home or default_home()) / "postgres"
        self.server = Server(folder)
        self.users = folder / "users"
        self.held = folder / "held"
        self.lock = folder / "lock"
        try:
            self.users.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"{folder} cannot be made ({error.strerror}): set TANDEM_HOME to a folder that you may write"
            ) from None

    def start(self) -> None:
        """Start the server; one that dies in the middle of it (killed, or still going down) is started again."""
        for again in range(START_TRIES):
            self.server.start()
            try:
                _ensure_database(self.server)
                return
            except DatabaseError:
                if again == START_TRIES - 1:
                    raise

    def status(self) -> Status:
        pid = self.server.pid()
        return Status(
            running=pid is not None,
            held=self.held.exists(),
            pid=pid,
            users=leases.holders(self.users),
            data=self.server.data,
            log=self.server.log,
            url=self.server.url(),
        )


@contextmanager
def embedded_database(hold: bool = False, *, home: Path | None = None, upgrade: bool = True) -> Iterator[str]:
    """URL of the embedded database, up for as long as the block runs.

    Args:
        hold: leave it running afterwards, as ``tandem db start`` does.
        home: data folder; None: ``tandem.home.home()``.
        upgrade: bring the schema to head first.

    Raises:
        DatabaseError: it cannot be made or started; one line with cause and mend.
    """
    place = _Place(home)
    with leases.exclusive(place.lock, _LOCK_TIMEOUT_S):
        lease = leases.Lease(place.users)
        try:
            place.start()
            if hold:
                place.held.touch()
        except BaseException:
            lease.release()
            raise
    try:
        url = place.server.url()
        if upgrade and migrate.current(url) != migrate.head():
            migrate.upgrade(url)
        yield url
    finally:
        with leases.exclusive(place.lock, _LOCK_TIMEOUT_S):
            lease.release()
            if not place.held.exists() and not leases.holders(place.users):
                place.server.stop()


def start(hold: bool = True, *, home: Path | None = None) -> Status:
    """``tandem db start``: start it, bring the schema to head, and (``hold``) keep it up until ``stop``."""
    with embedded_database(hold=hold, home=home):
        return status(home=home)


def stop(*, force: bool = False, home: Path | None = None) -> Status:
    """``tandem db stop``: end the hold, and stop the server if nobody uses it.

    Args:
        force: stop it although commands use it; they spool until it is back.
        home: data folder; None: ``tandem.home.home()``.

    Raises:
        DatabaseError: commands use it (the hold is ended all the same: it stops with the last of them).
    """
    place = _Place(home)
    with leases.exclusive(place.lock, _LOCK_TIMEOUT_S):
        place.held.unlink(missing_ok=True)
        users = leases.holders(place.users)
        if users and not force:
            raise DatabaseError(
                f"the embedded database is in use by process {', '.join(map(str, users))}: "
                "it stops when they end (stop it now with --force)"
            )
        place.server.stop()
        return place.status()


def status(*, home: Path | None = None) -> Status:
    """What the embedded database does now."""
    place = _Place(home)
    with leases.exclusive(place.lock, _LOCK_TIMEOUT_S):
        return place.status()


def url(*, home: Path | None = None) -> str:
    """URL of the running embedded database.

    Raises:
        DatabaseError: it does not run.
    """
    found = status(home=home)
    if not found.running:
        raise DatabaseError("the embedded database does not run: start it with `tandem db start`")
    return found.url


def _ensure_database(server: Server) -> None:
    try:
        with open_connection(server.url("postgres")) as conn:
            conn.autocommit = True
            if conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                conn.execute(f"CREATE DATABASE {DATABASE}")
    except psycopg.Error as error:
        raise DatabaseError(f"the embedded database did not answer ({one_line(error)}): see {server.log}") from None
