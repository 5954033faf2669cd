"""Connections that wait for an answer only so long: a frozen server holds its own time-outs back as well."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg
from sqlalchemy import Engine, event

PING_S = 5.0
"""How long the server may take to say that an idle connection still lives."""


class Impatient(psycopg.Connection[Any]):
    """A connection that is closed once the server took too long over one question."""

    patience_s: float = PING_S

    def wait(self, gen: Any, *args: Any, **more: Any) -> Any:
        try:
            return super().wait(_within(gen, self.patience_s), *args, **more)
        except _LateError:
            self.pgconn.finish()
            raise psycopg.OperationalError(f"the server said nothing for {self.patience_s:g} s") from None


class _LateError(Exception):
    pass


def _within(gen: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
    """The same steps of a conversation; the driver wakes it also while nothing comes."""
    until = time.monotonic() + seconds
    try:
        step = next(gen)
        while True:
            ready = yield step
            if time.monotonic() > until:
                raise _LateError
            step = gen.send(ready)
    except StopIteration as end:
        return end.value


def bound(engine: Engine, seconds: float) -> None:
    """Let no statement of an engine wait longer; an idle connection that is dead is replaced sooner."""

    def connect(_dialect: Any, _record: Any, args: Any, more: dict[str, Any]) -> Any:
        return Impatient.connect(*args, **more)

    def out(connection: Impatient, _record: Any, _proxy: Any) -> None:
        connection.patience_s = seconds

    def back(connection: Impatient | None, _record: Any) -> None:
        if connection is not None:
            connection.patience_s = PING_S

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "checkout", out)
    event.listen(engine, "checkin", back)
