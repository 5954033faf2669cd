"""Steps of several kinds that take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.stats import shuffled_blocks
from bench.telling import tell

WARMUP = 2
"""Blocks that are run first and not counted."""
State = dict[str, Any]
Step = Callable[[State, int], State]
"""From a state and the number of the step to the next state."""


def take_turns(kinds: Mapping[str, Step], states: dict[str, State], blocks: int, seed: int) -> list[dict[str, float]]:
    """Wall seconds of a step of each kind, block by block, each kind on its own state."""
    import jax

    wall: list[dict[str, float]] = []
    order = shuffled_blocks(list(kinds), WARMUP + blocks, seed)
    for number, block in enumerate(order, start=1):
        tell(f"block {number}/{len(order)}")
        wall.append({})
        for kind in block:
            began = time.monotonic()
            states[kind] = kinds[kind](states[kind], number)
            jax.block_until_ready(states[kind])
            wall[-1][kind] = time.monotonic() - began
    tell()
    return wall[WARMUP:]
