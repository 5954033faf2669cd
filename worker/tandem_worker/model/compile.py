"""Ahead-of-time compilation of one program: the body, the injector, the digests, and the fingerprint.

Inside every program, after the outputs are cast to their stored dtype: the injector (synthetic builds only), an
optimisation barrier, then the digests of what lies behind the barrier. The barrier keeps the compiler from hashing a
recomputed copy of an output instead of the stored one; its cost is one pass over the outputs. XLA:CPU drops the barrier
before it fuses and does make such copies (of the update's cheap element-wise producers), so there the digests are the
branch of a conditional, which no fusion crosses.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tandem_worker import digest, inject
from tandem_worker.chain import TensorSpec
from tandem_worker.model.forward import AXIS, Array
from tandem_worker.model.programs import Body

_SHARDED = PartitionSpec(AXIS)


def rank_major(spec: TensorSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Abstract value of a slot: ``[R, *shape]``, one rank per device."""
    shape = (mesh.size, *spec.shape)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=NamedSharding(mesh, _SHARDED))


class InFlight:
    """Bounds how many executions are queued on virtual CPU devices.

    XLA:CPU lets 32 executions be in flight per device. With more queued, one rank can wait for a free place while
    the other already waits for it inside a collective, and the process aborts after the collective's
    timeout. Real accelerators queue in order and need no bound.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queued: deque[Any] = deque()

    def admit(self, result: Any) -> None:
        """Note an execution by one of its results; wait for the oldest beyond the limit."""
        self._queued.append(result)
        if len(self._queued) > self._limit:
            self._queued.popleft().block_until_ready()


CPU_IN_FLIGHT = 2
"""Hides the dispatch of the next programs. More would lengthen the queue behind which a mismatch's replays wait."""


class CompiledProgram:
    """`tandem_worker.chain.Program` over a compiled executable."""

    __slots__ = ("_compiled", "_faults", "_in_flight", "_quiet", "fingerprint", "name", "synthetic")

    def __init__(
        self, name: str, compiled: Any, fault_rows: int, mesh: Mesh, in_flight: InFlight | None = None
    ) -> None:
        self.name = name
        self._in_flight = in_flight
        self.synthetic = fault_rows > 0
        self.fingerprint = fingerprint(compiled)
        self._compiled = compiled
        self._faults = NamedSharding(mesh, _SHARDED)
        quiet = np.zeros((mesh.size, fault_rows, inject.WIDTH), np.uint32)
        self._quiet = jax.device_put(quiet, self._faults) if self.synthetic else None

    @property
    def compiled(self) -> Any:
        """The `jax.stages.Compiled`, for its text and its memory analysis."""
        return self._compiled

    @property
    def working_bytes(self) -> int:
        """Bytes that one rank needs beside inputs and outputs, as the compiler says; 0 where it does not."""
        analysis = self._compiled.memory_analysis()
        return int(getattr(analysis, "temp_size_in_bytes", 0))

    def __call__(self, inputs: Sequence[Any], fault: Any | None = None) -> tuple[tuple[Any, ...], Any, Any | None]:
        if not self.synthetic:
            outputs, digests = self._compiled(*inputs)
            if self._in_flight is not None:
                self._in_flight.admit(digests)
            return outputs, digests, None
        if fault is None:
            fault = self._quiet
        elif isinstance(fault, np.ndarray):
            fault = jax.device_put(fault, self._faults)
        outputs, digests, changes = self._compiled(*inputs, fault)
        if self._in_flight is not None:
            self._in_flight.admit(digests)
        return outputs, digests, changes


Compute = Callable[[list[Array], Array | None], tuple[list[Array], Array | None]]
"""What one rank computes: its inputs and the injector's rows u32 ``[rows, inject.WIDTH]`` (None in a real build) to its
outputs in their stored dtypes and, where there are rows, what the injector changed, i32 ``[rows, 1 + LOGGED]``."""


def injected(name: str, body: Body, outputs: Sequence[TensorSpec]) -> Compute:
    """One submodule: its body, results cast to the stored dtypes, and the injector (a row per output, one for the tap).

    Raises:
        ValueError: when traced, if the body's outputs do not have the planned shapes (a defect of the model code).
    """

    def compute(local: list[Array], rows: Array | None) -> tuple[list[Array], Array | None]:
        tapped: list[Array] = []

        def tap(x: Array) -> Array:
            if rows is None:
                return x
            changed, log = inject.apply(x, rows[len(outputs)])
            tapped.append(log)
            return changed

        values = [v.astype(spec.dtype) for v, spec in zip(body(local, tap), outputs, strict=True)]
        if [v.shape for v in values] != [spec.shape for spec in outputs]:
            raise ValueError(f"program {name} computes shapes {[v.shape for v in values]}, planned {outputs}")
        if rows is None:
            return values, None
        values, logs = inject.apply_all(values, rows[: len(outputs)])
        return values, jnp.concatenate((logs, tapped[0][None] if tapped else _untouched()))

    return compute


