"""The backward submodules, as one TP rank computes them inside ``shard_map``.

Each takes the *synchronised* input of its forward submodule and recomputes that forward inside (activation
checkpointing per submodule), so that its inputs are compared values only. No derivative passes through a collective:
the gradient of a sum over ranks is the gathered gradient itself, and ``dx`` is the rank's partial before `reduce`.
Shape suffixes as in `tandem_worker.model.forward`. The recomputed forward is never injected; ``tap`` is the
gathered incoming gradient (head: the gradient of the normed x).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tandem.spec import ModelConfig, Training
from tandem_worker.model.forward import (
    Array,
    Tap,
    answer_share,
    gather_sequence,
    no_tap,
    own_rows,
    product,
    rms_norm,
    vocabulary_chunks,
)

Submodule = Callable[..., Array]


def block_backward(
    submodule: Submodule,
    model: ModelConfig,
    x_BxPxH: Array,
    norm_H: Array,
    weights: tuple[Array, ...],
    g_BxPxH: Array,
    tap: Tap = no_tap,
) -> tuple[Array, ...]:
    """Gradients of `attention` or `feed_forward`: ``dx`` and ``dw.norm`` (fp32) partial, then the other ``dw``."""
    g_BxSxH = tap(gather_sequence(g_BxPxH))
    _, vjp = jax.vjp(partial(submodule, model), gather_sequence(x_BxPxH), norm_H.astype(jnp.float32), *weights)
    return tuple(vjp(g_BxSxH))


def head_backward(
    model: ModelConfig,
    training: Training,
    x_BxPxH: Array,
    norm_H: Array,
    unembedding_VxH: Array,
    targets_BxS: Array,
    reduced_2xBxS: Array,
    tap: Tap = no_tap,
) -> tuple[Array, Array, Array]:
    """Gradients of the mean loss: ``dx`` partial, ``dw.norm`` fp32 partial, ``dw.unembedding``.

    d loss / d logit = (softmax * (1 + 2 z lse) - onehot) / (B * S), with softmax = exp(logit - lse) from the
    synchronised log-sum-exp; chunked over the vocabulary, so that logits are never materialised whole. Where targets
    are masked, 1 / (B * S) is `answer_share`.
    """
    dtype, rows = x_BxPxH.dtype, unembedding_VxH.shape[0]
    normed_BxSxH, norm_vjp = jax.vjp(
        lambda x, weight: rms_norm(x, weight, model.norm_eps), gather_sequence(x_BxPxH), norm_H.astype(jnp.float32)
    )
    local_BxS, _ = own_rows(targets_BxS, rows)
    lse_BxS = reduced_2xBxS[0]
    share = answer_share(targets_BxS) if training.masked else jnp.full((), 1.0 / targets_BxS.size, jnp.float32)
    scale = share[..., None]
    weight_BxS = share * (1.0 + 2.0 * training.z_loss * lse_BxS)

    def walk(size: int, total_BxSxH: Array, start: Array) -> tuple[Array, Array]:
        chunk = lax.dynamic_slice_in_dim(unembedding_VxH, start, size, axis=0)
        logits = product("bsh,vh->bsv", normed_BxSxH, chunk, out=jnp.float32)
        chosen = lax.iota(jnp.int32, size) + start == local_BxS[..., None]
        d_logits = jnp.exp(logits - lse_BxS[..., None]) * weight_BxS[..., None] - jnp.where(chosen, scale, 0.0)
        d_logits = d_logits.astype(dtype)
        total_BxSxH = total_BxSxH + product("bsv,vh->bsh", d_logits, chunk, out=jnp.float32)
        return total_BxSxH, product("bsv,bsh->vh", d_logits, normed_BxSxH)

    total, parts = jnp.zeros(normed_BxSxH.shape, jnp.float32), []
    for first, size, count in vocabulary_chunks(rows, targets_BxS.size):
        starts = first + size * jnp.arange(count, dtype=jnp.int32)
        total, dw = lax.scan(partial(walk, size), total, starts)
        parts.append(dw.reshape(count * size, -1))
    dx_BxSxH, d_norm_H = norm_vjp(tap(total.astype(dtype)))
    return dx_BxSxH, d_norm_H, jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def embed_backward(rows: int, tokens_BxS: Array, g_BxPxH: Array, tap: Tap = no_tap) -> Array:
    """``dw.embedding`` ``[V, H]``: the gradients of each own row added in fp32, rounded once."""
    g_BxSxH = tap(gather_sequence(g_BxPxH))
    local_BxS, _ = own_rows(tokens_BxS, rows)
    total = jnp.zeros((rows, g_BxSxH.shape[-1]), jnp.float32)
    return total.at[local_BxS].add(g_BxSxH.astype(jnp.float32), mode="drop").astype(g_BxSxH.dtype)
