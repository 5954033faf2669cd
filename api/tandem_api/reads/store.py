"""The database as the API uses it: small bounded questions in the event loop, whole runs and decisions in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tandem.db.engine import connect, connect_arguments, one_line, parse
from tandem.db.migrate import head, revision_of
from tandem_api.problems import Problem, away, log
from tandem_api.reads.patience import bound

T = TypeVar("T")
WAIT_S = 5.0
"""How long a question waits for one of the connections."""
WHOLE_AT_ONCE = 2
"""Reports and summaries under way at once: each holds a whole run."""
EXPORTS_AT_ONCE = 2
"""Exports: each holds a cursor for as long as its client reads, so no report waits for them."""
QUIET_S = 1.0
"""After a failed connection nobody tries again for so long: a database that comes back is not met by a crowd."""
CANCELLED = "57014"
DRIVER = (DBAPIError, psycopg.Error, PoolTimeout)
"""What a database that fails raises."""
_MARGIN_S = 2.0
"""The server gives up by itself; one that cannot is given up a little later."""


class Store:
    """Reads, each in one snapshot, and the one write: a decision about a node.

    Args:
        url: of PostgreSQL.
        pool: connections for small questions.
        query_s: after which the server gives up one of them.
        whole_s: the same for whole runs.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        pool: int = 10,
        query_s: float = 10.0,
        whole_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._query_s, self._clock = query_s, clock
        self._failed_at: float | None = None
        arguments = connect_arguments(query_s)
        arguments["options"] += " -c default_transaction_read_only=on"
        self._engine: AsyncEngine = create_async_engine(
            parse(url),
            pool_size=pool,
            max_overflow=0,
            pool_timeout=WAIT_S,
            pool_pre_ping=True,
            pool_recycle=1800,
            hide_parameters=True,
            isolation_level="REPEATABLE READ",
            connect_args=arguments,
        )
        self._whole: Engine = connect(url, statement_timeout_s=whole_s, pool_size=WHOLE_AT_ONCE + EXPORTS_AT_ONCE + 2)
        bound(self._whole, whole_s + _MARGIN_S)
        self._gate = asyncio.Semaphore(WHOLE_AT_ONCE)
        self._exports = asyncio.Semaphore(EXPORTS_AT_ONCE)

    async def ask(self, question: Callable[..., T], *args: Any, **more: Any) -> T:
        """Answer a question that takes a connection first, in one read-only snapshot.

        Raises:
            Problem: 503: the database does not answer, or all its connections are busy; 504: it took too long.
        """
        self._check()
        try:
            async with asyncio.timeout(self._query_s + WAIT_S + _MARGIN_S), self._engine.connect() as conn:
                answer = await conn.run_sync(question, *args, **more)
        except (*DRIVER, TimeoutError, OSError) as error:
            raise self.problem(error) from None
        self._failed_at = None
        return answer

    async def whole(self, question: Callable[..., T], *args: Any) -> T:
        """Answer a question that reads a whole run and computes, in a thread; it takes a connection first."""
        self._check()
        async with self._waited(self._gate):
            return await asyncio.to_thread(self._in_thread, question, args, False)

    async def write(self, decision: Callable[..., T], *args: Any) -> T:
        """Have a decision made and stored in one transaction; it takes a connection first."""
        self._check()
        return await asyncio.to_thread(self._in_thread, decision, args, True)

    def now(self, question: Callable[..., T], *args: Any) -> T:
        """Answer a question in the calling thread, which must not be the event loop's; it takes a connection first.

        Raises:
            Problem: as `ask`.
        """
        self._check()
        return self._in_thread(question, args, False)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Connection]:
        """A connection for a thread that reads a whole run bit by bit."""
        self._check()
        async with self._waited(self._exports):
            try:
                conn = await asyncio.to_thread(self._open)
            except DBAPIError as error:
                raise self.problem(error) from None
            try:
                yield conn
            finally:
                await asyncio.to_thread(conn.close)

    async def wrong(self) -> str | None:
        """Why the database cannot be used, or None."""
        try:
            found = await self.ask(revision_of)
        except Problem as problem:
            return problem.detail
        return None if found == head() else "the database's schema is not that of this version"

    async def close(self) -> None:
        await self._engine.dispose()
        await asyncio.to_thread(self._whole.dispose)

    # -- below ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _waited(self, gate: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(WAIT_S * 4):
                await gate.acquire()
        except TimeoutError:
            raise away("others are reading whole runs: try again later", "busy") from None
        try:
            yield
        finally:
            gate.release()

    def _open(self) -> Connection:
        return self._whole.connect().execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def _in_thread(self, question: Callable[..., T], args: tuple[Any, ...], writes: bool) -> T:
        try:
            if writes:
                with self._whole.begin() as conn:
                    return question(conn, *args)
            with self._open() as conn:
                return question(conn, *args)
        except (DBAPIError, PoolTimeout) as error:
            raise self.problem(error) from None

    def _check(self) -> None:
        if self._failed_at is not None and self._clock() - self._failed_at < QUIET_S:
            raise away("the database does not answer")

    def problem(self, error: BaseException) -> Problem:
        """What a failure of the database is to a client."""
        state = getattr(getattr(error, "orig", error), "sqlstate", None)
        log.warning("database: %s", one_line(error, self.url) or type(error).__name__)
        if state == CANCELLED:
            return Problem(504, "too-slow", "the database took too long: ask for less at once")
        if isinstance(error, (PoolTimeout, TimeoutError)):
            return away("the database is busy", "busy")
        self._failed_at = self._clock()
        return away("the database does not answer")


def ping(conn: Connection) -> None:
    conn.execute(text("SELECT 1"))
