"""Steps of several kinds that take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.stats import shuffled_blocks
from bench.telling import tell

WARMUP = 2
"""Blocks that are run first and not counted."""
State = dict[str, Any]
Step = Callable[[State, int], State]
"""From a state and the number of the step to the next state."""


class Turn(NamedTuple):
    """Seconds of one step."""

    wall: float
    cpu: float
    """Of the processor, all threads of this process: what else the machine does is not in it."""


Turns = list[dict[str, Turn]]
"""One turn of each kind per block."""


def take_turns(
    kinds: Mapping[str, Step], states: dict[str, State], blocks: int, seed: int,
    enough: Callable[[Turns], bool] = lambda turns: True,  # noqa: ARG005
    most: int = 1,
) -> Turns:  # fmt: skip
    """Seconds of a step of each kind, block by block, each kind on its own state.

    Args:
        kinds: what takes turns.
        states: of each kind, to begin with; left as the last step made them.
        blocks: turns of each kind, ``WARMUP`` more before them.
        seed: of the order within a block.
        enough: whether ``blocks`` of them, or twice, three times as many, tell what they are to tell.
        most: times ``blocks`` at most.
    """
    import jax

    turns: Turns = []
    order = shuffled_blocks(list(kinds), WARMUP + blocks * most, seed)
    for number, block in enumerate(order, start=1):
        counted = len(turns) - WARMUP
        if counted > 0 and counted % blocks == 0 and enough(turns[WARMUP:]):
            break
        tell(f"block {number}/{len(order)}")
        turns.append({})
        for kind in block:
            began, worked = time.monotonic(), time.process_time()
            states[kind] = kinds[kind](states[kind], number)
            jax.block_until_ready(states[kind])
            turns[-1][kind] = Turn(time.monotonic() - began, time.process_time() - worked)
    tell()
    return turns[WARMUP:]


def walls(turns: Turns) -> list[dict[str, float]]:
    """Wall seconds alone."""
    return [{kind: turn.wall for kind, turn in block.items()} for block in turns]


def cpus(turns: Turns) -> list[dict[str, float]]:
    """Processor seconds alone."""
    return [{kind: turn.cpu for kind, turn in block.items()} for block in turns]
