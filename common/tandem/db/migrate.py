"""The schema's version: upgrade, downgrade, and what is there now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tandem.db.engine import connect, one_line, unreachable
from tandem.errors import DatabaseError

MIGRATION_LOCK = 0x74616E64656D0001
"""Advisory lock that one migration holds ("tandem", 1)."""
WAIT_FOR_OTHERS_S = 120
"""How long a migration waits for another migration."""
LOCK_TIMEOUT_S = 10
"""How long a migration waits for a table: a long reader must not queue every writer behind a waiting migration."""
STATEMENT_TIMEOUT_S = 3600
_one_at_a_time = threading.Lock()
"""Alembic keeps its context in a global."""


def _config() -> Config:
    spec = find_spec("tandem_migrations")
    if spec is None or not spec.submodule_search_locations:
        raise DatabaseError("the package tandem_migrations is missing: install Tandem again")
    config = Config()
    config.set_main_option("script_location", str(next(iter(spec.submodule_search_locations))).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def head() -> str:
    """Revision that this version of Tandem needs."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    if revision is None:
        raise DatabaseError("the package tandem_migrations holds no revision: install Tandem again")
    return revision


def revision_of(conn: Connection) -> str | None:
    """Revision of the schema behind ``conn``; None if there is none."""
    return MigrationContext.configure(conn).get_current_revision()


def current(url: str) -> str | None:
    """Revision of the schema at ``url``; None if there is none.

    Raises:
        DatabaseError: the database cannot be reached.
    """
    engine = connect(url)
    try:
        with engine.connect() as conn:
            return revision_of(conn)
    except DBAPIError as error:
        raise unreachable(url, error) from None
    finally:
        engine.dispose()


def require_head(found: str | None) -> None:
    """Refuse a schema that is not the one this version of Tandem writes.

    Raises:
        DatabaseError: says which is older, the schema or Tandem.
    """
    wanted = head()
    if found == wanted:
        return
    if found is None:
        raise DatabaseError("the database has no Tandem schema: run `tandem db upgrade`")
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if found in known:
        raise DatabaseError(f"the database schema is old ({found}, needed {wanted}): run `tandem db upgrade`")
    raise DatabaseError(f"the database schema ({found}) is newer than this Tandem ({wanted}): upgrade Tandem")


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the schema to ``revision``. Safe to run from several places at once: one works, the others wait.

    At the head, runs that an earlier version finished are summarised for their nodes' profiles.

    Raises:
        DatabaseError: unreachable, locked by a long transaction, or the schema is newer than this Tandem.
    """
    _run(url, lambda config: command.upgrade(config, revision))
    if revision == "head":
        from tandem.db.profiles import catch_up

        engine = connect(url, statement_timeout_s=STATEMENT_TIMEOUT_S)
        try:
            catch_up(engine)
        except DBAPIError as error:
            raise unreachable(url, error) from None
        finally:
            engine.dispose()


def downgrade(url: str, revision: str) -> None:
    """Take the schema back to ``revision`` (``base``: remove it, with all records).

    Raises:
        DatabaseError: as for ``upgrade``.
    """
    _run(url, lambda config: command.downgrade(config, revision))


def _run(url: str, action: Callable[[Config], None]) -> None:
    config = _config()
    engine = connect(url, statement_timeout_s=STATEMENT_TIMEOUT_S)
    try:
        with _one_at_a_time, engine.connect() as conn:
            config.attributes["connection"] = conn
            action(config)
            conn.commit()
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == "55P03":
            raise DatabaseError(
                f"the schema was not changed, a table stayed locked ({one_line(error, url)}): "
                "end long transactions or other migrations, then try again"
            ) from None
        raise unreachable(url, error) from None
    except CommandError as error:
        raise DatabaseError(f"the schema cannot be migrated ({one_line(error)}): upgrade Tandem") from None
    finally:
        engine.dispose()
