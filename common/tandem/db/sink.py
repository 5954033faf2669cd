"""The reference's way to the database: never blocks the step, loses nothing that it took.

Two threads. The first moves what ``put`` took into the spool, a write-ahead log, within milliseconds. From there on a
kill of the process loses nothing: the page cache keeps it, and the next process replays it. The second
delivers to PostgreSQL and gives spool space back only after the commit. While the database answers
the spool is not flushed to the disk, since the commit follows within milliseconds; once the database fails it is,
and then survives a power cut as well.

Memory is bounded: batches beyond ``memory_records`` stay in the spool alone and are read back when
their turn comes. If the spool cannot be written either, records are counted as ``lost`` beyond that bound. Whatever
was lost or refused makes ``flush`` false, and a run whose records were not delivered is never ``match``.

A database in which the attempt's own row is not stored yet (its controller could not reach it either) counts as one
that does not answer: nothing is written before that row is there.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import msgspec
import psycopg

from tandem.db import writer
from tandem.db.engine import one_line, open_connection
from tandem.db.spool import Spool, SpoolError
from tandem.errors import DatabaseError
from tandem.records import Record

BATCH_RECORDS = 5000
LINGER_S = 0.02
"""Wait for company before a transaction: a commit per record would cost the node more than the second it saves."""
STALL_S = 15.0
"""A transaction older than this is cut off: the server hangs."""
_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
POISON = ("22", "23")
"""SQLSTATE classes that say that a row is wrong, whatever the server's state: data exception, integrity."""

encoder = msgspec.msgpack.Encoder()
decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


@dataclass(frozen=True, slots=True)
class SinkStats:
    """Where the records are."""

    put: int
    acknowledged: int
    """Committed in PostgreSQL."""
    waiting: int
    """Put, neither acknowledged, refused nor lost."""
    spooled: int
    """Of those, in the local spool."""
    spool_bytes: int
    refused: int
    """Rows that PostgreSQL will never take."""
    lost: int
    """Dropped because neither database nor spool could take them."""
    last_error: str | None
    """Of the database or the spool; None once both work again."""


@dataclass(slots=True)
class _Item:
    """A record on its way. The line is made beside the transaction of earlier records, not within its time."""

    record: Record
    line: writer.Line


@dataclass(slots=True)
class _Batch:
    count: int
    items: list[_Item] | None
    """None: in the spool only."""
    place: tuple[int, int] | None
    """Positions in the spool; None: in memory only."""


