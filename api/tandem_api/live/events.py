"""Events of a run, and the places in their order. Pure.

The order is that of the records: attempt, step, number within the step. A reference writes a step's mismatches before
the step itself, and everything in this order, so a stored step is whole; that makes a place mean the same for ever, in
every process, and no memory is needed to go on from one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

ROWS = 50
"""Mismatches in one event."""
AFTER_ROWS = 1_000_000
"""Number of what comes after all mismatches of a step: the progress up to it."""
AFTER_STEPS = 2**62
"""Step of what comes after all steps of an attempt: how it ended."""
LAST = 2**31 - 1
"""Attempt of what comes last: the verdict."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where an event stands."""

    attempt: int = 0
    step: int = -1
    number: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}.{self.number}"


BEGIN = Place()
END = Place(LAST, 0, 0)


def place(text: str) -> Place | None:
    """What a ``Last-Event-ID`` names; None if it is none of ours."""
    found = re.fullmatch(r"(\d{1,10})\.(-1|\d{1,19})\.(\d{1,7})", text, re.ASCII)
    if found is None:
        return None
    attempt, step, number = map(int, found.groups())
    if attempt > LAST or step > AFTER_STEPS or number > AFTER_ROWS:
        return None
    return Place(attempt, step, number)


@dataclass(frozen=True, slots=True)
class Event:
    """One event, ready to be sent. Without a place it is a snapshot: the newest replaces those before it."""

    kind: str
    place: Place | None
    wire: bytes


def event(kind: str, value: Any, at: Place | None = None) -> Event:
    """An event with a JSON value."""
    lines = [f"event: {kind}"]
    if at is not None:
        lines.append(f"id: {at}")
    lines.append(f"data: {msgspec.json.encode(value).decode()}")
    return Event(kind, at, ("\n".join(lines) + "\n\n").encode())


def comment(text: str) -> bytes:
    return f": {text}\n\n".encode()
