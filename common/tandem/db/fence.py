"""The fencing token in what a leader writes: an old leader that still believes in its lease changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from tandem.db.engine import unreachable
from tandem.errors import DatabaseError

_CLAIM = text(
    "INSERT INTO fences AS f (name, token) VALUES (:name, :token) "
    "ON CONFLICT (name) DO UPDATE SET token = EXCLUDED.token WHERE f.token <= EXCLUDED.token RETURNING token"
)


class Fenced(DatabaseError):  # noqa: N818 - a state, as the callers read it
    """A newer leader has written: this process must stop acting."""


@dataclass(frozen=True, slots=True)
class Fence:
    """One leadership: its name and the token of its term, larger for every later leader."""

    engine: Engine
    name: str
    token: int

    def check(self, conn: Connection) -> None:
        """Refuse, in the transaction of ``conn``, to go on for a leader that has been followed.

        The row stays locked until the transaction ends, so that no newer leader writes in between.

        Raises:
            Fenced: a newer leader has written.
        """
        if conn.scalar(_CLAIM, {"name": self.name, "token": self.token}) is None:
            raise Fenced(f"a newer {self.name} has written to the database: this one (term {self.token}) must end")

    def claim(self) -> None:
        """Write the token, so that every earlier leader is refused from now on.

        Raises:
            Fenced: a newer leader has written.
            DatabaseError: the database failed.
        """
        try:
            with self.engine.begin() as conn:
                self.check(conn)
        except DBAPIError as error:
            raise unreachable(self.engine.url.render_as_string(hide_password=False), error) from None


def newest(engine: Engine, name: str) -> int:
    """The largest token that has written; 0 if none has.

    Raises:
        DatabaseError: the database failed.
    """
    try:
        with engine.connect() as conn:
            return int(conn.scalar(text("SELECT token FROM fences WHERE name = :name"), {"name": name}) or 0)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None
