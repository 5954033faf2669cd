"""Who asks, and whether they may: one interface for a cluster's tokens and for this machine's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tandem_api.problems import Problem

LONGEST_TOKEN = 16 << 10
"""Characters; what is longer is no token."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody whose token was found good."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


ANONYMOUS = User("anonymous")
"""Whoever reads where no token is asked for."""


class Authenticator(Protocol):
    """Checks tokens and rights."""

    secret: str | None
    """The one token of this machine, with which sessions of browsers are proved; None: users have their own."""

    def met(self, token: str) -> bool:
        """Whether the token was found good before, so that who brings it is no stranger. Asks nobody, and says nothing
        of now: it may have ended since.
        """

    async def authenticate(self, token: str) -> User:
        """Whose token it is.

        Raises:
            Problem: 401: nobody's; 503: cannot be told now.
        """

    async def allowed(self, user: User, verb: str) -> bool:
        """Whether the user may do that with PairRuns: ``get``, ``list``, ``create``, ``update`` or ``delete``.

        Raises:
            Problem: 503: cannot be told now.
        """


def usable(token: str) -> bool:
    """Whether a text could be a token at all."""
    return 0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable()


def unauthenticated(detail: str = "the token is not valid here") -> Problem:
    return Problem(401, "unauthenticated", detail, headers={"WWW-Authenticate": 'Bearer realm="tandem"'})


def forbidden(user: User, verb: str) -> Problem:
    return Problem(403, "forbidden", f"{user.name} may not {verb} pairruns here: have that verb granted")
