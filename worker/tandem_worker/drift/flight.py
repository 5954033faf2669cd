"""A step under way on one side, with its sketch: what both sides of a training run do alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem_worker.chain import Op
from tandem_worker.digest import lanes_numpy
from tandem_worker.drift.sketch import Sketch, buckets
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.side import Side
from tandem_worker.model.sketch import SKETCH


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was started; its outputs are the input of the next and stay until nobody asks for them.

    Until it is settled it keeps the state that it began with, for replays.
    """

    run: Execution
    started: float
    """Seconds of the side's clock."""
    sketch_outputs: tuple[Any, ...] = field(default=())
    sketch_digests: Any = None

    @property
    def step(self) -> int:
        return self.run.step

    def sketch(self) -> Sketch:
        """On the host; waits for the device."""
        return np.asarray(self.sketch_outputs[0])

    def tops(self) -> list[int]:
        return [int(top) for top in np.asarray(self.sketch_outputs[1])]

    def scalar(self, slot: str) -> float:
        """A scalar output on rank 0."""
        return float(np.asarray(self.run.outputs[self.run.op.outputs.index(slot)])[0])

    def state(self, persistent: frozenset[str]) -> dict[str, Any]:
        """The persistent slots after the step."""
        pairs = zip(self.run.op.outputs, self.run.outputs, strict=True)
        return {slot: array for slot, array in pairs if slot in persistent}

    def settled(self) -> None:
        """Nothing will be repeated: what it started from need not be kept."""
        self.run.inputs, self.run.previous = (), {}


def launch(side: Side, step: int) -> Flight:
    """Dispatch a step and the sketch of what it makes; returns before they are done."""
    machine = side.machine
    (op,) = side.plan.ops
    side.step_number = step
    side.progress.begin_step(step)
    started = side.clock()
    run = machine.execute(op, step, side.generation)
    outputs, digests = run_sketch(side)
    side.pending.append(run)
    side.reader.submit(run)
    return Flight(run, started, outputs, digests)


def run_sketch(side: Side) -> tuple[tuple[Any, ...], Any]:
    """Sketch of the masters in the slots, with its digests u32 ``[R, 2, 2]``."""
    chain = side.machine.chain
    masters = [side.machine.slots[slot] for slot in chain.op_of(SKETCH).inputs]
    outputs, digests, _ = chain.programs[SKETCH](masters)
    return outputs, digests


def sketch_shape(ranks: int) -> tuple[int, int, int]:
    return ranks, 2, buckets(ranks)


def arrived_whole(sketch: Sketch, tops: list[int], lanes: np.ndarray) -> bool:
    """Whether a received sketch is what the suspect's program stored: ``lanes`` u32 ``[R, 2, 2]`` are its digests."""
    return all(
        np.array_equal(lanes_numpy(sketch[rank]), lanes[rank, 0])
        and np.array_equal(lanes_numpy(np.asarray(top, np.int32)), lanes[rank, 1])
        for rank, top in enumerate(tops)
    )


def master_outputs(op: Op) -> list[int]:
    """Places of the master weights among a step's outputs."""
    return [i for i, slot in enumerate(op.outputs) if slot.startswith("master.")]
