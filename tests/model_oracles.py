"""Logits of Tandem's chain and of the independent implementations, from the same Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tandem.spec import ModelConfig, Training, check_tp
from tandem.vocabulary import Phase
from tandem_worker.model.build import make_mesh
from tandem_worker.model.compile import compile_program, injected
from tandem_worker.model.init import place, step_inputs
from tandem_worker.model.plan import make_plan
from tandem_worker.model.programs import bodies, example_ops
from tandem_worker.model.weights import load_parameters, read_config


@dataclass(frozen=True)
class Result:
    """What the chain's forward pass says of one batch."""

    logits: np.ndarray
    """fp32 ``[B, S, V]``, from the last reduced activation by a plain final norm and unembedding."""
    lse: np.ndarray
    """fp32 ``[B, S]``, the head's own log-sum-exp."""
    target: np.ndarray
    """fp32 ``[B, S]``, the head's own target logit."""
    loss: float


class Forward:
    """The forward programs of the chain in fp32, as ``build_chain`` compiles them; the backward ones are left out."""

    def __init__(self, directory: Path, tp: int, batch: int, sequence: int) -> None:
        self.model: ModelConfig = read_config(directory)
        training = Training(batch=batch, sequence=sequence, compute="float32")
        check_tp(self.model, training, tp)
        self.mesh = make_mesh(tp)
        plan = make_plan(self.model, training, tp)
        self.ops = [op for op in plan.ops if op.sites[0].phase is Phase.FWD]
        code, examples = bodies(plan, self.model, training), example_ops(plan)
        self.programs = {
            name: compile_program(
                name,
                injected(name, code[name], [plan.slots[slot] for slot in examples[name].outputs]),
                [plan.slots[slot] for slot in examples[name].inputs],
                self.mesh,
                0,
            )
            for name in {op.program for op in self.ops}
        }
        self.parameters = place(load_parameters(directory, self.model, tp), plan, self.mesh)

    def __call__(self, tokens: np.ndarray, targets: np.ndarray) -> Result:
        slots = self.parameters | step_inputs(tokens, targets, 1, self.mesh)
        for op in self.ops:
            outputs, _, _ = self.programs[op.program]([slots[slot] for slot in op.inputs])
            slots |= dict(zip(op.outputs, outputs, strict=True))
        last = self.ops[-3].outputs[0]
        assert last.startswith("fwd.ffn.")
        x = np.concatenate(list(np.asarray(slots[last])), axis=1)
        lse, target = np.asarray(slots["fwd.head.reduced"])[0]
        return Result(self._logits(slots, x), lse, target, float(slots["fwd.head.reduced.loss"][0]))

    def _logits(self, slots: dict[str, jax.Array], x: np.ndarray) -> np.ndarray:
        head = "master.embed.embedding" if self.model.tied else "master.head.unembedding"
        unembedding = np.concatenate(list(np.asarray(slots[head])), axis=0)
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.model.norm_eps))
        normed = np.asarray(slots["master.head.norm"])[0] * (x * scale)
        return np.asarray(jnp.matmul(normed, unembedding.T, precision="highest"))


def transformers_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """fp32 ``[B, S, V]`` by PyTorch transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def mlx_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """fp32 ``[B, S, V]`` by mlx-lm."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    return np.array(model(mx.array(tokens)))


ORACLES = {"transformers": transformers_logits, "mlx_lm": mlx_logits}


def largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute logit."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == np.float32
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
