"""The chain of one training step of a Llama-family decoder, as a list of program executions. Pure.

Shapes are one rank's; B batch, S sequence, H hidden, R ranks. Between submodules the activations are
sequence-sharded ``[B, S/R, H]``; ``out`` and ``dx`` are a rank's whole partial ``[B, S, H]`` before the reduction.

==============  =============================================  ==========================================
program         inputs                                         outputs
==============  =============================================  ==========================================
embed.fwd       tokens, embedding                              out
reduce0         partial                                        reduced
attn.fwd        x, norm, wq, wk, wv, wo                        out
ffn.fwd         x, norm, w_gate, w_up, w_down                  out
reduce          partial, residual                              reduced
head.fwd        x, norm, unembedding (tied: embedding),        out [3, B, S] fp32: per token maximum, sum of
                targets                                        exponentials, target logit
head.reduce     out (masked: and targets)                      reduced [2, B, S] fp32: log-sum-exp and target
                                                               logit; reduced.loss [] fp32
head.bwd        x, norm, unembedding, targets, reduced         dx, dw.norm, dw.unembedding
ffn.bwd ...     x, weights, g                                  dx, dw.<leaf>
embed.bwd       tokens, g                                      dw.embedding
dw.reduce       every partial dw.norm                          reduced.norm of each owner
grad_norm       every gradient                                 grad_norm [], grad_norm.clip [] (fp32)
<module>.update step, clip, gradients, param, mu, nu           param, moment.mu, moment.nu, param.copy
==============  =============================================  ==========================================

Slots: ``<phase>.<group>.<tensor>`` for what a step computes, ``tandem_worker.model.layout`` for what outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.sites import Site
from tandem.spec import ModelConfig, Training
from tandem.vocabulary import Module, Phase
from tandem_worker.chain import Op, Plan, TensorSpec
from tandem_worker.model.layout import Leaf, groups, leaves

STEP_INPUTS = ("tokens", "targets", "step")
REDUCTIONS = ("reduce0", "reduce", "head.reduce", "dw.reduce", "grad_norm")
"""Programs that combine the ranks' values. A whole-step build has them beside the step, for the known reduction."""
_BLOCKS = (Module.ATTN, Module.FFN)


def make_plan(model: ModelConfig, training: Training, tp: int) -> Plan:
    """The static chain of one step; site numbers are consecutive in execution order.

    Args:
        model: the decoder; ``tp`` must divide what `tandem.spec.check_tp` says.
        training: shape of one step, compute dtype.
        tp: ranks.
    """
    builder = _Builder(model, training, tp)
    final = builder.forward()
    builder.backward(final)
    builder.update()
    return Plan(
        ops=tuple(builder.ops),
        initial=tuple(builder.initial),
        slots=builder.slots,
        persistent=frozenset(builder.persistent),
        step_inputs=STEP_INPUTS,
        tp=tp,
    )


def group_of(module: Module, layer: int) -> str:
    """Name of a parameter group, as in the slots."""
    return module.value if layer < 0 else f"{module.value}.{layer}"


def gradient_leaves(module: Module, model: ModelConfig, tp: int) -> tuple[Leaf, ...]:
    """Leaves for which a module's backward program returns ``dw``: its own, and the tied head's embedding."""
    own = leaves(module, model, tp)
    return own + leaves(Module.EMBED, model, tp) if module is Module.HEAD and model.tied else own


