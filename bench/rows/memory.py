"""What the window keeps alive on the devices."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from bench import pair
from bench.devices import use_devices
from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, shuffled_blocks
from tandem.progress import ProgressEvent
from tandem.vocabulary import Role, SyncMode
from tandem_worker.chain import Op, Plan

SLACK_MB = 64.0
MB = 1e6
STEPS = 4
"""Per mode."""


def measure(options: Options) -> list[Row]:
    """Live buffers of both sides of a pair in this process; resident sizes of real workers."""
    resident = {mode: _resident_mb(options, mode) for mode in ("none", "optimistic")}
    return [
        *_live(options),
        row(
            "memory.rss", "largest resident size of the reference's process over that of an unsynchronised one",
            _single(resident["optimistic"] - resident["none"]), options.setting(unsynchronised_mb=resident["none"]),
            unit="MB",
        ),
    ]  # fmt: skip


def kept_bytes(plan: Plan, window: int) -> int:
    """Largest sum, over consecutive programs of at most ``window`` sites together, of what they read and write.

    Each buffer counts once; a slot that is written anew is another buffer. Nothing is kept across a drain. All ranks.
    """
    largest = 0
    for first in range(len(plan.ops)):
        sites, buffers, versions = 0, set[tuple[str, int]](), dict[str, int]()
        for op in plan.ops[first:]:
            sites += len(op.sites)
            if op.index > first and (sites > window or op.drain):
                break
            buffers |= {(slot, versions.get(slot, 0)) for slot in op.inputs}
            versions |= {slot: versions.get(slot, 0) + 1 for slot in op.outputs}
            buffers |= {(slot, versions[slot]) for slot in op.outputs}
        largest = max(largest, sum(plan.slots[slot].nbytes for slot, _ in buffers))
    return largest * plan.tp


def _live(options: Options) -> list[Row]:
    use_devices(2 * options.tp)
    from pairs import run_pair
    from tandem_worker.session.reference import ReferenceSession
    from tandem_worker.session.suspect import SuspectSession

    modes = [SyncMode(m) for block in shuffled_blocks(("none", "optimistic"), STEPS, options.seed) for m in block]
    peaks: dict[tuple[Role, int], float] = {}
    plans: list[Plan] = []

    def tamper(reference: ReferenceSession, suspect: SuspectSession) -> None:
        plans.append(reference.plan)
        for role, session in ((Role.REFERENCE, reference), (Role.SUSPECT, suspect)):
            _watch(session.machine, role, peaks)

    outcome = run_pair(
        options.spec(steps=len(modes)), schedule=lambda step: modes[step - 1] if step else SyncMode.OPTIMISTIC,
        tamper=tamper, timeout=1800.0,
    )  # fmt: skip
    if outcome.errors:
        raise RuntimeError(f"the measured pair failed ({outcome.reason}): {outcome.errors}")
    over = [
        (peaks[role, step] - _least(peaks, role, modes)) / MB
        for role in Role
        for step, mode in enumerate(modes, start=1)
        if mode is SyncMode.OPTIMISTIC
    ]
    base = max(_least(peaks, role, modes) for role in Role) / MB
    estimate = Estimate(max(over), max(over), max(over), len(over))
    made = row(
        "memory.live", "largest sum of a worker's live buffers over that of an unsynchronised one", estimate,
        options.setting(unsynchronised_mb=round(base, 1)), unit="MB",
        bound=round(kept_bytes(plans[0], options.window) / MB + SLACK_MB, 1),
    )  # fmt: skip
    return [made]


def _least(peaks: dict[tuple[Role, int], float], role: Role, modes: Sequence[SyncMode]) -> float:
    """Smallest peak of a side's unsynchronised steps."""
    return min(peaks[role, step] for step, mode in enumerate(modes, start=1) if mode is SyncMode.NONE)


def _watch(machine: Any, role: Role, peaks: dict[tuple[Role, int], float]) -> None:
    """After every program start, look at the live buffers on the side's devices."""
    import jax

    devices, execute = set(machine.chain.mesh.devices.flat), machine.execute

    def watched(op: Op, step: int, generation: int) -> Any:
        execution = execute(op, step, generation)
        held = sum(a.nbytes for a in _alive(jax.live_arrays()) if a.devices() <= devices)
        peaks[role, step] = max(peaks.get((role, step), 0.0), held)
        return execution

    machine.execute = watched


def _alive(arrays: Iterable[Any]) -> Iterable[Any]:
    return (a for a in arrays if not a.is_deleted())


def _resident_mb(options: Options, mode: str) -> float:
    """Largest resident size of the reference's process during the steps of a run of one mode."""
    pids: list[int] = []
    largest, stepping, over = 0.0, threading.Event(), threading.Event()

    def started(_: UUID, found: dict[Role, int]) -> None:
        pids.append(found[Role.REFERENCE])

    def stepped(event: ProgressEvent) -> None:
        stepping.set() if event.phase == "step" else stepping.clear()

    def sample() -> None:
        nonlocal largest
        while not over.wait(0.02):
            if stepping.is_set() and pids:
                largest = max(largest, _resident(pids[0]))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        pair.run(options.spec(), [mode] * (STEPS + 1), on_started=started, on_step=stepped)
    finally:
        over.set()
        sampler.join()
    return round(largest / MB, 1)


def _resident(pid: int) -> float:
    """Bytes; 0 once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0.0)


def _single(value: float) -> Estimate:
    return Estimate(value, value, value, 1)
