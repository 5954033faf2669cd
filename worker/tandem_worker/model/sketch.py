"""The program ``sketch``: `tandem_worker.drift.sketch` of the stored master weights, on the device.

A program of its own behind the step, so that it reads what the step stored and not a recomputed copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from tandem.sites import Site
from tandem.vocabulary import Module, Phase
from tandem_worker.chain import Op, Plan
from tandem_worker.digest import fmix32
from tandem_worker.drift.sketch import BLOCK, COLUMN_SEED, FRACTION, ROW_SEED, buckets, layout
from tandem_worker.model.compile import Compute
from tandem_worker.model.forward import AXIS, Array

SKETCH = "sketch"
"""Name of the program and of its slot, int32 ``[2, K]`` per rank."""
TOP = "sketch.top"
"""int32 ``[]`` per rank: bits of the largest absolute weight."""


def sketch_op(plan: Plan) -> Op:
    """What the program reads and makes, behind a whole step."""
    (step,) = plan.ops
    masters = tuple(slot for slot in step.outputs if slot.startswith("master."))
    shapes = {SKETCH: (2, buckets(plan.tp)), TOP: ()}
    sites = tuple(
        Site(i, Phase.UPDATE, Module.OPTIMIZER, -1, name, shapes[name], "int32") for i, name in enumerate(shapes)
    )
    return Op(0, SKETCH, masters, masters, tuple(shapes), sites)


def sketch_body(replicated: Sequence[bool], ranks: int) -> Compute:
    """What one rank computes of its masters, in the op's order; ``replicated``: counts on rank 0 alone."""
    number = buckets(ranks)

    def compute(local: list[Array], _: Array | None) -> tuple[list[Array], Array | None]:
        column = fmix32(jnp.arange(number, dtype=jnp.uint32) + np.uint32(COLUMN_SEED))
        flat = [value.reshape(-1) for value in local]
        order = layout([value.size for value in flat], replicated, number)
        high, low, tops, row = jnp.zeros(number, jnp.int32), jnp.zeros(number, jnp.int32), [], 0
        for value, whole in zip(flat, order.whole, strict=True):
            if whole:
                blocks = value[:whole].reshape(-1, BLOCK, number)
                more_high, more_low, top = _blocks(blocks, row, column)
                high, low = high + jnp.sum(more_high, axis=0), low + jnp.sum(more_low, axis=0)
                tops.append(jnp.max(top))
                row += blocks.shape[0] * BLOCK
        mine = jnp.where(lax.axis_index(AXIS) == 0, jnp.int32(1), jnp.int32(0))
        rest = [flat[i][order.whole[i] :] for i in order.rest]
        parts: list[tuple[list[Array], Array]] = [(rest, jnp.ones((), jnp.int32))]
        parts.append(([flat[i] for i in order.replicated], mine))
        for values, factor in parts:
            if not values:
                continue
            joined = jnp.concatenate(values)
            rows = -(-joined.size // number)
            count = -(-rows // BLOCK)
            padded = jnp.pad(joined, (0, count * BLOCK * number - joined.size)).reshape(count, BLOCK, number)
            more_high, more_low, top = _blocks(padded, row, column)
            high = high + jnp.sum(more_high, axis=0) * factor
            low = low + jnp.sum(more_low, axis=0) * factor
            tops.append(jnp.max(top))
            row += rows
        return [jnp.stack([high, low]), jnp.max(jnp.stack(tops))], None

    return compute


def _blocks(values: Array, row: int, column: Array) -> tuple[Array, Array, Array]:
    """Sums over the middle axis of ``[N, rows, K]``: high and low lane, and the maximum of the absolute bits."""
    count = values.shape[0] * values.shape[1]
    index = jnp.arange(count, dtype=jnp.uint32) + np.uint32((row + ROW_SEED) & 0xFFFFFFFF)
    multiplier = (fmix32(index) | np.uint32(1)).reshape(values.shape[:2])
    sign = lax.bitcast_convert_type(multiplier[..., None] * column, jnp.int32) >> 31
    scaled = values * np.float32(2.0**FRACTION)
    high = jnp.trunc(scaled * np.float32(2.0**-16))
    low = lax.round(scaled - high * np.float32(2.0**16), lax.RoundingMethod.TO_NEAREST_EVEN)
    lanes = [(part.astype(jnp.int32) ^ sign) - sign for part in (high, low)]
    size = lax.bitcast_convert_type(values, jnp.int32) & np.int32(0x7FFFFFFF)
    zero = np.int32(0)
    found: tuple[Array, Array, Array] = tuple(
        lax.reduce([*lanes, size], [zero] * 3, lambda a, b: [a[0] + b[0], a[1] + b[1], jnp.maximum(a[2], b[2])], (1,))
    )
    return found
