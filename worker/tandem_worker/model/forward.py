"""The forward submodules, as one TP rank computes them inside ``shard_map``.

Names end in their shape: B batch, S sequence, P = S/R the rank's piece of it, H hidden, Q columns of ``wq``, K KV heads
of the rank, G query heads per KV head, D head size, F FFN width of the rank, V vocabulary rows of the rank. Matrices
are [in, out].

Every function takes ``tap``: the inner fault point, the identity in a real build.

Numerics follow Hugging Face Llama (transformers, models/llama/modeling_llama.py): RMSNorm in fp32, rounded to the
compute dtype before the weight; rotate-half RoPE; fp32 softmax. Matrix products of bf16 operands accumulate in fp32;
fp32 products ask for full precision, so that a TPU or a tensor core does not round the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tandem.spec import ModelConfig, Training

AXIS = "tp"
"""Mesh axis of tensor parallelism."""

Array = jax.Array
Tap = Callable[[Array], Array]

LOGITS_BYTES = 64 * 2**20
"""Upper bound of one rank's materialised fp32 logits: the head walks the vocabulary in chunks of this size."""


_HIDDEN = np.finfo(np.float32).min
"""Score of a key that a query must not see."""


def no_tap(x: Array) -> Array:
    """The tap of a real build, and of a forward recomputed inside a backward program."""
    return x


def gather_sequence(x_BxPxH: Array) -> Array:
    """All ranks' pieces of the sequence, in rank order: ``[B, S, H]``."""
    x_BxSxH: Array = lax.all_gather(x_BxPxH, AXIS, axis=1, tiled=True)
    return x_BxSxH


def product(subscripts: str, *operands: Array, out: Any = None) -> Array:
    """`einsum` with fp32 accumulation; the result in the first operand's dtype, or in ``out``."""
    dtype = operands[0].dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    result: Array = jnp.einsum(subscripts, *operands, precision=precision, preferred_element_type=out or dtype)
    return result


@jax.custom_vjp
def linear(x_BxSxI: Array, w_IxO: Array) -> Array:
    """``x @ w``, with a gradient of ``w`` that is computed in its stored layout.

    The transposed product that automatic differentiation makes is copied into that layout afterwards, and the
    digest would then read what precedes the copy.
    """
    return product("bsi,io->bso", x_BxSxI, w_IxO)