class _Builder:
    """Appends ops, numbering sites and registering slots."""

    def __init__(self, model: ModelConfig, training: Training, tp: int) -> None:
        batch, sequence, hidden = training.batch, training.sequence, model.hidden
        self.model, self.tp = model, tp
        self.compute, self.masked = training.compute, training.masked
        self.partial = TensorSpec((batch, sequence, hidden), training.compute)
        self.sharded = TensorSpec((batch, sequence // tp, hidden), training.compute)
        self.tokens = TensorSpec((batch, sequence), "int32")
        self.scalar = TensorSpec((), "float32")
        self.ops: list[Op] = []
        self.initial: list[Op] = []
        self.persistent: list[str] = []
        self.slots: dict[str, TensorSpec] = {
            "tokens": self.tokens,
            "targets": self.tokens,
            "step": TensorSpec((), "int32"),
        }
        self.number = 0
        for group, module, _ in groups(model):
            for leaf in leaves(module, model, tp):
                for kind, dtype in self._kinds():
                    slot = f"{kind}.{group}.{leaf.name}"
                    self.slots[slot] = TensorSpec(leaf.shape, dtype)
                    self.persistent.append(slot)

    def forward(self) -> str:
        """Append the forward ops; the slot of the last reduced activation."""
        x = self._embed_forward()
        for layer in range(self.model.layers):
            for module in _BLOCKS:
                weights = self._weights(module, layer)
                out = self._run(f"{module}.fwd", [("x", x), *weights], Phase.FWD, module, layer, {"out": self.partial})
                x = self._reduce(out[0], x, Phase.FWD, module, layer)
        stats = TensorSpec((3, *self.tokens.shape), "float32")
        inputs = [("x", x), *self._weights(Module.HEAD, -1), ("targets", "targets")]
        out = self._run("head.fwd", inputs, Phase.FWD, Module.HEAD, -1, {"out": stats})
        reduced = {"reduced": TensorSpec((2, *self.tokens.shape), "float32"), "reduced.loss": self.scalar}
        targets = [("targets", "targets")] if self.masked else []
        self._run("head.reduce", [("out", out[0]), *targets], Phase.FWD, Module.HEAD, -1, reduced)
        return x

    def backward(self, final: str) -> None:
        """Append the backward ops, from the head down to the embedding."""
        head = [("x", final), *self._weights(Module.HEAD, -1), ("targets", "targets"), ("reduced", "fwd.head.reduced")]
        g = self._backward_op(Module.HEAD, -1, head)
        g = self._reduce(g, None, Phase.BWD, Module.HEAD, -1)
        for layer in reversed(range(self.model.layers)):
            for module in reversed(_BLOCKS):
                inputs = [("x", self._input_of(module, layer)), *self._weights(module, layer), ("g", g)]
                dx = self._backward_op(module, layer, inputs)
                g = self._reduce(dx, g, Phase.BWD, module, layer)
        dw = {"dw.embedding": self._dw_spec(leaves(Module.EMBED, self.model, self.tp)[0])}
        self._run("embed.bwd", [("tokens", "tokens"), ("g", g)], Phase.BWD, Module.EMBED, -1, dw)

    def update(self) -> None:
        """Append the sum of the replicated weights' gradients, the norm, and one update per group."""
        norms = [(group, module, layer) for group, module, layer in groups(self.model) if module is not Module.EMBED]
        spec = TensorSpec((self.model.hidden,), "float32")
        self._append(
            "dw.reduce",
            [(f"dw.norm.{group}", f"bwd.{group}.dw.norm") for group, _, _ in norms],
            [(f"bwd.{g}.reduced.norm", spec, Phase.BWD, module, layer, "reduced.norm") for g, module, layer in norms],
            drain=True,
        )
        every = [
            (f"{name}.{group}", slot)
            for group, module, _ in groups(self.model)
            for name, slot in self._gradients(group, module)
        ]
        outputs = {"grad_norm": self.scalar, "grad_norm.clip": self.scalar}
        self._run("grad_norm", every, Phase.UPDATE, Module.OPTIMIZER, -1, outputs)
        for group, module, layer in groups(self.model):
            self._update_group(group, module, layer)

    def _embed_forward(self) -> str:
        inputs = [("tokens", "tokens"), *self._weights(Module.EMBED, -1)]
        out = self._run("embed.fwd", inputs, Phase.FWD, Module.EMBED, -1, {"out": self.partial}, drain=True)
        return self._reduce(out[0], None, Phase.FWD, Module.EMBED, -1)

    def _backward_op(self, module: Module, layer: int, inputs: Sequence[tuple[str, str]]) -> str:
        outputs = {"dx": self.partial}
        outputs |= {f"dw.{leaf.name}": self._dw_spec(leaf) for leaf in gradient_leaves(module, self.model, self.tp)}
        return self._run(f"{module}.bwd", inputs, Phase.BWD, module, layer, outputs)[0]

    def _update_group(self, group: str, module: Module, layer: int) -> None:
        names = [leaf.name for leaf in leaves(module, self.model, self.tp)]
        inputs = [("step", "step"), ("clip", "update.optimizer.grad_norm.clip"), *self._gradients(group, module)]
        outputs = []
        for kind, dtype in self._kinds():
            tensor = {"master": "param", "mu": "moment.mu", "nu": "moment.nu", "copy": "param.copy"}[kind]
            for name in names:
                slot = f"{kind}.{group}.{name}"
                if kind != "copy":
                    inputs.append((f"{tensor}.{name}", slot))
                spec = TensorSpec(self.slots[slot].shape, dtype)
                outputs.append((slot, spec, Phase.UPDATE, module, layer, f"{tensor}.{name}"))
        self._append(f"{module}.update", inputs, outputs)
        op = self.ops[-1]
        self.initial.append(
            Op(len(self.initial), "initial", (), (), op.outputs, op.sites, replayable=False),
        )

    def _gradients(self, group: str, module: Module) -> list[tuple[str, str]]:
        """(name, slot) of a group's gradients in leaf order; tied: the head's, then the embedding's own."""
        found = []
        for leaf in leaves(module, self.model, self.tp):
            if module is Module.EMBED and self.model.tied:
                found.append((f"dw.head.{leaf.name}", f"bwd.head.dw.{leaf.name}"))
            kind = "reduced" if leaf.split is None else "dw"
            found.append((f"{kind}.{leaf.name}", f"bwd.{group}.{kind}.{leaf.name}"))
        return found

    def _reduce(self, partial: str, residual: str | None, phase: Phase, module: Module, layer: int) -> str:
        inputs = [("partial", partial)] + ([("residual", residual)] if residual else [])
        program = "reduce" if residual else "reduce0"
        return self._run(program, inputs, phase, module, layer, {"reduced": self.sharded})[0]

    def _input_of(self, module: Module, layer: int) -> str:
        """Slot of the synchronised input of a layer's submodule."""
        if module is Module.FFN:
            return f"fwd.attn.{layer}.reduced"
        return f"fwd.ffn.{layer - 1}.reduced" if layer else "fwd.embed.reduced"

    def _weights(self, module: Module, layer: int) -> list[tuple[str, str]]:
        kind = "master" if self.compute == "float32" else "copy"
        found = [(leaf.name, f"{kind}.{group_of(module, layer)}.{leaf.name}") for leaf in self._leaves(module)]
        if module is Module.HEAD and self.model.tied:
            found.append(("embedding", f"{kind}.embed.embedding"))
        return found

    def _leaves(self, module: Module) -> tuple[Leaf, ...]:
        return leaves(module, self.model, self.tp)

    def _dw_spec(self, leaf: Leaf) -> TensorSpec:
        return TensorSpec(leaf.shape, "float32" if leaf.split is None else self.compute)

    def _kinds(self) -> list[tuple[str, str]]:
        kinds = [("master", "float32"), ("mu", "float32"), ("nu", "float32")]
        return kinds if self.compute == "float32" else [*kinds, ("copy", self.compute)]

    def _run(
        self,
        program: str,
        inputs: Sequence[tuple[str, str]],
        phase: Phase,
        module: Module,
        layer: int,
        outputs: dict[str, TensorSpec],
        drain: bool = False,
    ) -> tuple[str, ...]:
        """Append an op whose outputs are sites of one module; the slots that it writes."""
        group = group_of(module, layer)
        written = [(f"{phase}.{group}.{t}", spec, phase, module, layer, t) for t, spec in outputs.items()]
        return self._append(program, inputs, written, drain=drain)

    def _append(
        self,
        program: str,
        inputs: Sequence[tuple[str, str]],
        outputs: Sequence[tuple[str, TensorSpec, Phase, Module, int, str]],
        drain: bool = False,
    ) -> tuple[str, ...]:
        sites = []
        for slot, spec, phase, module, layer, tensor in outputs:
            self.slots[slot] = spec
            sites.append(Site(self.number, phase, module, layer, tensor, spec.shape, spec.dtype))
            self.number += 1
        slots = tuple(output[0] for output in outputs)
        names = tuple(name for name, _ in inputs)
        read = tuple(slot for _, slot in inputs)
        self.ops.append(Op(len(self.ops), program, read, names, slots, tuple(sites), drain=drain))
        return slots