def compile_program(
    name: str,
    compute: Compute,
    inputs: Sequence[TensorSpec],
    mesh: Mesh,
    fault_rows: int,
    in_flight: InFlight | None = None,
    *,
    digests: bool = True,
    donated: Sequence[int] = (),
) -> CompiledProgram:
    """Compile one program for the mesh.

    Args:
        name: program key, which also names the module in profiles.
        compute: what one rank computes.
        inputs: one rank's inputs.
        mesh: the ranks.
        fault_rows: the injector's rows; 0: a real build, without the injector.
        in_flight: bound on queued executions, shared by the chain's programs; None: no bound.
        digests: False for the benchmark's undisturbed step only: digests are zero.
        donated: places of inputs whose buffers the program may write its outputs into; for that step only.
    """

    def ranked(*args: Array) -> tuple[Any, ...]:
        local = [arg[0] for arg in args]
        rows = local.pop() if fault_rows else None
        values, changes = compute(local, rows)
        if digests:
            known = args[0] if mesh.devices.flat[0].platform == "cpu" else None
            stored, lanes = _store_and_digest(tuple(values), known)
        else:
            stored, lanes = tuple(v[None] for v in values), jnp.zeros((len(values), 2), jnp.uint32)
        return (stored, lanes[None]) if changes is None else (stored, lanes[None], changes[None])

    arguments = [rank_major(spec, mesh) for spec in inputs]
    if fault_rows:
        arguments.append(rank_major(TensorSpec((fault_rows, inject.WIDTH), "uint32"), mesh))
    compiled = _compile(name, ranked, arguments, mesh, tuple(donated))
    return CompiledProgram(name, compiled, fault_rows, mesh, in_flight)


def compile_digest(spec: TensorSpec, mesh: Mesh) -> Any:
    """The stand-alone digest program of one tensor: rank-major ``[R, *shape]`` to u32 ``[R, 2]``."""
    name = f"digest_{spec.dtype}_{'x'.join(map(str, spec.shape)) or 'scalar'}"
    return _compile(name, lambda x: digest.lanes(x[0])[None], [rank_major(spec, mesh)], mesh)


def fingerprint(compiled: Any) -> str:
    """SHA-256 of the optimised executable.

    Of the runtime's own fingerprint where it has one (CPU, whose serialised kernels come in random order), else of the
    serialised executable, else of the optimised text. Never of a pickle, which holds source paths.
    """
    executable = compiled.runtime_executable()
    own = getattr(executable, "fingerprint", None)
    if own:
        raw = own if isinstance(own, bytes) else str(own).encode()
    else:
        try:
            raw = executable.serialize()
        except (AttributeError, NotImplementedError, RuntimeError):
            raw = compiled.as_text().encode()
    return hashlib.sha256(raw).hexdigest()


def _store_and_digest(values: tuple[Array, ...], known: Array | None) -> tuple[tuple[Array, ...], Array]:
    """The outputs, rank-major behind a barrier, and the digests u32 ``[n, 2]`` of exactly these.

    The reshape to rank-major comes before the barrier: after it, it would be fused with a second copy of the producer.

    Args:
        values: what the program computed.
        known: an input of the program where the compiler removes barriers (CPU): the digests are then in a branch.
    """
    stored: tuple[Array, ...] = lax.optimization_barrier(tuple(v[None] for v in values))

    if known is None:
        return stored, jnp.stack([digest.lanes(t[0]) for t in stored])

    def digests(*tensors: Array) -> Array:
        return digest.many_lanes([t[0] for t in tensors])

    # Always true, which the compiler cannot know, not even where there is one rank only. Read from an input: of an
    # output, the compiler would compute a copy for it.
    there = (digest.words(known.reshape(-1)[:1])[0] | np.uint32(1)) != 0
    return stored, lax.cond(there, digests, lambda *_: jnp.zeros((len(stored), 2), jnp.uint32), *stored)


def _untouched() -> Array:
    """Log of a tap that the program does not have: nothing changed."""
    return jnp.full((1, 1 + inject.LOGGED), -1, jnp.int32).at[:, 0].set(0)


def _compile(
    name: str,
    body: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    mesh: Mesh,
    donated: tuple[int, ...] = (),
) -> Any:
    mapped = jax.shard_map(body, mesh=mesh, in_specs=_SHARDED, out_specs=_SHARDED, check_vma=False)

    def entry(*args: Array) -> Any:
        return mapped(*args)

    entry.__name__ = entry.__qualname__ = name.replace(".", "_")
    return jax.jit(entry, donate_argnums=donated).lower(*arguments).compile()
