"""Gradient noise (RQ2): noise-to-signal of each step, its worst case, mismatch frequency per leaf. Pure.

noise-to-signal = ||g_s - g_r|| / ||g_r|| (arXiv 2502.12340), WCNTS its largest over the steps. What the paper does not
say is ours: a step without a record had equal gradients, ratio 0, as has one whose gradients are both zero; a noise
that is no finite number (the suspect's gradient holds NaN or infinity), a ratio above the largest fp64, or noise over a
signal of zero is *unbounded* and makes the WCNTS infinite; a step whose reference gradient is not finite itself has no
ratio and is only counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from tandem.records import GradientRecord


class LeafNoise(msgspec.Struct, frozen=True, array_like=True):
    """One leaf of the gradient, over all compared steps."""

    affected: int
    """Steps in which it mismatched."""
    mismatched: int
    elements: int
    """Compared: of the leaf times steps."""

    @property
    def frequency(self) -> float:
        """Mismatching / compared elements."""
        return self.mismatched / self.elements if self.elements else 0.0

    def __add__(self, other: LeafNoise) -> LeafNoise:
        return LeafNoise(
            self.affected + other.affected, self.mismatched + other.mismatched, self.elements + other.elements
        )


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Gradient noise of a run."""

    steps: int
    """Steps whose gradients were compared."""
    noisy: int = 0
    """Of them, those with a ratio above 0, the unbounded included."""
    worst: float | None = None
    """Largest finite ratio; None where no step had any."""
    worst_step: int | None = None
    unbounded: int = 0
    undefined: int = 0
    """Steps whose reference gradient is not finite."""
    least_cosine: float | None = None
    """Smallest cosine between the two gradients of a step."""
    leaves: dict[str, LeafNoise] = {}

    @property
    def wcnts(self) -> float | None:
        """Largest ratio over the steps: 0 where all were equal, infinite where one is unbounded; None without one."""
        if self.unbounded:
            return math.inf
        return self.worst


def ratio(noise: float, signal: float) -> float | None:
    """Noise / signal by the rules above; infinite: unbounded; None: no ratio (the reference's gradient not finite)."""
    if not math.isfinite(signal):
        return None
    if not math.isfinite(noise):
        return math.inf
    if signal == 0:
        return 0.0 if noise == 0 else math.inf
    return noise / signal


def noise(gradients: Iterable[GradientRecord], steps: int) -> Noise:
    """Noise of a run's gradients.

    Args:
        gradients: the records of one or more attempts, in any order.
        steps: that were compared in them, equal ones included.
    """
    total = list(gradients)
    whole = sorted((g for g in total if not g.leaf), key=lambda g: (g.step, g.attempt))
    finite, unbounded, undefined, noisy = [(0.0, -1)] if steps > len(whole) else [], 0, 0, 0
    for g in whole:
        r = ratio(g.noise, g.signal)
        if r is None:
            undefined += 1
        elif math.isinf(r):
            unbounded, noisy = unbounded + 1, noisy + 1
        else:
            finite.append((r, -g.step))
            noisy += r > 0
    worst = max(finite, default=None)
    leaves: dict[str, list[GradientRecord]] = defaultdict(list)
    for g in total:
        if g.leaf:
            leaves[g.leaf].append(g)
    cosines = [g.cosine for g in whole if g.cosine is not None and math.isfinite(g.cosine)]
    return Noise(
        steps=max(steps, len(whole)),
        noisy=noisy,
        worst=None if worst is None else worst[0],
        worst_step=None if worst is None or not worst[0] else -worst[1],
        unbounded=unbounded,
        undefined=undefined,
        least_cosine=min(cosines, default=None),
        leaves={
            leaf: LeafNoise(
                sum(g.mismatched > 0 for g in rows),
                sum(g.mismatched for g in rows),
                max(g.elements for g in rows) * max(steps, len(rows)),
            )
            for leaf, rows in sorted(leaves.items())
        },
    )