def _linear_forward(x_BxSxI: Array, w_IxO: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear(x_BxSxI, w_IxO), (x_BxSxI, w_IxO)


def _linear_backward(saved: tuple[Array, Array], g_BxSxO: Array) -> tuple[Array, Array]:
    x_BxSxI, w_IxO = saved
    return product("bso,io->bsi", g_BxSxO, w_IxO), product("bsi,bso->io", x_BxSxI, g_BxSxO)


linear.defvjp(_linear_forward, _linear_backward)


def rms_norm(x_BxSxH: Array, weight_H: Array, eps: float) -> Array:
    """RMSNorm (Zhang and Sennrich 2019) in fp32; ``weight_H`` is fp32.

    The product of two compute-dtype values is exact in fp32, so rounding it once gives the bits of a product in the
    compute dtype, while the gradient of ``weight_H`` stays fp32.
    """
    x32 = x_BxSxH.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = (x32 * scale).astype(x_BxSxH.dtype)
    weighted: Array = (weight_H * normed.astype(jnp.float32)).astype(x_BxSxH.dtype)
    return weighted


def inverse_frequencies(model: ModelConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """RoPE frequencies fp32 ``[D/2]``, theta^(-2i/D), with Llama 3.1 scaling where the model has it.

    Source of the scaling: transformers, modeling_rope_utils.py, ``_compute_llama3_parameters``.
    """
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float32) / np.float32(model.head_dim)
    powers = np.asarray([model.rope_theta ** float(e) for e in exponents], dtype=np.float32)
    frequencies: np.ndarray[Any, np.dtype[np.float32]] = np.float32(1) / powers
    if (scaling := model.rope_scaling) is None:
        return frequencies
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    scaled = []
    for frequency in frequencies.tolist():
        wavelength = 2 * math.pi / frequency
        blend = (original / wavelength - low) / (high - low)
        if wavelength > original / low:
            scaled.append(frequency / factor)
        elif wavelength < original / high:
            scaled.append(frequency)
        else:
            scaled.append((1 - blend) * frequency / factor + blend * frequency)
    return np.asarray(scaled, dtype=np.float32)


def rotate(x_BxSxNxD: Array, cos_SxD: Array, sin_SxD: Array) -> Array:
    """RoPE in the rotate-half convention of Hugging Face checkpoints, in fp32, rounded once."""
    x32 = x_BxSxNxD.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    half = jnp.concatenate((-second, first), axis=-1)
    return (x32 * cos_SxD[:, None, :] + half * sin_SxD[:, None, :]).astype(x_BxSxNxD.dtype)


def rotary_tables(model: ModelConfig, sequence: int) -> tuple[Array, Array]:
    """Cosines and sines, fp32 ``[S, D]``: constants of the executable, and so part of its fingerprint.

    The angles are rounded to fp32 as in transformers; their cosines are computed in fp64 and rounded once.
    """
    angles_SxD2 = np.arange(sequence, dtype=np.float32)[:, None] * inverse_frequencies(model)[None, :]
    angles_SxD = np.concatenate((angles_SxD2, angles_SxD2), axis=-1).astype(np.float64)
    return jnp.asarray(np.cos(angles_SxD), jnp.float32), jnp.asarray(np.sin(angles_SxD), jnp.float32)


def attention(
    model: ModelConfig,
    x_BxSxH: Array,
    norm_H: Array,
    wq_HxQ: Array,
    wk_HxKD: Array,
    wv_HxKD: Array,
    wo_QxH: Array,
    tap: Tap = no_tap,
) -> Array:
    """Causal grouped-query attention over the rank's heads: its partial ``[B, S, H]``, residual not added.

    ``norm_H`` is fp32, the rest compute dtype; the tap is the attention context entering ``wo``.
    """
    batch, sequence, _ = x_BxSxH.shape
    dim, per_kv = model.head_dim, model.heads // model.kv_heads
    kv = wk_HxKD.shape[1] // dim
    normed_BxSxH = rms_norm(x_BxSxH, norm_H, model.norm_eps)
    tables = rotary_tables(model, sequence)
    q_BxSxQ, k_BxSxKD, v_BxSxKD = (linear(normed_BxSxH, w) for w in (wq_HxQ, wk_HxKD, wv_HxKD))
    q_BxSxNxD = rotate(q_BxSxQ.reshape(batch, sequence, kv * per_kv, dim), *tables)
    k_BxSxKxD = rotate(k_BxSxKD.reshape(batch, sequence, kv, dim), *tables)
    q_BxSxKxGxD = q_BxSxNxD.reshape(batch, sequence, kv, per_kv, dim)
    v_BxSxKxD = v_BxSxKD.reshape(batch, sequence, kv, dim)
    scores_BxKxGxSxS = product("bskgd,btkd->bkgst", q_BxSxKxGxD, k_BxSxKxD, out=jnp.float32) * dim**-0.5
    masked = jnp.where(_visible(sequence, model.sliding_window), scores_BxKxGxSxS, _HIDDEN)
    weights_BxKxGxSxS = jax.nn.softmax(masked, axis=-1).astype(x_BxSxH.dtype)
    context_BxSxQ = product("bkgst,btkd->bskgd", weights_BxKxGxSxS, v_BxSxKxD).reshape(q_BxSxQ.shape)
    return linear(tap(context_BxSxQ), wo_QxH)


def _visible(sequence: int, window: int | None) -> Array:
    """Which keys a query sees: bool ``[S, S]``; itself and the past, at most ``window`` positions in all."""
    query, key = lax.broadcasted_iota(jnp.int32, (sequence, sequence), 0), lax.iota(jnp.int32, sequence)[None, :]
    causal = key <= query
    return causal if window is None else causal & (query - key < window)


def feed_forward(
    model: ModelConfig,
    x_BxSxH: Array,
    norm_H: Array,
    w_gate_HxF: Array,
    w_up_HxF: Array,
    w_down_FxH: Array,
    tap: Tap = no_tap,
) -> Array:
    """SwiGLU (Shazeer 2020) over the rank's columns: its partial ``[B, S, H]``; the tap enters ``w_down``."""
    normed_BxSxH = rms_norm(x_BxSxH, norm_H, model.norm_eps)
    gate_BxSxF = linear(normed_BxSxH, w_gate_HxF)
    up_BxSxF = linear(normed_BxSxH, w_up_HxF)
    return linear(tap(jax.nn.silu(gate_BxSxF) * up_BxSxF), w_down_FxH)


def embed(tokens_BxS: Array, embedding_VxH: Array) -> Array:
    """Rows of the tokens that this rank holds, zero elsewhere: ``[B, S, H]`` partial."""
    rows_BxS, mine_BxS = own_rows(tokens_BxS, embedding_VxH.shape[0])
    found_BxSxH = embedding_VxH.at[rows_BxS].get(mode="clip")
    return jnp.where(mine_BxS[..., None], found_BxSxH, jnp.zeros((), embedding_VxH.dtype))


def own_rows(tokens_BxS: Array, rows: int) -> tuple[Array, Array]:
    """Index of each token in this rank's vocabulary rows (``rows`` where another holds it), and whether it is there."""
    local_BxS = tokens_BxS - lax.axis_index(AXIS) * rows
    mine_BxS = (local_BxS >= 0) & (local_BxS < rows)
    return jnp.where(mine_BxS, local_BxS, rows), mine_BxS


def vocabulary_chunks(rows: int, tokens: int) -> list[tuple[int, int, int]]:
    """How the head walks its rows: (first row, rows per chunk, chunks), at most a run of equal chunks and a rest."""
    size = min(rows, max(128, LOGITS_BYTES // (4 * tokens) // 128 * 128))
    whole, rest = divmod(rows, size)
    return [(0, size, whole)] + ([(whole * size, rest, 1)] if rest else [])


def head_statistics(
    model: ModelConfig,
    x_BxSxH: Array,
    norm_H: Array,
    unembedding_VxH: Array,
    targets_BxS: Array,
    tap: Tap = no_tap,
) -> Array:
    """Per token over the rank's vocabulary rows, fp32 ``[3, B, S]``: maximum logit, sum of exp(logit - maximum), target
    logit (0 where another rank holds it). The tap is the normed x.
    """
    rows = unembedding_VxH.shape[0]
    normed_BxSxH = tap(rms_norm(x_BxSxH, norm_H, model.norm_eps))
    local_BxS, _ = own_rows(targets_BxS, rows)

    def walk(size: int, carry: tuple[Array, Array, Array], start: Array) -> tuple[tuple[Array, Array, Array], None]:
        maximum, total, target = carry
        chunk = lax.dynamic_slice_in_dim(unembedding_VxH, start, size, axis=0)
        logits = product("bsh,vh->bsv", normed_BxSxH, chunk, out=jnp.float32)
        highest = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        total = total * jnp.exp(maximum - highest) + jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1)
        chosen = lax.iota(jnp.int32, size) + start == local_BxS[..., None]
        return (highest, total, target + jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1)), None

    zeros = jnp.zeros(targets_BxS.shape, jnp.float32)
    carry = (jnp.full(targets_BxS.shape, -jnp.inf, jnp.float32), zeros, zeros)
    for first, size, count in vocabulary_chunks(rows, targets_BxS.size):
        starts = first + size * jnp.arange(count, dtype=jnp.int32)
        carry, _ = lax.scan(partial(walk, size), carry, starts)
    return jnp.stack(carry)


def head_reduce(training: Training, out_3xBxS: Array, targets_BxS: Array | None = None) -> tuple[Array, Array]:
    """Combine the ranks' statistics in rank order.

    Args:
        training: weight of the z-loss; `masked`: targets of -1 count in no mean.
        out_3xBxS: of `head_statistics`.
        targets_BxS: int32, needed only where `masked`.

    Returns:
        fp32 ``[2, B, S]`` (log-sum-exp, target logit) and the fp32 mean loss: cross entropy plus ``z_loss`` times the
        mean squared log-sum-exp (PaLM, Chowdhery et al. 2022, section 5). Every rank holds both.
    """
    ranks_Rx3xBxS = lax.all_gather(out_3xBxS, AXIS)
    highest = jnp.max(ranks_Rx3xBxS[:, 0], axis=0)
    total = sum_ranks(ranks_Rx3xBxS[:, 1] * jnp.exp(ranks_Rx3xBxS[:, 0] - highest))
    lse, target = highest + jnp.log(total), sum_ranks(ranks_Rx3xBxS[:, 2])
    if training.masked:
        assert targets_BxS is not None
        share_BxS = answer_share(targets_BxS)
        loss = jnp.sum(share_BxS * (lse - target + training.z_loss * lse * lse))
        return jnp.stack((lse, target)), loss
    loss = jnp.mean(lse - target)
    if training.z_loss:
        loss += training.z_loss * jnp.mean(lse * lse)
    return jnp.stack((lse, target)), loss


def answer_share(targets_BxS: Array) -> Array:
    """Weight of each token in the mean over those whose target is not -1; all zero where there is none: fp32."""
    counts_BxS = (targets_BxS >= 0).astype(jnp.float32)
    return counts_BxS / jnp.maximum(jnp.sum(counts_BxS), 1.0)


def sum_ranks(x_Rx: Array) -> Array:
    """Sum over axis 0 from rank 0 upwards, one addition after the other: same bits whatever the ring."""
    total = x_Rx[0]
    for rank in range(1, x_Rx.shape[0]):
        total = total + x_Rx[rank]
    return total


def reduce_scatter(training: Training, partial_BxSxH: Array, residual_BxPxH: Array | None) -> Array:
    """Sum of the ranks' partials plus the residual, for this rank's piece of the sequence: ``[B, P, H]``.

    The pieces travel by all-to-all and are added here in rank order, in fp32 or the compute dtype
    (``Training.accumulate``), because a library's reduce-scatter may add in another order on another ring.
    """
    batch, sequence, hidden = partial_BxSxH.shape
    ranks = lax.axis_size(AXIS)
    pieces = partial_BxSxH.reshape(batch, ranks, sequence // ranks, hidden)
    pieces_RxBxPxH = lax.all_to_all(pieces, AXIS, split_axis=1, concat_axis=0)
    dtype = jnp.float32 if training.accumulate == "float32" else partial_BxSxH.dtype
    total = sum_ranks(pieces_RxBxPxH.astype(dtype))
    if residual_BxPxH is not None:
        total = total + residual_BxPxH.astype(dtype)
    return total.astype(partial_BxSxH.dtype)
