"""Arrays that the chain starts from: random or loaded parameters, and the host's inputs of each step.

Every array is rank-major ``[R, *local]`` with one rank per device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tandem.errors import WeightsError
from tandem.spec import ModelConfig
from tandem_worker.chain import Plan
from tandem_worker.model.forward import AXIS
from tandem_worker.model.layout import Leaf, groups, leaves

Slots = dict[str, jax.Array]


def random_parameters(plan: Plan, model: ModelConfig, mesh: Mesh, seed: int) -> Slots:
    """All persistent slots for a random start, a function of the model and ``seed`` alone.

    Matrices are normal with ``init_std``, those that write into the residual stream (``wo``, ``w_down``) divided by
    sqrt(2 * layers) (GPT-2, Radford et al. 2019, section 2.3); norms are one; moments zero. The logical weights do not
    depend on the number of ranks.
    """
    root = jax.random.key(seed)
    slots: Slots = {}
    for group, module, _ in groups(model):
        for leaf in leaves(module, model, plan.tp):
            std = model.init_std
            if leaf.name in ("wo", "w_down"):
                std /= (2 * model.layers) ** 0.5
            key = jax.random.fold_in(root, zlib.crc32(f"{group}.{leaf.name}".encode()))
            master = _random_leaf(key, np.float32(std), leaf, mesh)
            slots |= _with_state(plan, f"{group}.{leaf.name}", master)
    return slots


def place(arrays: Iterable[tuple[str, int, np.ndarray[Any, Any]]], plan: Plan, mesh: Mesh) -> Slots:
    """All persistent slots from loaded master weights.

    Each rank's array goes to its device as it comes, so the host holds one at a time.

    Args:
        arrays: (slot ``master.<group>.<leaf>``, rank, one rank's values), each slot and rank once.
        plan: the shapes.
        mesh: the ranks.

    Raises:
        WeightsError: a slot or rank is unknown, missing, given twice, or has another shape.
    """
    devices = list(mesh.devices.flat)
    parts: dict[str, dict[int, jax.Array]] = {}
    slots: Slots = {}
    for slot, rank, values in arrays:
        if slot not in plan.persistent or not slot.startswith("master.") or not 0 <= rank < plan.tp:
            raise WeightsError(f"weights name the unknown slot {slot} of rank {rank}")
        if slot in slots or rank in parts.setdefault(slot, {}):
            raise WeightsError(f"weights give {slot} of rank {rank} twice")
        spec = plan.slots[slot]
        if values.shape != spec.shape:
            raise WeightsError(f"weights give {slot} of rank {rank} the shape {values.shape}, needed is {spec.shape}")
        parts[slot][rank] = jax.device_put(np.array(values, dtype=np.float32)[None], devices[rank])
        if len(parts[slot]) == plan.tp:
            master = _assemble([parts[slot][r] for r in range(plan.tp)], mesh)
            slots |= _with_state(plan, slot.removeprefix("master."), master)
            parts[slot] = {}
    if missing := sorted(s for s in plan.persistent if s.startswith("master.") and s not in slots):
        raise WeightsError(f"weights lack {missing[0]} ({len(missing)} missing in all)")
    return slots


def step_inputs(tokens: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], step: int, mesh: Mesh) -> Slots:
    """The host's inputs of a step on the mesh, each rank its own copy.

    Args:
        tokens: int32 ``[B, S]``.
        targets: int32 ``[B, S]``, the token after each.
        step: from 1.
        mesh: the ranks.
    """
    host = {"tokens": tokens, "targets": targets, "step": np.asarray(step, np.int32)}
    sharding = rank_sharding(mesh)
    copies = {name: np.broadcast_to(np.asarray(a, np.int32), (mesh.size, *a.shape)) for name, a in host.items()}
    return {name: jax.device_put(np.ascontiguousarray(copy), sharding) for name, copy in copies.items()}


def rank_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of every array of the chain: axis 0 over the ranks."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def logical(array: jax.Array, leaf: Leaf) -> np.ndarray[Any, Any]:
    """The whole weight on the host, from its rank-major array."""
    parts = np.asarray(array)
    return parts[0] if leaf.split is None else np.concatenate(list(parts), axis=leaf.split)


def _with_state(plan: Plan, name: str, master: jax.Array) -> Iterator[tuple[str, jax.Array]]:
    """The slots of one leaf: master, moments and, where the plan has it, the compute copy."""
    yield f"master.{name}", master
    yield f"mu.{name}", jnp.zeros(master.shape, jnp.float32, device=master.sharding)
    yield f"nu.{name}", jnp.zeros(master.shape, jnp.float32, device=master.sharding)
    if (spec := plan.slots.get(f"copy.{name}")) is not None:
        yield f"copy.{name}", master.astype(spec.dtype)


def _assemble(parts: list[jax.Array], mesh: Mesh) -> jax.Array:
    shape = (mesh.size, *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, rank_sharding(mesh), parts)


def _random_leaf(key: jax.Array, std: np.float32, leaf: Leaf, mesh: Mesh) -> jax.Array:
    if leaf.name == "norm":
        return jnp.ones((mesh.size, *leaf.shape), jnp.float32, device=rank_sharding(mesh))
    shape, split = leaf.shape, leaf.split
    whole = shape if split is None else tuple(n * mesh.size if i == split else n for i, n in enumerate(shape))
    drawn: jax.Array = _normal(mesh.size, whole, split, rank_sharding(mesh))(key, std)
    return drawn


@cache
def _normal(ranks: int, whole: tuple[int, ...], split: int | None, sharding: NamedSharding) -> Any:
    """Compiled draw of a whole weight, laid out rank-major."""

    @partial(jax.jit, out_shardings=sharding)
    def draw(key: jax.Array, std: jax.Array) -> jax.Array:
        values = jax.random.normal(key, whole, jnp.float32) * std
        if split is None:
            return jnp.broadcast_to(values, (ranks, *whole))
        local = whole[split] // ranks
        parts = values.reshape(*whole[:split], ranks, local, *whole[split + 1 :])
        return jnp.moveaxis(parts, split, 0)

    return draw