class Sink:
    """Takes records of one attempt.

    Args:
        url: the database.
        spool_dir: folder of the spool.
        run_id: the run.
        attempt: of the run.
        memory_records: most records kept in memory.
        spool_limit_bytes: most bytes of the spool.
        on_error: called (from a thread of the sink) with one line whenever a new kind of trouble begins.
    """

    def __init__(
        self,
        url: str,
        spool_dir: Path,
        run_id: UUID,
        attempt: int,
        *,
        memory_records: int = 20_000,
        spool_limit_bytes: int = 1 << 30,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        self._url = url
        self._of = run_id, attempt
        self._attempt_stored = False
        self._spool = Spool(spool_dir, run_id, attempt, limit_bytes=spool_limit_bytes)
        self._memory_records = memory_records
        self._on_error = on_error or (lambda _: None)
        self._changed = threading.Condition()
        self._incoming: deque[Record] = deque()
        self._batches: deque[_Batch] = deque()
        self._held = 0
        self._put = self._acknowledged = self._refused = self._lost = self._spooled = 0
        self._database_error: str | None = None
        self._spool_error: str | None = None
        self._closing = False
        self._connection: psycopg.Connection[Any] | None = None
        self._began: float | None = None
        self._threads = [
            threading.Thread(target=self._guard, args=(self._spool_loop,), name="sink-spool", daemon=True),
            threading.Thread(target=self._guard, args=(self._deliver_loop,), name="sink-deliver", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, record: Record) -> None:
        """Take a record. Never blocks and never raises; any thread."""
        with self._changed:
            self._put += 1
            if self._closing or (self._spool_error and self._held + len(self._incoming) >= 2 * self._memory_records):
                self._lost += 1
                return
            self._incoming.append(record)
            if len(self._incoming) == 1:
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything put before is acknowledged.

        Args:
            timeout: seconds.

        Returns:
            False if the time ran out, or any record was refused or lost.
        """
        with self._changed:
            target = self._put
            self._changed.wait_for(lambda: self._acknowledged + self._refused + self._lost >= target, timeout)
            return self._acknowledged >= target and not self._refused and not self._lost

    @property
    def stats(self) -> SinkStats:
        """A snapshot; any thread."""
        with self._changed:
            waiting = self._put - self._acknowledged - self._refused - self._lost
            return SinkStats(
                put=self._put,
                acknowledged=self._acknowledged,
                waiting=waiting,
                spooled=min(self._spooled, waiting),
                spool_bytes=self._spool.size,
                refused=self._refused,
                lost=self._lost,
                last_error=self._database_error or self._spool_error,
            )

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, then end. What PostgreSQL did not take stays in the spool for the next process.

        Args:
            timeout: seconds to wait for the database.

        Returns:
            As ``flush``.
        """
        with self._changed:
            if self._closing:
                return self._acknowledged == self._put
        delivered = self.flush(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._threads[0].join()
        self._cut_off()
        self._threads[1].join(5)
        self._spool.close()
        return delivered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _guard(self, loop: Callable[[], None]) -> None:
        """A thread that dies leaves records undelivered: say so, rather than only let ``flush`` run out of time."""
        try:
            loop()
        except Exception as error:
            self._report("_database_error", f"the sink failed ({type(error).__name__}: {one_line(error, self._url)})")
            raise

    # The spooling thread.

    def _spool_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._incoming or self._closing, 0.5)
                taken = [self._incoming.popleft() for _ in range(min(len(self._incoming), BATCH_RECORDS))]
                done = self._closing and not taken
                outage = self._database_error is not None
                stalled = self._began is not None and time.monotonic() - self._began > STALL_S
            if stalled:
                self._cut_off()
            if taken:
                self._to_spool(taken, sync=outage)
            elif done:
                return

    def _to_spool(self, taken: list[Record], *, sync: bool) -> None:
        items, payloads = [], []
        for record in taken:
            try:
                payload, line = encoder.encode(record), writer.line(record)
            except (TypeError, ValueError, OverflowError) as error:
                self._refuse(record, f"a {type(record).__name__} cannot be written ({error})")
            else:
                payloads.append(payload)
                items.append(_Item(record, line))
        if not items:
            return
        place = trouble = None
        try:
            place = self._spool.append(payloads, sync=sync)
        except SpoolError as error:
            trouble = f"{error.reason}: {error}"
        self._report("_spool_error", trouble)
        with self._changed:
            batch = _Batch(len(items), items, place)
            if place is None:
                room = max(0, 2 * self._memory_records - self._held)
                self._lost += len(items[room:])
                batch = _Batch(len(items[:room]), items[:room], None)
            else:
                self._spooled += batch.count
                if self._held + batch.count > self._memory_records:
                    batch.items = None
            if batch.count:
                self._held += batch.count if batch.items is not None else 0
                self._batches.append(batch)
            self._changed.notify_all()

    # The delivering thread.

    def _deliver_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._closing)
                if self._closing:
                    break
                self._changed.wait_for(lambda: self._closing, LINGER_S)
                batches = [self._batches.popleft()]
                total = batches[0].count
                while self._batches and total + self._batches[0].count <= BATCH_RECORDS:
                    batches.append(self._batches.popleft())
                    total += batches[-1].count
            for batch in batches:
                if batch.items is None and batch.place is not None:
                    records = [decoder.decode(payload) for payload in self._spool.read(*batch.place)]
                    batch.items = [_Item(record, writer.line(record)) for record in records]
                    with self._changed:
                        self._held += batch.count
            if not self._deliver([item for batch in batches for item in batch.items or ()]):
                break
            ends = [batch.place[1] for batch in batches if batch.place is not None]
            if ends:
                self._spool.acknowledge(ends[-1])
            with self._changed:
                self._held -= total
                self._spooled -= sum(batch.count for batch in batches if batch.place is not None)
                self._changed.notify_all()
        self._disconnect()

    def _deliver(self, items: list[_Item]) -> bool:
        """Write until every record is acknowledged or refused; False if the sink closes first."""
        failures = 0
        parts = [items]
        while parts:
            part = parts.pop()
            try:
                self._write(part)
            except (psycopg.Error, OSError, DatabaseError) as error:
                self._disconnect()
                if isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in POISON:
                    if len(part) == 1:
                        record = part[0].record
                        self._refuse(record, f"PostgreSQL refuses a {type(record).__name__} ({one_line(error)})")
                    else:
                        parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                    continue
                parts.append(part)
                self._report("_database_error", one_line(error, self._url))
                with suppress(OSError):
                    self._spool.sync()
                pause = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                failures += 1
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, pause):
                        return False
            else:
                failures = 0
                self._report("_database_error", None)
                with self._changed:
                    self._acknowledged += len(part)
                    self._changed.notify_all()
        return True

    def _write(self, items: list[_Item]) -> None:
        self._began = time.monotonic()
        try:
            if self._connection is None:
                connection = open_connection(self._url, statement_timeout_s=STALL_S)
                self._connection = connection
                writer.prepare(connection)
            if not self._attempt_stored:
                if not writer.attempt_stored(self._connection, *self._of):
                    run_id, attempt = self._of
                    raise DatabaseError(f"attempt {attempt} of run {run_id} is not stored there yet")
                self._attempt_stored = True
            writer.write(self._connection, [item.line for item in items])
        finally:
            self._began = None

    def _disconnect(self) -> None:
        """A connection that met any error is never used again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                connection.close()

    def _cut_off(self) -> None:
        """From another thread: end a transaction in which the server hangs."""
        connection = self._connection
        if connection is not None and self._began is not None:
            with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
                sock.shutdown(socket.SHUT_RDWR)

    def _refuse(self, record: Record, message: str) -> None:
        self._on_error(f"{message}: {record!r:.500}")
        with self._changed:
            self._refused += 1
            self._changed.notify_all()

    def _report(self, where: str, message: str | None) -> None:
        """Keep the newest trouble; tell of it only when it begins."""
        with self._changed:
            before = getattr(self, where)
            setattr(self, where, message)
        if message is not None and before is None:
            self._on_error(message)
