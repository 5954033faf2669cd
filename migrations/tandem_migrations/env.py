"""Runs migrations on the connection that ``tandem.db.migrate`` opened. Never run by hand: use ``tandem db upgrade``."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from tandem.db.migrate import LOCK_TIMEOUT_S, MIGRATION_LOCK, WAIT_FOR_OTHERS_S
from tandem.db.models import Base

conn = context.config.attributes.get("connection")
if conn is None:
    raise RuntimeError("migrations need a connection: use `tandem db upgrade`")

context.configure(connection=conn, target_metadata=Base.metadata, compare_type=True, compare_server_default=True)
with context.begin_transaction():
    # lock_timeout also bounds the wait for an advisory lock, so it is set twice: long for the queue of
    # migrations, then short for tables.
    conn.execute(text(f"SET LOCAL lock_timeout = '{WAIT_FOR_OTHERS_S}s'"))
    conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
    conn.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
    context.run_migrations()
