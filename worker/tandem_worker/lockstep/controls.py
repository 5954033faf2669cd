"""The controls that a worker runs on itself, and what the reference makes of them (design: Trust)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tandem.statistics.mismatch import compare
from tandem_worker.chain import Op, Plan, TensorSpec, digest_name
from tandem_worker.lockstep.machine import Execution, Machine
from tandem_worker.lockstep.transfer import lanes_bytes
from tandem_worker.model.plan import REDUCTIONS

START, END = 1000, 2000
"""First replay numbers of the self-replays, apart from those of a mismatch's replays."""


@dataclass(frozen=True, slots=True)
class SelfReplay:
    """How one executable repeated itself on kept inputs."""

    program: str
    repeats: int
    equal: bool
    lanes: np.ndarray
    """u32 [R, n, 2] of the first repeat."""


def self_replay(machine: Machine, step: int, repeats: int, first: int) -> list[SelfReplay]:
    """Run every executable ``repeats`` times on the same inputs, taken from one unsynchronised pass over the chain.

    The step's inputs must be in their slots, which are left as they were; nothing is logged or sent.

    Args:
        machine: with parameters and the step's inputs.
        step: whose fault rows a synthetic suspect uses.
        repeats: runs per executable.
        first: first replay number, so that injected transient faults are drawn anew.
    """
    saved, results, seen = dict(machine.slots), [], set[str]()
    persistent, kinds = machine.plan.persistent, dict[TensorSpec, Any]()
    for op in machine.plan.ops:
        new = op.program not in seen
        needed = not all(slot in persistent for slot in op.outputs)
        if not (new or needed):
            continue
        inputs = tuple(machine.slots[slot] for slot in op.inputs)
        if needed:
            # A whole step makes all that outlives it anew: a second state in memory, which nobody reads.
            made = {
                slot: x
                for slot, x in zip(op.outputs, machine.run_clean(op, inputs), strict=True)
                if slot not in persistent
            }
            machine.slots.update(made)
            kinds.update({machine.spec(s): x for s, x in made.items()})
        kinds.update({machine.spec(s): x for s, x in zip(op.inputs, inputs, strict=True)})
        if new:
            seen.add(op.program)
            results.append(
                _repeat(
                    op.program, machine, [partial(machine.run, op, inputs, step, first + i) for i in range(repeats)]
                )
            )
        machine.release(op)
    machine.slots = saved
    for program in sorted(machine.chain.programs.keys() - seen):
        op = machine.chain.op_of(program)
        inputs = known_inputs(machine, op, np.random.default_rng([first, len(op.inputs)]))
        again = [partial(machine.chain.programs[program], inputs) for _ in range(repeats)]
        results.append(_repeat(program, machine, again))
    for spec, array in kinds.items():
        program = machine.chain.digest[spec]
        digests = [lambda p=program, x=array: (None, p(x)) for _ in range(repeats)]
        results.append(_repeat(digest_name(spec), machine, digests))
    return results


def _repeat(program: str, machine: Machine, runs: Sequence[Callable[[], Sequence[Any]]]) -> SelfReplay:
    """Run all; the second of what each returns are digests."""
    lanes = []
    for run in runs:
        lanes.append(np.asarray(run()[1]))
        machine.touch()
    return SelfReplay(program, len(runs), all(np.array_equal(other, lanes[0]) for other in lanes[1:]), lanes[0])


def known_reduction(machine: Machine, seed: int) -> bytes:
    """Digests of known bits combined over the ranks by every program that does so.

    Both sides feed the same seeded values; sides whose digests differ reduce in another order.
    """
    found = b""
    for program in REDUCTIONS:
        op = next((op for op in machine.chain.submodules.ops if op.program == program), None)
        if op is None:
            continue
        inputs = known_inputs(machine, op, np.random.default_rng([seed, len(found)]))
        outputs_digests = machine.chain.programs[program](inputs)[1]
        found += lanes_bytes(np.asarray(outputs_digests))
    return found


def known_inputs(machine: Machine, op: Op, rng: np.random.Generator) -> tuple[Any, ...]:
    """Seeded values, the same on both sides, for every input of a submodule."""
    inputs = []
    for slot in op.inputs:
        spec = machine.chain.submodules.slots[slot]
        values = rng.standard_normal((machine.plan.tp, *spec.shape), np.float32)
        inputs.append(machine.put(values.astype(np.dtype(spec.dtype))))
    return tuple(inputs)


def control_site(plan: Plan, seed: int, step: int) -> tuple[Op, int]:
    """The output whose copy the positive control of a step corrupts: seeded, the same on both sides."""
    candidates = [
        (op, output)
        for op in plan.ops
        for output, site in enumerate(op.sites)
        if site.family in ("out", "dx", "reduced", *(("dw",) if len(plan.ops) == 1 else ())) and site.shape
    ]
    rng = np.random.default_rng([seed, step, 0x5DC])
    return candidates[int(rng.integers(len(candidates)))]


def updated_site(plan: Plan, seed: int, step: int) -> int:
    """The output of a whole step whose shape the positive control takes where nothing is synchronised."""
    (op,) = plan.ops
    candidates = [i for i, site in enumerate(op.sites) if site.family in ("param", "moment") and site.shape]
    rng = np.random.default_rng([seed, step, 0x5DC])
    return candidates[int(rng.integers(len(candidates)))]


def known_tensor(spec: TensorSpec, seed: int, step: int, rank: int) -> np.ndarray:
    """Seeded values, the same on both sides, in place of a stored tensor: those may have drifted apart."""
    rng = np.random.default_rng([seed, step, rank, 0x5DC])
    return rng.standard_normal(spec.shape, np.float32).astype(np.dtype(spec.dtype))


def control_bit(seed: int, attempt: int, step: int, rank: int, elements: int, bits: int) -> tuple[int, int]:
    """Flat element and bit that the positive control flips on one rank."""
    rng = np.random.default_rng([seed, attempt, step, rank])
    return int(rng.integers(elements)), int(rng.integers(bits))


def flipped_copy(value: np.ndarray, element: int, bit: int) -> np.ndarray:
    """A copy of a tensor with one bit flipped."""
    copy = np.array(value, order="C")
    words = copy.reshape(-1).view(f"u{copy.dtype.itemsize}")
    words[element] ^= words.dtype.type(1 << bit)
    return copy


def digest_agrees(machine: Machine, execution: Execution, output: int) -> bool:
    """Whether the stand-alone digest program gives what the program itself said of the stored value, on every rank."""
    assert execution.lanes is not None
    standalone = machine.digest(execution.op.outputs[output], execution.outputs[output])
    return bool(np.array_equal(standalone, execution.lanes[:, output]))


def reports_exactly(received: np.ndarray, own: np.ndarray, element: int, bit: int) -> dict[str, object] | None:
    """What the ordinary comparator says of a control tensor: None if exactly the flipped bit, else what it said."""
    difference = compare(received, own)
    if difference is None:
        return {"mismatched": 0}
    fields = difference.fields()
    expected = [int(i == bit) for i in range(8 * own.dtype.itemsize)]
    if (fields["mismatched"], fields["first_index"], fields["bits"]) == (1, element, expected):
        return None
    return {key: fields[key] for key in ("mismatched", "first_index", "bits")}
