"""Databases of a test's own on the session's PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fresh_database(server: str) -> Iterator[str]:
    """URL of a fresh database, schema at head.

    Args:
        server: URL of the template, to which nobody may be connected.
    """
    from tandem.db.engine import open_connection, parse

    name = f"test_{os.urandom(6).hex()}"
    admin = parse(server).set(drivername="postgresql", database="postgres").render_as_string(False)
    with open_connection(admin) as conn:
        conn.autocommit = True
        conn.execute(f"CREATE DATABASE {name} TEMPLATE tandem")
        yield parse(server).set(drivername="postgresql", database=name).render_as_string(False)
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")
