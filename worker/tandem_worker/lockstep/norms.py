"""Norms of a gradient and of its difference, exact in fp64, whatever the order in which the parts come. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BLOCK = 1 << 13
"""Elements converted to fp64 at a time: few enough for a core's cache, and for OpenBLAS to wake no threads (10,000)."""


@dataclass(slots=True)
class Norms:
    """Sums of squares over the parts added so far; a suspect's NaN or infinity goes through to what it touches."""

    noise: float = 0.0
    """Sum of (s - r)^2."""
    signal: float = 0.0
    """Sum of r^2."""
    suspect: float = 0.0
    """Sum of s^2."""
    dot: float = 0.0
    """Sum of s * r."""
    elements: int = 0
    mismatched: int = 0

    def add(self, suspect: np.ndarray, reference: np.ndarray, weight: float = 1.0) -> None:
        """A part, flat ``[n]``, any float dtype; ``weight`` scales its squares (1/R for one of R equal copies)."""
        for i in range(0, suspect.size, BLOCK):
            with np.errstate(all="ignore"):  # a corrupt gradient may hold anything
                s, r = (x[i : i + BLOCK].astype(np.float64) for x in (suspect, reference))
                d = s - r
                self.noise += weight * float(d @ d)
                self.suspect += weight * float(s @ s)
                self.dot += weight * float(s @ r)
            self.signal += weight * float(r @ r)

    def add_equal(self, value: np.ndarray, weight: float = 1.0) -> None:
        """A part that both sides hold alike."""
        for i in range(0, value.size, BLOCK):
            r = value[i : i + BLOCK].astype(np.float64)
            square = weight * float(r @ r)
            self.signal += square
            self.suspect += square
            self.dot += square

    def merge(self, other: Norms) -> None:
        """Add what another one has summed."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def cosine(self) -> float | None:
        """S . r / (||s|| ||r||); None where a norm is zero or anything is not finite."""
        norms = math.sqrt(self.suspect) * math.sqrt(self.signal) if self.suspect >= 0 else math.nan
        if not (math.isfinite(norms) and norms > 0 and math.isfinite(self.dot)):
            return None
        return max(-1.0, min(1.0, self.dot / norms))
