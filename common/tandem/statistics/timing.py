"""When mismatches come: onset, gaps, bursts, burstiness. Pure.

Time is counted in steps of one attempt; an attempt's first step is 1 (step 0 compares the initial parameters). A gap is
the distance of two successive affected steps, so 1 where they follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import msgspec


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Affected steps of any number of attempts; ``+`` merges attempts, no gap reaches from one to the next."""

    steps: int = 0
    """Steps that were compared."""
    affected: int = 0
    onset: int | None = None
    """First affected step; of several attempts the least."""
    bursts: int = 0
    """Runs of affected steps without a clean one in between."""
    longest_burst: int = 0
    """In steps."""
    gaps: int = 0
    gap_sum: int = 0
    gap_squares: int = 0
    longest_gap: int = 0

    @property
    def mean_gap(self) -> float | None:
        """In steps; None without a gap."""
        return self.gap_sum / self.gaps if self.gaps else None

    @property
    def burstiness(self) -> float | None:
        """(sigma - mu) / (sigma + mu) of the gaps: -1 regular, 0 as by chance (Poisson), towards 1 in bursts.

        Goh and Barabasi, "Burstiness and memory in complex systems", EPL 81, 2008; sigma is the population's. None
        below two gaps. Of n gaps it is at most (sqrt(n - 1) - 1) / (sqrt(n - 1) + 1), so few gaps cannot show a burst
        (Kim and Jo, Physical Review E 94, 2016).
        """
        if self.gaps < 2:
            return None
        variance = self.gaps * self.gap_squares - self.gap_sum * self.gap_sum
        sigma, mu = math.sqrt(max(0, variance)) / self.gaps, self.gap_sum / self.gaps
        return (sigma - mu) / (sigma + mu)

    def __add__(self, other: Timing) -> Timing:
        onsets = [o for o in (self.onset, other.onset) if o is not None]
        return Timing(
            steps=self.steps + other.steps, affected=self.affected + other.affected,
            onset=min(onsets, default=None), bursts=self.bursts + other.bursts,
            longest_burst=max(self.longest_burst, other.longest_burst), gaps=self.gaps + other.gaps,
            gap_sum=self.gap_sum + other.gap_sum, gap_squares=self.gap_squares + other.gap_squares,
            longest_gap=max(self.longest_gap, other.longest_gap),
        )  # fmt: skip


def timing(steps: int, affected: Iterable[int]) -> Timing:
    """Timing of one attempt.

    Args:
        steps: compared, step 0 not counted.
        affected: numbers of the steps in which anything mismatched, in any order.
    """
    hit = sorted(set(affected))
    gaps = [later - earlier for earlier, later in pairwise(hit)]
    lengths: list[int] = []
    for number in range(len(hit)):
        if number and gaps[number - 1] == 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return Timing(
        steps=steps, affected=len(hit), onset=hit[0] if hit else None, bursts=len(lengths),
        longest_burst=max(lengths, default=0), gaps=len(gaps), gap_sum=sum(gaps), gap_squares=sum(g * g for g in gaps),
        longest_gap=max(gaps, default=0),
    )  # fmt: skip
