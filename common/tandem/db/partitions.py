"""Monthly partitions of the large tables. A month is a range of UUIDv7 run ids.

The first 48 bits of a UUIDv7 are milliseconds since the epoch (RFC 9562, section 5.7) and PostgreSQL orders UUIDs
by their bytes, so all runs of a month lie between two bounds. There is no default partition: a run
whose month was never made is refused, it does not silently land where retention cannot drop it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from tandem.db.models import PARTITIONED
from tandem.errors import DatabaseError

PARTITION_LOCK = 0x74616E64656D0002
"""Advisory lock held while partitions are made or dropped ("tandem", 2)."""


@dataclass(frozen=True, slots=True)
class Month:
    """A calendar month in UTC."""

    year: int
    month: int

    @property
    def suffix(self) -> str:
        return f"y{self.year:04d}m{self.month:02d}"

    @property
    def start(self) -> datetime:
        return datetime(self.year, self.month, 1, tzinfo=UTC)

    @property
    def following(self) -> Month:
        return Month(self.year + self.month // 12, self.month % 12 + 1)

    @property
    def low(self) -> UUID:
        """Least UUID whose timestamp lies in the month."""
        return UUID(int=int(self.start.timestamp() * 1000) << 80)

    @classmethod
    def of(cls, when: datetime) -> Month:
        when = when.astimezone(UTC)
        return cls(when.year, when.month)


def created(run_id: UUID) -> datetime:
    """When a UUIDv7 was made (UTC, milliseconds).

    Raises:
        DatabaseError: ``run_id`` is no UUIDv7, or its time is outside the years 1970 to 9998.
    """
    if run_id.version != 7:
        raise DatabaseError(f"run id {run_id} is not a UUIDv7: make ids with tandem.ids.new_run_id")
    try:
        when = datetime.fromtimestamp((run_id.int >> 80) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        when = datetime.max.replace(tzinfo=UTC)
    if when.year > 9998:
        raise DatabaseError(f"run id {run_id} holds an impossible time: make ids with tandem.ids.new_run_id")
    return when


def ensure_partitions(conn: Connection, when: datetime) -> list[str]:
    """Create the month's partition of every partitioned table where it is missing, in the caller's transaction.

    A partition is made as a table of its own and then attached: that takes SHARE UPDATE EXCLUSIVE on the parent, while
    ``CREATE TABLE ... PARTITION OF`` would stop every reader and writer.

    Returns:
        Names of the tables that were created.
    """
    month = Month.of(when)
    names = {table: f"{table}_{month.suffix}" for table in PARTITIONED}
    attached = text(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE c.relname = ANY(:names) AND c.relnamespace = current_schema()::regnamespace"
    )
    query = {"names": list(names.values())}
    if len(set(conn.scalars(attached, query))) == len(names):
        return []
    conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": PARTITION_LOCK})
    present = set(conn.scalars(attached, query))
    made = []
    for table, name in names.items():
        if name in present:
            continue
        low, high = month.low, month.following.low
        conn.execute(text(f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)"))
        conn.execute(text(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')"))
        made.append(name)
    return made


@dataclass(frozen=True, slots=True)
class Expired:
    """What retention would drop, or dropped."""

    tables: tuple[str, ...]
    """Oldest first."""
    runs: int
    """Runs whose records are in them, as far as they are not marked already."""


def expired(engine: Engine, before: datetime) -> Expired:
    """What `drop_partitions_older_than` would drop, and whose records these are."""
    limit = Month.of(before)
    with engine.connect() as conn:
        tables = tuple(name for _, name, _ in _months(conn, limit))
        runs = conn.scalar(
            text("SELECT count(*) FROM runs WHERE run_id < :low AND records_dropped_at IS NULL"), {"low": limit.low}
        )
    return Expired(tables, int(runs or 0))


def _months(conn: Connection, limit: Month) -> list[tuple[str, str, bool | None]]:
    """(parent, partition, whether its detaching is pending) of every month before ``limit``, oldest first.

    The last is None where an earlier call was cut off between detaching and dropping.
    """
    rows = conn.execute(
        text(
            "SELECT p.relname, c.relname, i.inhdetachpending FROM pg_class p "
            "JOIN pg_class c ON c.relname ~ ('^' || p.relname || '_y[0-9]{4}m[0-9]{2}$') "
            "AND c.relnamespace = p.relnamespace AND c.relkind = 'r' "
            "LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = p.oid "
            "WHERE p.relname = ANY(:tables) AND p.relkind = 'p' "
            "AND p.relnamespace = current_schema()::regnamespace ORDER BY right(c.relname, 8), p.relname"
        ),
        {"tables": list(PARTITIONED)},
    ).all()
    return [(table, name, pending) for table, name, pending in rows if name.removeprefix(f"{table}_") < limit.suffix]


def drop_partitions_older_than(engine: Engine, before: datetime) -> list[str]:
    """Retention: drop every month that ended before ``before``; roll-ups, runs and attempts stay.

    The runs whose records go are marked ``records_dropped_at``, first: records of theirs that turn up later in a
    spool are then refused, so that they cannot be counted twice.

    Returns:
        Names of the dropped tables, oldest first.
    """
    limit = Month.of(before)
    dropped: list[str] = []
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("SELECT pg_advisory_lock(:key)"), {"key": PARTITION_LOCK})
        try:
            conn.execute(
                text("UPDATE runs SET records_dropped_at = now() WHERE run_id < :low AND records_dropped_at IS NULL"),
                {"low": limit.low},
            )
            for table, name, pending in _months(conn, limit):
                if pending is not None:
                    how = "FINALIZE" if pending else "CONCURRENTLY"
                    conn.execute(text(f"ALTER TABLE {table} DETACH PARTITION {name} {how}"))
                conn.execute(text(f"DROP TABLE {name}"))
                dropped.append(name)
        finally:
            conn.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": PARTITION_LOCK})
    return dropped
