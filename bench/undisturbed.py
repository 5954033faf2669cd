"""The undisturbed training step, which every comparison of whole steps is held against: what one would train with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.turns import State, Step
from tandem.spec import ModelConfig, Training
from tandem.vocabulary import Workload

Inputs = Callable[[int, Any], State]
"""A step's tokens and targets, by its number and the mesh."""


def inputs_of(model: ModelConfig, shape: Training) -> Inputs:
    """The same data for every kind of step."""
    from tandem_worker.data import open_data
    from tandem_worker.model.init import step_inputs

    data = open_data([], None, seed=0, batch=shape.batch, sequence=shape.sequence, vocab=model.vocab)
    return lambda step, mesh: step_inputs(*data.batch(step), step, mesh)


def undisturbed(model: ModelConfig, shape: Training, tp: int, inputs: Inputs) -> tuple[Step, Callable[[int], State]]:
    """One program without digests, which keeps nothing beside the next state and writes it over the last one (donated).

    Returns:
        The step, and what makes a state of a seed.
    """
    from tandem_worker.model.init import random_parameters
    from tandem_worker.model.whole import STEP
    from tandem_worker.model.whole_build import build_whole

    chain = build_whole(model, shape, tp, Workload.TRAINING, digests=False)
    (op,) = chain.plan.ops

    def step(state: State, number: int) -> State:
        slots = state | inputs(number, chain.mesh)
        outputs, _, _ = chain.programs[STEP]([slots[slot] for slot in op.inputs])
        return {s: v for s, v in zip(op.outputs, outputs, strict=True) if s in chain.plan.persistent}

    return step, lambda seed: random_parameters(chain.plan, model, chain.mesh, seed)
