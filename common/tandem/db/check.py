"""Whether a database can take records."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tandem.db.engine import connect, unreachable
from tandem.db.migrate import require_head, revision_of
from tandem.errors import DatabaseError

MINIMUM_SERVER = 16


def check(url: str) -> None:
    """Make sure that the database can take records: reachable, new enough, schema at head.

    Raises:
        DatabaseError: one line with the cause and the mend.
    """
    engine = connect(url)
    try:
        with engine.connect() as conn:
            version = int(conn.scalar(text("SHOW server_version_num")) or 0)
            if version < MINIMUM_SERVER * 10_000:
                raise DatabaseError(
                    f"the database is PostgreSQL {version // 10_000}, Tandem needs {MINIMUM_SERVER} or newer: "
                    "upgrade the server, or leave --db out to use the embedded one"
                )
            if conn.scalar(text("SELECT pg_is_in_recovery()")):
                raise DatabaseError("the database is a read-only standby: give the URL of its primary")
            found = revision_of(conn)
        require_head(found)
    except DBAPIError as error:
        raise unreachable(url, error) from None
    finally:
        engine.dispose()
