"""Answers held-out questions with the parameters that a machine holds now, on its own devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tandem_worker.lockstep.machine import Machine
from tandem_worker.model.init import step_inputs
from tandem_worker.model.whole import SCORE
from tandem_worker.questions.evaluation import Evaluation, Scored


def answer(machine: Machine, evaluation: Evaluation) -> list[Scored]:
    """Score every choice of every question; the machine's slots stay as they are.

    No fault is injected here: what a synthetic run shows is what its training did to the parameters.

    Args:
        machine: of a fine-tuning build, with parameters in its slots.
        evaluation: in batches of the training's shape.
    """
    op, program = machine.chain.extra[SCORE], machine.chain.programs[SCORE]

    def batches() -> Iterator[np.ndarray]:
        for number in range(evaluation.batches):
            slots = machine.slots | step_inputs(*evaluation.batch(number), 0, machine.chain.mesh)
            outputs, _, _ = program([slots[slot] for slot in op.inputs])
            yield machine.shard(outputs[0], 0)
            machine.touch()

    return evaluation.scored(batches())
