"""Runs the ops of a chain on this worker's devices and keeps what a comparison may still need.

One machine per worker, driven by the main thread only; a reader thread waits for digests in
execution order, so that the main thread can run ahead of the devices.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tandem.faults.injection import FaultProfile, StateFlip, rows, state_flips
from tandem_worker.chain import Chain, Op, Plan, TensorSpec


@dataclass(slots=True, eq=False)
class Execution:
    """One execution of an op, with everything that a mismatch at its sites would need."""

    op: Op
    step: int
    generation: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    digests: Any
    """u32 [R, n_outputs, 2] on the device."""
    changes: Any | None
    lanes: np.ndarray | None = None
    """``digests`` on the host, once the reader has them."""
    changed: np.ndarray | None = None
    flips: list[AppliedFlip] = field(default_factory=list)
    previous: dict[str, Any] = field(default_factory=dict)
    """What the persistent slots that it wrote held before."""


@dataclass(slots=True, eq=False)
class AppliedFlip:
    """A synthetic flip in a kept buffer, reversible as long as its execution may be discarded."""

    op: Op
    """The submodule that names it in the fault log."""
    flip: StateFlip
    slot: str
    original: Any
    flipped: Any


class Reader:
    """Waits for the digests of executions, in order, and reports each as an event."""

    def __init__(self, report: Callable[[Execution], None], fail: Callable[[BaseException], None]) -> None:
        self._todo: queue.SimpleQueue[Execution | None] = queue.SimpleQueue()
        self._report, self._fail = report, fail
        self._thread = threading.Thread(target=self._run, name="digest-reader", daemon=True)
        self._thread.start()

    def submit(self, execution: Execution) -> None:
        self._todo.put(execution)

    def close(self) -> None:
        self._todo.put(None)

    def _run(self) -> None:
        while (execution := self._todo.get()) is not None:
            try:
                lanes = np.asarray(execution.digests)
                if execution.changes is not None:
                    execution.changed = np.asarray(execution.changes)
                execution.lanes = lanes
                self._report(execution)
                del execution  # else it would live, with all that it made, until the next one comes
            except BaseException as error:  # a failed execution ends the run, named, on the main thread
                self._fail(error)
                return


class Machine:
    """A chain with its slots.

    Args:
        chain: plan and executables.
        profile: fault profile whose rows this side's programs get; None passes rate zero
            (the reference, and every real run).
    """

    def __init__(self, chain: Chain, profile: FaultProfile | None = None) -> None:
        self.chain = chain
        self.plan: Plan = chain.plan
        self.profile = profile
        self.slots: dict[str, Any] = {}
        self.keep: set[str] = set()
        """Slots that outlive their last use until the step's end, for the positive control."""
        self.touch: Callable[[], None] = lambda: None
        """Told after every program that was run, for the watchdog."""
        self._sharding = NamedSharding(chain.mesh, P("tp"))
        self._cured: set[tuple[int, int]] = set()
        self._frees: dict[int, list[str]] = {}
        for op in self.plan.ops:
            for slot in op.outputs:
                if slot not in self.plan.persistent:
                    self._frees.setdefault(self.plan.last_use.get(slot, op.index), []).append(slot)

    # -- executing -------------------------------------------------------------------------------

    def execute(self, op: Op, step: int, generation: int) -> Execution:
        """Run one op on the current slots and write its outputs. Returns at once (asynchronous dispatch)."""
        flips = self._flip_state(op, step)
        inputs = tuple(self.slots[slot] for slot in op.inputs)
        if op.program == "initial":
            outputs = tuple(self.slots[slot] for slot in op.outputs)
            lanes = np.stack(
                [self.digest(slot, array) for slot, array in zip(op.outputs, outputs, strict=True)], axis=1
            )
            return Execution(op, step, generation, inputs, outputs, lanes, None)
        outputs, digests, changes = self.run(op, inputs, step, replay=0)
        previous = {slot: self.slots[slot] for slot in op.outputs if slot in self.plan.persistent}
        self.slots.update(zip(op.outputs, outputs, strict=True))
        return Execution(op, step, generation, inputs, outputs, digests, changes, flips=flips, previous=previous)

    def run(self, op: Op, inputs: tuple[Any, ...], step: int, replay: int) -> tuple[tuple[Any, ...], Any, Any | None]:
        """Run an op's program on given inputs; slots are not touched."""
        program = self.chain.programs[op.program]
        if self.profile is None:
            return program(inputs)
        parts = [rows(self.profile, step, part.sites, self.plan.tp, replay) for part in self.chain.fault_ops(op)]
        table = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        return program(inputs, table if table.any() else None)

    def run_clean(self, op: Op, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Outputs of an op's program without any injection; slots are not touched."""
        return self.chain.programs[op.program](inputs)[0]

    def replay(self, execution: Execution, repeats: int, first: int = 1) -> list[np.ndarray]:
        """Digests (u32 [R, n, 2]) of ``repeats`` fresh runs on the kept inputs, replay numbers from ``first``."""
        results = []
        for number in range(first, first + repeats):
            _, digests, _ = self.run(execution.op, execution.inputs, execution.step, number)
            results.append(np.asarray(digests))
            self.touch()
        return results

    def _flip_state(self, op: Op, step: int) -> list[AppliedFlip]:
        """Synthetic runs only: flip bits in kept buffers just before the op that consumes them."""
        if self.profile is None or (step, op.index) in self._cured or op.program == "initial":
            return []
        applied = []
        whole = self.plan is not self.chain.submodules
        for part in self.chain.submodules.ops if whole else (op,):
            # Inside a whole step only what was kept from the step before is a buffer that can be flipped.
            kept = {n: slot for n, slot in zip(part.input_names, part.inputs, strict=True) if slot in self.slots}
            specs = [self.plan.slots[slot] for slot in kept.values()]
            shapes, dtypes = [s.shape for s in specs], [s.dtype for s in specs]
            for flip in state_flips(self.profile, step, part.sites, list(kept), shapes, self.plan.tp, dtypes):
                slot = kept[flip.input]
                original = self.slots[slot]
                value = self.shard(original, flip.rank).copy()
                words = value.reshape(-1).view(f"u{value.dtype.itemsize}")
                words[flip.element] ^= words.dtype.type(1 << flip.bit)
                self.slots[slot] = self.replace(original, flip.rank, value)
                applied.append(AppliedFlip(part, flip, slot, original, self.slots[slot]))
        return applied

    # -- going back ------------------------------------------------------------------------------

    def discard(self, executions: Iterable[Execution]) -> None:
        """Undo what executions that a roll-back discards did to slots that others still read, latest first."""
        for execution in reversed(list(executions)):
            self.slots.update(execution.previous)
            for flip in reversed(execution.flips):
                if self.slots.get(flip.slot) is flip.flipped:
                    self.slots[flip.slot] = flip.original

    def rewind(self, execution: Execution) -> None:
        """After ``cause: state`` was repaired: put the repaired inputs back in place, for the op to run again.

        The same synthetic flip is not applied again.
        """
        self.slots.update(execution.previous)
        self.slots.update(zip(execution.op.inputs, execution.inputs, strict=True))
        self._cured.add((execution.step, execution.op.index))

    def release(self, op: Op) -> None:
        """Drop the slots whose last reader was ``op``, now that it is confirmed."""
        for slot in self._frees.get(op.index, ()):
            if slot not in self.keep:
                self.slots.pop(slot, None)

    def end_step(self) -> None:
        """Drop everything that does not outlive a step."""
        self.keep.clear()
        self._cured.clear()
        for slot in [s for s in self.slots if s not in self.plan.persistent]:
            del self.slots[slot]

    # -- tensors ---------------------------------------------------------------------------------

    def spec(self, slot: str) -> TensorSpec:
        return self.plan.slots[slot]

    def digest(self, slot: str, array: Any) -> np.ndarray:
        """u32 [R, 2]: the stand-alone digest of a rank-major array of that slot's kind."""
        return np.asarray(self.chain.digest[self.spec(slot)](array))

    def digest_value(self, slot: str, value: np.ndarray) -> bytes:
        """Eight bytes: the stand-alone digest of one rank's tensor that came from elsewhere."""
        stacked = self.put(np.broadcast_to(value, (self.plan.tp, *value.shape)))
        lanes: bytes = self.digest(slot, stacked)[0].astype("<u4").tobytes()
        return lanes

    def put(self, values: np.ndarray) -> Any:
        """A rank-major array ``[R, *shape]`` from host values."""
        return jax.device_put(np.ascontiguousarray(values), self._sharding)

    @staticmethod
    def shard(array: Any, rank: int) -> np.ndarray:
        """One rank's tensor on the host (a view where the platform allows)."""
        for shard in array.addressable_shards:
            if (shard.index[0].start or 0) == rank:
                value: np.ndarray = np.asarray(shard.data)[0]
                return value
        raise IndexError(rank)

    def replace(self, array: Any, rank: int, value: np.ndarray) -> Any:
        """A rank-major array with one rank's tensor replaced; the other shards are shared, not copied."""
        parts = []
        for shard in array.addressable_shards:
            mine = (shard.index[0].start or 0) == rank
            parts.append(jax.device_put(value[None], shard.device) if mine else shard.data)
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    def overwrite_output(
        self, execution: Execution, output: int, rank: int, value: np.ndarray, *, differed: bool = True
    ) -> Any:
        """Put the reference's tensor in place of an output; returns the new stand-alone digest u32 [2].

        Where it ``differed``, the program's own digest was of the wrong value, and the new one takes its place.
        """
        slot = execution.op.outputs[output]
        new = self.replace(execution.outputs[output], rank, value)
        if self.slots.get(slot) is execution.outputs[output]:
            self.slots[slot] = new
        execution.outputs = (*execution.outputs[:output], new, *execution.outputs[output + 1 :])
        lanes = self.digest(slot, new)[rank]
        if differed and execution.lanes is not None:
            execution.lanes = execution.lanes.copy()
            execution.lanes[rank, output] = lanes
        return lanes

    def overwrite_input(self, execution: Execution, index: int, rank: int, value: np.ndarray) -> Any:
        """Put the reference's tensor in place of a kept input; returns the new stand-alone digest u32 [2]."""
        slot = execution.op.inputs[index]
        new = self.replace(execution.inputs[index], rank, value)
        self.slots[slot] = new
        execution.inputs = (*execution.inputs[:index], new, *execution.inputs[index + 1 :])
        return self.digest(slot, new)[rank]

    def input_digests(self, execution: Execution) -> np.ndarray:
        """u32 [R, n_inputs, 2]: stand-alone digests of the kept inputs."""
        pairs = zip(execution.op.inputs, execution.inputs, strict=True)
        return np.stack([self.digest(slot, array) for slot, array in pairs], axis=1)
