"""How far a side may run ahead of the comparison. Pure."""

from __future__ import annotations


class Window:
    """Largest number of unconfirmed sites, shrinking with roll-backs and growing back slowly.

    A roll-back halves the limit (at least 1), since what ran ahead was wasted; every ``limit`` confirmed
    sites in a row add one. So a node that corrupts all the time costs little more than full exchange, and a rare
    corruption costs nothing after it. A limit of 0 blocks at every site.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.limit = largest
        self._confirmed = 0

    def admits(self, unconfirmed: int, sites: int) -> bool:
        """Whether a program with ``sites`` sites may start; one program always may."""
        return unconfirmed == 0 or unconfirmed + sites <= self.limit

    def confirmed(self, sites: int) -> None:
        self._confirmed += sites
        while self.limit < self.largest and self._confirmed >= self.limit:
            self._confirmed -= self.limit
            self.limit += 1

    def rolled_back(self) -> None:
        self.limit = max(1, self.limit // 2) if self.largest else 0
        self._confirmed = 0
