"""The chain: one training step as a static list of program executions over named slots. Pure.

Every array of the chain is *rank-major*: shape ``[R, *local]``, sharded over the mesh axis ``tp`` on
axis 0, so that each TP rank's own value (also of what is logically replicated) is a shard of
its own that can be digested, compared and overwritten alone.

A slot is written at most once per step, except parameters and moments (once, by the update).
The lock-step engine only knows this page; the model (``tandem_worker.model``) makes the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tandem.sites import Site

TAP = "operand"
"""Name of a program's inner fault point; its parameters follow those of the outputs."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One rank's part of a slot."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy

        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def digest_name(spec: TensorSpec) -> str:
    """Name of the stand-alone digest program of one rank's tensor, among the fingerprints."""
    return f"digest {spec.dtype}[{','.join(map(str, spec.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One execution of a program."""

    index: int
    program: str
    """Key of the executable, shared by all layers: ``attn.fwd``, ``reduce``, ``ffn.update`` ..."""
    inputs: tuple[str, ...]
    """Slots read, in the program's argument order."""
    input_names: tuple[str, ...]
    """What the program calls them (``x``, ``wq`` ...): ``input.<name>`` of a state finding."""
    outputs: tuple[str, ...]
    """Slots written, in order. An update writes the slots that it read."""
    sites: tuple[Site, ...]
    """One per output. Several ops never share a site."""
    drain: bool = False
    """Whether every earlier site must be confirmed before this op starts."""
    replayable: bool = True
    """False for the initial parameters, which no program computes."""


@dataclass(frozen=True)
class Plan:
    """The chain of one step. ``initial`` compares the parameters before the first step (step 0)."""

    ops: tuple[Op, ...]
    initial: tuple[Op, ...]
    """One op per parameter group: program ``initial``, outputs = the parameter slots; not replayable."""
    slots: Mapping[str, TensorSpec]
    persistent: frozenset[str]
    """Slots that outlive a step: parameters, compute copies, moments."""
    step_inputs: tuple[str, ...]
    """Slots that the host fills before each step: ``tokens``, ``targets``, ``step``."""
    tp: int
    last_use: Mapping[str, int] = field(init=False)
    """Index of the last op that reads each step-local slot; frees it once that op is confirmed."""
    consumers: Mapping[str, tuple[int, ...]] = field(init=False)
    """Indices of the ops that read what an op wrote into a slot (per writer's slot name)."""

    def __post_init__(self) -> None:
        readers: dict[str, list[int]] = {}
        for op in self.ops:
            for slot in op.inputs:
                readers.setdefault(slot, []).append(op.index)
        object.__setattr__(self, "consumers", {slot: tuple(ops) for slot, ops in readers.items()})
        object.__setattr__(
            self, "last_use", {slot: ops[-1] for slot, ops in readers.items() if slot not in self.persistent}
        )

    @property
    def sites(self) -> list[Site]:
        """All sites in number order."""
        return [site for op in self.ops for site in op.sites]

    def consumed_by(self, op: Op, output: int) -> Sequence[int]:
        """Ops of the same step after ``op`` that read its ``output``-th slot."""
        return [i for i in self.consumers.get(op.outputs[output], ()) if i > op.index]


class Program(Protocol):
    """A compiled executable of the chain.

    Called with the rank-major inputs (and, where the injector is compiled in, ``fault``: u32
    ``[R, n_rows, inject.WIDTH]``; per op of `Chain.fault_ops` a row for each output, then one for the operand tap), it
    returns ``(outputs, digests, changes)``: the outputs rank-major; digests u32 ``[R, n_outputs, 2]`` of the values
    that the program stores; changes is None without the injector, else i32
    ``[R, n_rows, 1 + inject.LOGGED]``: per row how many elements' bits the injector changed, then their first flat
    indices (-1: none).
    """

    fingerprint: str
    """Digest of the optimised executable; equal on both sides of a valid pair."""

    @property
    def working_bytes(self) -> int:
        """Bytes that one rank needs beside inputs and outputs; 0 where the compiler does not say."""

    def __call__(self, inputs: Sequence[Any], fault: Any | None = None) -> tuple[tuple[Any, ...], Any, Any | None]: ...


@dataclass(frozen=True)
class Chain:
    """A plan with the executables that run it; ``synthetic`` builds carry the injector where their profile can act."""

    plan: Plan
    programs: Mapping[str, Program]
    synthetic: bool
    digest: Mapping[TensorSpec, Any]
    """Stand-alone digest program per rank tensor: rank-major array ``[R, *shape]`` -> u32 ``[R, 2]``."""
    mesh: Any
    """jax.sharding.Mesh with the one axis ``tp``."""
    fingerprints: Mapping[str, str]
    """Of every executable, the stand-alone digests included."""
    submodules: Plan
    """The chain of submodules that fault profiles name: the plan itself, or what a whole-step program is made of."""
    inside: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)
    """Whole-step program -> ops of `submodules` that have the injector inside it, in the order of their fault rows."""

    extra: Mapping[str, Op] = field(default_factory=dict)
    """Programs outside the step, by name: what they read."""

    def op_of(self, program: str) -> Op:
        """An op that runs a program of `submodules` or of `extra`."""
        return self.extra.get(program) or next(op for op in self.submodules.ops if op.program == program)

    def fault_ops(self, op: Op) -> tuple[Op, ...]:
        """The ops whose fault rows an execution of ``op`` takes, one after another: itself, or those inside it."""
        return self.inside.get(op.program, (op,))


Observe = Callable[[Op, Sequence[Any], Any], None]
"""Called with an op, its outputs and its digests."""


def run_step(
    chain: Chain,
    env: Mapping[str, Any],
    *,
    keep: bool = False,
    observe: Observe | None = None,
    fault: Callable[[Op], Any] = lambda _: None,
) -> dict[str, Any]:
    """Execute every op of one step, unsynchronised.

    Args:
        chain: what to run.
        env: the persistent slots and the step's inputs.
        keep: whether to keep step-local slots after their last use.
        observe: sees each op's outputs and digests.
        fault: the injector's parameters of an op; None: nothing is injected.

    Returns:
        The slots after the step: the persistent ones, new, and the step-local ones that were kept or never read.
    """
    slots = dict(env)
    plan, programs = chain.plan, chain.programs
    for op in plan.ops:
        outputs, digests, _ = programs[op.program]([slots[slot] for slot in op.inputs], fault(op))
        slots.update(zip(op.outputs, outputs, strict=True))
        if observe is not None:
            observe(op, outputs, digests)
        if not keep:
            for slot in op.inputs:
                if plan.last_use.get(slot) == op.index:
                    slots.pop(slot, None)
    return slots
