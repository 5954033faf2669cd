"""The whole step as one program: the chain's submodules composed, without a comparison between them. Pure.

Gradient, training and fine-tuning runs compare what a step makes: every gradient leaf (gradient only), the loss, the
gradient norm, every updated parameter and moment. The program is the chain's own bodies, one after another, so that
both kinds of workload compute the same mathematics and one fault profile acts in both.

Slots: ``grad.<group>.<leaf>`` for a gradient leaf, a tied embedding's two gradients added; the others as in the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.sites import Site
from tandem.spec import ModelConfig
from tandem.vocabulary import Module, Phase, Workload
from tandem_worker.chain import Op, Plan, TensorSpec
from tandem_worker.model.layout import groups, leaves
from tandem_worker.model.plan import group_of

STEP = "step"
"""Name of the program."""
LOSS, GRAD_NORM = "fwd.head.reduced.loss", "update.optimizer.grad_norm"
_GRADIENT = "grad"


@dataclass(frozen=True, slots=True)
class Sum:
    """A gradient leaf and the chain's slots that it is the sum of (two for a tied embedding, else one)."""

    slot: str
    parts: tuple[str, ...]


def make_whole_plan(chain: Plan, model: ModelConfig, workload: Workload) -> Plan:
    """One op per step. Site numbers follow the outputs: the loss, gradients, their norm, then parameters and moments.

    Args:
        chain: the submodule chain of the same model and shape.
        model: the decoder.
        workload: with ``gradient`` the gradient leaves are outputs, else they never leave the program.
    """
    slots = {slot: spec for slot, spec in chain.slots.items() if slot in chain.persistent or slot in chain.step_inputs}
    sites: list[Site] = []
    outputs: list[str] = []

    def add(slot: str, spec: TensorSpec, phase: Phase, module: Module, layer: int, tensor: str) -> None:
        slots[slot] = spec
        sites.append(Site(len(sites), phase, module, layer, tensor, spec.shape, spec.dtype))
        outputs.append(slot)

    def take(wanted: Callable[[str, Site], bool]) -> None:
        for op in chain.ops:
            for slot, site in zip(op.outputs, op.sites, strict=True):
                if wanted(slot, site):
                    add(slot, chain.slots[slot], site.phase, site.module, site.layer, site.tensor)

    take(lambda slot, _: slot == LOSS)
    if workload is Workload.GRADIENT:
        for group, module, layer in groups(model):
            for leaf in leaves(module, model, chain.tp):
                parts = gradient_sum(model, group, leaf.name, leaf.split is None).parts
                dtype = "float32" if len(parts) > 1 else chain.slots[parts[0]].dtype
                spec = TensorSpec(leaf.shape, dtype)
                add(f"{_GRADIENT}.{group}.{leaf.name}", spec, Phase.BWD, module, layer, f"dw.{leaf.name}")
    take(lambda slot, site: site.family == "grad_norm" or slot in chain.persistent)
    inputs = (*chain.step_inputs, *(slot for slot in chain.slots if slot in chain.persistent))
    op = Op(0, STEP, inputs, inputs, tuple(outputs), tuple(sites), drain=True)
    return Plan((op,), _initial(chain, op), slots, chain.persistent, chain.step_inputs, chain.tp)


def _initial(chain: Plan, step: Op) -> tuple[Op, ...]:
    """Step 0 compares the parameters under the numbers that the step's own outputs have."""
    sites = dict(zip(step.outputs, step.sites, strict=True))
    return tuple(
        Op(op.index, op.program, (), (), op.outputs, tuple(sites[slot] for slot in op.outputs), replayable=False)
        for op in chain.initial
    )


def gradient_sums(model: ModelConfig, tp: int) -> list[Sum]:
    """Every gradient leaf of the model, in the order of the groups."""
    return [
        gradient_sum(model, group, leaf.name, leaf.split is None)
        for group, module, _ in groups(model)
        for leaf in leaves(module, model, tp)
    ]


def gradient_sum(model: ModelConfig, group: str, leaf: str, replicated: bool) -> Sum:
    """Where the chain leaves the gradient of one leaf."""
    slot = f"{_GRADIENT}.{group}.{leaf}"
    if replicated:
        return Sum(slot, (f"bwd.{group}.reduced.{leaf}",))
    own = f"bwd.{group}.dw.{leaf}"
    if group == Module.EMBED and model.tied:
        return Sum(slot, (f"bwd.head.dw.{leaf}", own))
    return Sum(slot, (own,))


def leaf_of(site: Site) -> str:
    """``<group>.<leaf>`` of a gradient, parameter or moment site: ``attn.3.wq``."""
    return f"{group_of(site.module, site.layer)}.{site.tensor.rsplit('.', 1)[-1]}"


def is_replicated(site: Site) -> bool:
    """Whether every rank holds the same leaf: the norms' weights (`tandem_worker.model.layout`)."""
    return site.tensor.rsplit(".", 1)[-1] == "norm"
