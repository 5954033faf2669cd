"""Connections: one way to open a database, and one line for what is wrong with it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from tandem.errors import DatabaseError
from tandem.worker_io import DATABASE_FOLDER

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 60


def parse(url: str) -> URL:
    """A ``postgresql://`` (or ``postgres://``) URL for psycopg 3.

    Raises:
        DatabaseError: it is no PostgreSQL URL. The message never shows the URL: it may hold a password.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseError(
            "the database URL cannot be read: write postgresql://USER:PASSWORD@HOST:PORT/NAME, "
            "with special characters percent-encoded"
        ) from None
    if parsed.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise DatabaseError(f"a {parsed.drivername} database cannot be used: give a postgresql:// URL")
    return parsed.set(drivername="postgresql+psycopg")


def url_in(file: Path) -> str:
    """The URL that a file holds; how services and Jobs are told: never as an argument.

    Raises:
        DatabaseError: the file cannot be read or holds none.
    """
    try:
        url = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not plain text"
        raise DatabaseError(f"the file {file} with the database's URL cannot be read ({why})") from None
    if not url:
        raise DatabaseError(f"the file {file} is empty: it must hold the database's URL")
    return url


def mounted_url() -> str:
    """The URL in a service's pod: in the file that TANDEM_DB_FILE names, by default where the Secret is mounted.

    Raises:
        DatabaseError: the file cannot be read or holds none.
    """
    return url_in(Path(os.environ.get("TANDEM_DB_FILE", f"{DATABASE_FOLDER}/uri")))


def conninfo(url: str) -> str:
    """The same URL as libpq reads it."""
    return parse(url).set(drivername="postgresql").render_as_string(hide_password=False)


def one_line(error: BaseException, url: str = "") -> str:
    """A driver's message as one line, without the password of ``url``."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    message = "; ".join(lines[:2]) or type(cause).__name__
    for secret in re.findall(r"://[^/?#]*?:([^/?#]*)@", url) + re.findall(r"[?&]password=([^&]*)", url):
        for form in {secret, unquote(secret)} - {""}:
            # Only as a word of its own: a short one is part of many words, which would give it away.
            message = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", "***", message)
    return message


def connect(url: str, *, statement_timeout_s: float = STATEMENT_TIMEOUT_S, pool_size: int = 3) -> Engine:
    """An engine with a small pool. Connects lazily; ``check`` connects.

    A connection that met any driver error is not handed out again: SQLAlchemy invalidates it, and every
    checkout is tested first.

    Raises:
        DatabaseError: the URL cannot be read.
    """
    return create_engine(
        parse(url),
        pool_size=pool_size,
        pool_pre_ping=True,
        pool_recycle=1800,
        hide_parameters=True,
        connect_args=connect_arguments(statement_timeout_s),
    )


def connect_arguments(statement_timeout_s: float) -> dict[str, Any]:
    """Settings for libpq of every connection: bounded waits, UTC, and a dead server noticed within seconds."""
    return {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "application_name": "tandem",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 10_000,
        "options": f"-c statement_timeout={int(statement_timeout_s * 1000)} -c lock_timeout=30000 -c timezone=UTC",
    }


def open_connection(url: str, *, statement_timeout_s: float = STATEMENT_TIMEOUT_S) -> psycopg.Connection[Any]:
    """A plain psycopg connection, for COPY.

    Raises:
        DatabaseError: the URL cannot be read.
        psycopg.OperationalError: the server does not answer.
    """
    return psycopg.connect(conninfo(url), **connect_arguments(statement_timeout_s))


def unreachable(url: str, error: BaseException) -> DatabaseError:
    """The one-line error of a database that does not answer or refuses."""
    target = parse(url)
    where = target.host or target.query.get("host") or "the default socket"
    port = f":{target.port}" if target.port else ""
    message = one_line(error, url)
    mend = "check that it runs and that --db is right"
    if "password authentication failed" in message or "no password supplied" in message:
        mend = "check the user and password in --db"
    elif "does not exist" in message and "database" in message:
        mend = "create it, then run `tandem db upgrade`"
    return DatabaseError(f"the database at {where}{port} cannot be used ({message}): {mend}")
