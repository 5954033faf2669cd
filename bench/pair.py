"""A pair of worker processes whose steps take turns between sync modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from bench.stats import shuffled_blocks
from bench.telling import tell
from tandem.db.embedded import embedded_database
from tandem.progress import ProgressEvent
from tandem.records import StepRecord
from tandem.spec import RunSpec
from tandem.supervisor import Local, run_local
from tandem.vocabulary import Role

Blocks = list[dict[str, StepRecord]]
"""One step of each mode per block."""


def interleaved(spec: RunSpec, modes: Sequence[str], blocks: int, seed: int, link_delay_s: float = 0.0) -> Blocks:
    """Run one long-living pair and return its steps block by block, after one block of warm-up.

    The run's verdict is of no interest: steps of mode ``none`` compare nothing.

    Raises:
        RuntimeError: the pair ended early.
    """
    order = shuffled_blocks(modes, blocks + 1, seed)
    schedule = [mode for block in order for mode in block]
    steps = {s.step: s for s in run(spec, schedule, link_delay_s=link_delay_s)}
    found = []
    for number, block in enumerate(order):
        first = number * len(modes) + 1
        records = [steps[first + i] for i in range(len(block))]
        if [r.sync for r in records] != block:
            raise RuntimeError(f"the pair did not keep to its schedule: {[r.sync for r in records]}, not {block}")
        found.append({r.sync: r for r in records})
    return found[1:]


def run(
    spec: RunSpec,
    schedule: Sequence[str],
    *,
    link_delay_s: float = 0.0,
    on_started: Callable[[UUID, dict[Role, int]], None] = lambda *_: None,
    on_step: Callable[[ProgressEvent], None] = lambda _: None,
) -> list[StepRecord]:
    """One run on worker processes and the embedded database; step i has mode ``schedule[i - 1]``.

    Raises:
        RuntimeError: the pair ended early.
    """
    spec = spec.model_copy(update={"steps": len(schedule)})

    def progress(event: ProgressEvent) -> None:
        tell(f"step {event.step}/{event.steps}" if event.phase == "step" else event.phase)
        on_step(event)

    with embedded_database() as url:
        local = Local(
            url=url, sync_schedule=list(schedule), link_delay_s=link_delay_s, on_progress=progress,
            on_started=on_started,
        )  # fmt: skip
        records = run_local(spec, local)
    tell()
    if not records.closings or records.closings[0].reason != "completed":
        raise RuntimeError(f"the measured pair ended early: {records.run.reason}: {records.run.sentence}")
    return records.steps
