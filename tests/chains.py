"""Small chains, compiled once a test session, and an independent fused model to hold them against."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tandem.spec import ModelConfig, OptimizerConfig, Training
from tandem.vocabulary import Module
from tandem_worker.chain import Chain, run_step
from tandem_worker.model.build import build_chain
from tandem_worker.model.init import logical, random_parameters, step_inputs
from tandem_worker.model.layout import groups, leaves

MODEL = ModelConfig(name="test", layers=2, hidden=32, heads=8, kv_heads=4, head_dim=8, ffn=48, vocab=64, init_std=0.2)
TIED = MODEL.model_copy(update={"tied": True, "sliding_window": 5, "kv_heads": 2})
OPTIMIZER = OptimizerConfig(learning_rate=0.01, warmup_steps=2, clip_norm=0.5)
TRAINING = Training(batch=2, sequence=16, compute="float32", z_loss=1e-2, optimizer=OPTIMIZER)
BF16 = TRAINING.model_copy(update={"compute": "bfloat16"})


@cache
def chain(tp: int, tied: bool = False, compute: str = "float32") -> Chain:
    """A real build of `MODEL` (or `TIED`)."""
    training = TRAINING if compute == "float32" else BF16
    return build_chain(TIED if tied else MODEL, training, tp)


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(0, MODEL.vocab, (TRAINING.batch, TRAINING.sequence + 1))
    return tokens[:, :-1], tokens[:, 1:]


def start(made: Chain, model: ModelConfig = MODEL, step: int = 1, seed: int = 0) -> dict[str, jax.Array]:
    """All slots before a step: random parameters and one batch."""
    return random_parameters(made.plan, model, made.mesh, seed) | step_inputs(*batch(), step, made.mesh)


def step(made: Chain, env: dict[str, Any]) -> dict[str, Any]:
    return run_step(made, env, keep=True)


def weights(model: ModelConfig, tp: int, env: dict[str, Any], kind: str = "master") -> dict[str, np.ndarray]:
    """Whole weights (or moments) by ``<group>.<leaf>``."""
    return {
        f"{group}.{leaf.name}": logical(env[f"{kind}.{group}.{leaf.name}"], leaf)
        for group, module, _ in groups(model)
        for leaf in leaves(module, model, tp)
    }


def gradients(model: ModelConfig, tp: int, env: dict[str, Any]) -> dict[str, np.ndarray]:
    """Whole gradients by ``<group>.<leaf>``, out of the slots that a step left."""
    found = {}
    for group, module, _ in groups(model):
        for leaf in leaves(module, model, tp):
            kind = "reduced" if leaf.split is None else "dw"
            value = logical(env[f"bwd.{group}.{kind}.{leaf.name}"], leaf)
            if module is Module.EMBED and model.tied:
                value = value + logical(env["bwd.head.dw.embedding"], leaf)
            found[f"{group}.{leaf.name}"] = value
    return found


def fused_loss(model: ModelConfig, z_loss: float, params: dict[str, Any], tokens: Any, targets: Any) -> jax.Array:
    """Mean loss of the whole model in fp32."""
    logits = fused_logits(model, params, tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    per_token = -picked + z_loss * jax.scipy.special.logsumexp(logits, axis=-1) ** 2
    return jnp.mean(per_token[targets >= 0])


def fused_logits(model: ModelConfig, params: dict[str, Any], tokens: Any) -> jax.Array:
    """fp32 logits ``[B, S, V]`` of the whole model, written apart from the chain: no TP, complex RoPE, whole logits."""
    x = params["embed.embedding"][tokens]
    for layer in range(model.layers):
        x = x + _attention(model, {k: params[f"attn.{layer}.{k}"] for k in ("norm", "wq", "wk", "wv", "wo")}, x)
        ffn = {k: params[f"ffn.{layer}.{k}"] for k in ("norm", "w_gate", "w_up", "w_down")}
        y = _norm(model, ffn["norm"], x)
        gate = y @ ffn["w_gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (y @ ffn["w_up"])) @ ffn["w_down"]
    head = params["embed.embedding"] if model.tied else params["head.unembedding"]
    return _norm(model, params["head.norm"], x) @ head.T


def _norm(model: ModelConfig, weight: Any, x: Any) -> Any:
    return weight * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + model.norm_eps)


def _attention(model: ModelConfig, w: dict[str, Any], x: Any) -> Any:
    b, s, _ = x.shape
    y = _norm(model, w["norm"], x)
    split = lambda z, heads: z.reshape(b, s, heads, model.head_dim).transpose(0, 2, 1, 3)
    q, k, v = split(y @ w["wq"], model.heads), split(y @ w["wk"], model.kv_heads), split(y @ w["wv"], model.kv_heads)
    q, k = _rope(model, q), _rope(model, k)
    k, v = (jnp.repeat(z, model.heads // model.kv_heads, axis=1) for z in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(model.head_dim)
    far = np.subtract.outer(np.arange(s), np.arange(s))
    window = s if model.sliding_window is None else model.sliding_window
    scores = jnp.where((far >= 0) & (far < window), scores, -np.inf)
    context = jax.nn.softmax(scores) @ v
    return context.transpose(0, 2, 1, 3).reshape(b, s, -1) @ w["wo"]


def _rope(model: ModelConfig, x: Any) -> Any:
    half = model.head_dim // 2
    angles = np.outer(np.arange(x.shape[2]), model.rope_theta ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles).astype(np.complex64)
    return jnp.concatenate((turned.real, turned.imag), axis=-1)
