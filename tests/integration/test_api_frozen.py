"""A database that is frozen (its machine paused, its disk hung) says nothing and closes nothing: nobody waits for it
longer than for a slow one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, text

from tandem_api.problems import Problem
from tandem_api.reads import patience
from tandem_api.reads.store import QUIET_S, Store

LONGEST_S = 15.0
"""A second of the server's and the margin; the rest is for a machine that is late."""


@pytest.fixture
def store(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(patience, "PING_S", 0.5)
    made = Store(database_url, whole_s=1.0)
    yield made
    asyncio.run(made.close())


def backend(conn: Connection) -> int:
    return int(conn.execute(text("SELECT pg_backend_pid()")).scalar_one())


@contextmanager
def frozen() -> Iterator[Callable[[int], None]]:
    pids: list[int] = []

    def freeze(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        pids.append(pid)

    try:
        yield freeze
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def asked(store: Store, way: str, question: Callable[[Connection], Any]) -> Any:
    """A question, asked in one of the ways that threads ask."""

    async def bit_by_bit() -> Any:
        async with store.snapshot() as conn:
            return await asyncio.to_thread(question, conn)

    if way == "now":
        return store.now(question)
    return asyncio.run(bit_by_bit() if way == "snapshot" else getattr(store, way)(question))  # type: ignore[arg-type]


WAYS = ["whole", "write", "now", "snapshot"]


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_freezes_over_a_question(store: Store, way: str) -> None:
    with frozen() as freeze:

        def question(conn: Connection) -> int:
            freeze(backend(conn))
            return backend(conn)

        began = time.monotonic()
        with pytest.raises(Exception) as caught:  # exports make it a problem where they end
            asked(store, way, question)
        assert time.monotonic() - began < LONGEST_S
    problem = caught.value if isinstance(caught.value, Problem) else store.problem(caught.value)
    assert (problem.status, problem.name) == (503, "database-away")
    store._clock = lambda: time.monotonic() + 2 * QUIET_S
    assert asked(store, way, backend) > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_froze_behind_an_idle_connection(store: Store, way: str) -> None:
    """Another connection is made: only one of its processes hangs."""
    with frozen() as freeze:
        first = asked(store, way, backend)
        freeze(first)
        began = time.monotonic()
        assert asked(store, way, backend) != first
        assert time.monotonic() - began < LONGEST_S
