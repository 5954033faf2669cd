"""The optimizer: sum of the replicated weights' gradients, global norm, AdamW (optax) per parameter group.

Runs inside ``shard_map`` on one rank's leaves. The step number counts from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import optax
from jax import lax

from tandem.spec import OptimizerConfig
from tandem_worker.model.forward import AXIS, Array, sum_ranks
from tandem_worker.model.layout import Leaf


def learning_rate(config: OptimizerConfig) -> Callable[[Array], Array]:
    """Learning rate of a step: linear warm-up from 0 over ``warmup_steps``, then constant or cosine to 0."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, max(1, config.decay_steps - warmup))
    if not warmup:
        schedule = after
    else:
        schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])
    return lambda step: jnp.asarray(schedule(step), jnp.float32)


def reduce_replicated(partials: Sequence[Array]) -> tuple[Array, ...]:
    """Sum each rank-partial gradient over the ranks, in rank order; every rank holds the sums. All fp32 ``[H]``."""
    ranks_RxNxH = lax.all_gather(jnp.stack(partials), AXIS)
    total_NxH = sum_ranks(ranks_RxNxH)
    return tuple(total_NxH[i] for i in range(len(partials)))


def gradient_norm(config: OptimizerConfig, gradients: Sequence[tuple[Array, bool]]) -> tuple[Array, Array]:
    """L2 norm of the whole gradient and the clip factor, fp32 ``[]``.

    Args:
        config: ``clip_norm`` may be None: the factor is 1.
        gradients: (tensor, whether every rank holds the same one: it then counts once).
    """
    sharded, replicated = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for gradient, same in gradients:
        squares = jnp.sum(jnp.square(gradient.astype(jnp.float32)))
        sharded, replicated = (sharded, replicated + squares) if same else (sharded + squares, replicated)
    norm = jnp.sqrt(sum_ranks(lax.all_gather(sharded, AXIS)) + replicated)
    if config.clip_norm is None:
        return norm, jnp.ones((), jnp.float32)
    return norm, jnp.where(norm < config.clip_norm, 1.0, config.clip_norm / norm)


def update_group(
    config: OptimizerConfig,
    leaves: Sequence[Leaf],
    step: Array,
    clip: Array,
    gradients: Sequence[Array],
    masters: Sequence[Array],
    mus: Sequence[Array],
    nus: Sequence[Array],
) -> tuple[list[Array], list[Array], list[Array]]:
    """One AdamW step (Loshchilov and Hutter 2019) of a group's leaves, all fp32 and in leaf order.

    Args:
        config: decay applies where ``Leaf.decay`` says so.
        leaves: the group's.
        step: int32 ``[]``, from 1.
        clip: fp32 ``[]``, multiplies the gradients.
        gradients: any float dtype.
        masters: weights.
        mus: first moments.
        nus: second moments.

    Returns:
        The new masters, first and second moments.
    """
    scaled = [g.astype(jnp.float32) * clip for g in gradients]
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
    decay = optax.add_decayed_weights(config.weight_decay, mask=[leaf.decay for leaf in leaves])
    params = list(masters)
    state = optax.ScaleByAdamState(count=step - 1, mu=list(mus), nu=list(nus))
    updates, state = adam.update(scaled, state, params)
    updates, _ = decay.update(updates, decay.init(params), params)
    rate = learning_rate(config)(step)
    return [p - rate * u for p, u in zip(params, updates, strict=True)], list(state.mu), list(state.nu)
