"""What replays say of a mismatch. Pure."""

from __future__ import annotations

import numpy as np

from tandem.vocabulary import ReplayClass


def classify(original: np.ndarray, reference: np.ndarray, replays: list[np.ndarray]) -> tuple[ReplayClass, int]:
    """Replay class of one tensor from its digests (each u32 [2]), and how many replays were right."""
    if not replays:
        return ReplayClass.NOT_REPLAYED, 0
    right = sum(bool(np.array_equal(lanes, reference)) for lanes in replays)
    if right == len(replays):
        return ReplayClass.TRANSIENT, right
    if right:
        return ReplayClass.INTERMITTENT, right
    if all(np.array_equal(lanes, original) for lanes in replays):
        return ReplayClass.PERSISTENT, 0
    return ReplayClass.ERRATIC, 0
