"""Which parameters a rank holds, and what their slots are called. Pure.

Slots: ``master.<group>.<leaf>`` (fp32), ``mu.`` and ``nu.`` (fp32 moments) and, when the compute dtype is not
fp32, ``copy.`` (compute dtype). ``<group>`` is ``embed``, ``attn.<layer>``, ``ffn.<layer>`` or ``head``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.spec import ModelConfig
from tandem.vocabulary import Module


@dataclass(frozen=True, slots=True)
class Leaf:
    """One weight. ``shape`` is one rank's; ``split`` is the axis that TP slices, None if replicated."""

    name: str
    shape: tuple[int, ...]
    split: int | None
    decay: bool
    """Whether weight decay applies (matrices yes, norms no)."""


def leaves(module: Module, model: ModelConfig, tp: int) -> tuple[Leaf, ...]:
    """The weights of one module (of one layer) as one rank holds them; matrices are [in, out]."""
    hidden, d = model.hidden, model.head_dim
    q, kv, ffn, vocab = model.heads * d // tp, model.kv_heads * d // tp, model.ffn // tp, model.vocab // tp
    norm = Leaf("norm", (hidden,), None, decay=False)
    match module:
        case Module.EMBED:
            return (Leaf("embedding", (vocab, hidden), 0, decay=True),)
        case Module.ATTN:
            return (
                norm,
                Leaf("wq", (hidden, q), 1, decay=True),
                Leaf("wk", (hidden, kv), 1, decay=True),
                Leaf("wv", (hidden, kv), 1, decay=True),
                Leaf("wo", (q, hidden), 0, decay=True),
            )
        case Module.FFN:
            return (
                norm,
                Leaf("w_gate", (hidden, ffn), 1, decay=True),
                Leaf("w_up", (hidden, ffn), 1, decay=True),
                Leaf("w_down", (ffn, hidden), 0, decay=True),
            )
        case Module.HEAD:
            return (norm,) if model.tied else (norm, Leaf("unembedding", (vocab, hidden), 0, decay=True))
        case _:
            return ()


def groups(model: ModelConfig) -> list[tuple[str, Module, int]]:
    """All parameter groups as (group, module, layer), in the order in which the update runs them."""
    inner = [
        group
        for layer in range(model.layers)
        for group in ((f"attn.{layer}", Module.ATTN, layer), (f"ffn.{layer}", Module.FFN, layer))
    ]
    return [("embed", Module.EMBED, -1), *inner, ("head", Module.HEAD, -1)]
