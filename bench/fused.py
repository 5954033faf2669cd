"""One training step as a single jitted program, from the bodies that the chain's programs are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tandem.spec import ModelConfig, Training
from tandem_worker import digest
from tandem_worker.chain import Plan
from tandem_worker.model.forward import AXIS, no_tap
from tandem_worker.model.programs import bodies

Arrays = dict[str, Any]
LOSS, GRAD_NORM = "fwd.head.reduced.loss", "update.optimizer.grad_norm"


def fused_step(plan: Plan, model: ModelConfig, training: Training, mesh: Mesh, *, digests: bool) -> Any:
    """A jitted ``(persistent slots, inputs) -> (new persistent slots, loss, norm, digests)``; the first is donated.

    ``digests``: whether every tensor that the chain digests is digested here too (u32 ``[R, 1 + sites, 2]``).

    The backward bodies recompute their submodule's forward. A barrier before their inputs, as `jax.checkpoint` sets it,
    keeps the compiler from taking the forward pass's values instead: the checkpoint policy is the chain's.
    """
    found = bodies(plan, model, training)

    def one_rank(persistent: Arrays, inputs: Arrays) -> tuple[Arrays, Any, Any, Any]:
        lanes = [jnp.zeros(2, jnp.uint32)]
        slots = {name: array[0] for name, array in (persistent | inputs).items()}
        for op in plan.ops:
            read = [slots[slot] for slot in op.inputs]
            if op.program.endswith(".bwd"):
                read = list(lax.optimization_barrier(tuple(read)))
            values = found[op.program](read, no_tap)
            written = {s: v.astype(plan.slots[s].dtype) for s, v in zip(op.outputs, values, strict=True)}
            slots |= written
            lanes += [digest.lanes(v) for v in written.values()] if digests else []
        new = {name: slots[name][None] for name in persistent}
        return new, slots[LOSS][None], slots[GRAD_NORM][None], jnp.stack(lanes)[None]

    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)
