"""What memory a side of a training run has: the measured half of `tandem_worker.drift.room`."""

from __future__ import annotations

from typing import Any

from tandem.host_memory import available_memory
from tandem_worker.chain import Chain
from tandem_worker.drift.room import Room, state_bytes
from tandem_worker.model.whole import STEP


def look(chain: Chain, sharers: int) -> Room:
    """Memory as it is now, with the programs and one state held.

    Args:
        chain: of a whole step.
        sharers: workers of like needs that share the devices or, on CPU, the machine: 2 where a pair runs on one.
    """
    ranks = list(chain.mesh.devices.flat)
    state, working = state_bytes(chain.plan), chain.programs[STEP].working_bytes
    if ranks[0].platform == "cpu":
        return Room(len(ranks) * state, len(ranks) * working, available_memory() // sharers, "host")
    free = [_free(device, sharers) for device in ranks]
    known = [value for value in free if value is not None]
    return Room(state, working, min(known) if len(known) == len(free) else None, "device")


def _free(device: Any, sharers: int) -> int | None:
    """Bytes that a device has left for this worker; None where it does not say."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "bytes_in_use" not in stats:
        return None
    return max(int(stats["bytes_limit"]) // sharers - int(stats["bytes_in_use"]), 0)
