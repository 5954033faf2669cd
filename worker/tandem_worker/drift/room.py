"""How many steps may be started while the one before is not settled: a matter of memory. Pure.

A step keeps the state that it began with until it is settled, for replays, and makes another; a replay makes a third
for its time. So a side that runs no step ahead holds two states, three in a replay, and one more for each step that
runs ahead. The bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem_worker.chain import Plan

MOST = 1
"""Steps ahead at most: enough that the devices never wait for the comparison."""
USABLE = {"device": 0.9, "host": 0.5}
"""Share of the free memory that is counted on; a host's is everybody's, and may be gone a moment later."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory beyond what is held before the first step: the programs and one state."""

    state: int
    """Bytes of all that outlives a step."""
    working: int
    """Bytes that the step's program needs beside its inputs and outputs."""
    free: int | None
    """Bytes that are there for this side; None: not known."""
    source: Literal["device", "host"]
    """Who says so."""

    def needed(self, ahead: int) -> int:
        """Bytes beyond what is held, where so many steps run ahead."""
        return (2 + ahead) * self.state + self.working

    @property
    def ahead(self) -> int:
        """Steps that may be ahead: as many as fit, none if not even one does; all if nothing is known."""
        if self.free is None:
            return MOST
        return max((n for n in range(1, MOST + 1) if self.needed(n) <= USABLE[self.source] * self.free), default=0)


def state_bytes(plan: Plan) -> int:
    """Bytes of one rank's persistent slots."""
    return sum(plan.slots[slot].nbytes for slot in plan.persistent)
