"""What each program of the chain computes on one rank: the body per program key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp

from tandem.spec import ModelConfig, Training
from tandem.vocabulary import Module
from tandem_worker.chain import Op, Plan
from tandem_worker.model import backward, forward, update
from tandem_worker.model.forward import Array, Tap
from tandem_worker.model.layout import leaves

Body = Callable[[Sequence[Array], Tap], tuple[Array, ...]]
"""One rank's inputs, in the op's order, and the inner fault point; returns the outputs in the op's order."""


def example_ops(plan: Plan) -> dict[str, Op]:
    """The first op of every program, in execution order: it gives the program's shapes."""
    found: dict[str, Op] = {}
    for op in plan.ops:
        found.setdefault(op.program, op)
    return found


def bodies(plan: Plan, model: ModelConfig, training: Training) -> Mapping[str, Body]:
    """Body of every program that the plan names."""
    f32 = jnp.float32
    blocks: dict[str, Callable[..., Array]] = {"attn": forward.attention, "ffn": forward.feed_forward}
    found: dict[str, Body] = {
        "embed.fwd": lambda i, _: (forward.embed(*i),),
        "embed.bwd": lambda i, tap: (backward.embed_backward(model.vocab // plan.tp, i[0], i[1], tap),),
        "reduce": lambda i, _: (forward.reduce_scatter(training, i[0], i[1]),),
        "reduce0": lambda i, _: (forward.reduce_scatter(training, i[0], None),),
        "head.fwd": lambda i, tap: (
            forward.head_statistics(model, forward.gather_sequence(i[0]), i[1].astype(f32), i[2], i[3], tap),
        ),
        "head.reduce": lambda i, _: forward.head_reduce(training, *i),
        "head.bwd": lambda i, tap: backward.head_backward(model, training, i[0], i[1], i[2], i[3], i[4], tap),
        "dw.reduce": lambda i, _: update.reduce_replicated(i),
    }
    for name, block in blocks.items():
        found[f"{name}.fwd"] = _block_forward(block, model)
        found[f"{name}.bwd"] = _block_backward(block, model)
    examples = example_ops(plan)
    found["grad_norm"] = _gradient_norm(examples["grad_norm"], training)
    for module in (Module.EMBED, Module.ATTN, Module.FFN, Module.HEAD):
        found[f"{module}.update"] = _update(examples[f"{module}.update"], module, model, training, plan.tp)
    return {key: found[key] for key in examples}


def _block_forward(block: Callable[..., Array], model: ModelConfig) -> Body:
    def body(inputs: Sequence[Array], tap: Tap) -> tuple[Array, ...]:
        x_BxPxH, norm_H, *weights = inputs
        x_BxSxH = forward.gather_sequence(x_BxPxH)
        return (block(model, x_BxSxH, norm_H.astype(jnp.float32), *weights, tap=tap),)

    return body


def _block_backward(block: Callable[..., Array], model: ModelConfig) -> Body:
    def body(inputs: Sequence[Array], tap: Tap) -> tuple[Array, ...]:
        x_BxPxH, norm_H, *weights, g_BxPxH = inputs
        return backward.block_backward(block, model, x_BxPxH, norm_H, tuple(weights), g_BxPxH, tap)

    return body


def _gradient_norm(op: Op, training: Training) -> Body:
    """A tied embedding's two gradients count as their sum; replicated gradients are the ``reduced`` ones."""

    def body(inputs: Sequence[Array], _: Tap) -> tuple[Array, ...]:
        gradients: list[tuple[Array, bool]] = []
        rest = list(zip(op.input_names, inputs, strict=True))
        while rest:
            name, value = rest.pop(0)
            if name.startswith("dw.head."):
                value = _tied_sum(value, rest.pop(0)[1])
            gradients.append((value, name.startswith("reduced.")))
        return update.gradient_norm(training.optimizer, gradients)

    return body


def _tied_sum(head: Array, embedding: Array) -> Array:
    """Gradient of a tied embedding, fp32: the head's, then the embedding's own."""
    return head.astype(jnp.float32) + embedding.astype(jnp.float32)


def _update(op: Op, module: Module, model: ModelConfig, training: Training, tp: int) -> Body:
    held = leaves(module, model, tp)
    tied = op.input_names[2].startswith("dw.head.")

    def body(inputs: Sequence[Array], _: Tap) -> tuple[Array, ...]:
        step, clip, *rest = inputs
        if tied:
            rest = [_tied_sum(rest[0], rest[1]), *rest[2:]]
        count = len(held)
        gradients, masters, mus, nus = (rest[i * count : (i + 1) * count] for i in range(4))
        new = update.update_group(training.optimizer, held, step, clip, gradients, masters, mus, nus)
        copies = [] if training.compute == "float32" else [m.astype(training.compute) for m in new[0]]
        return (*new[0], *new[1], *new[2], *copies)

    return body
