"""What fine-tuning asks of a training session: answers to the held-out questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tandem_worker.lockstep.machine import Machine
from tandem_worker.model.init import step_inputs
from tandem_worker.model.whole import SCORE
from tandem_worker.questions.evaluation import Evaluation, Scored, choose


class HeldOut:
    """Answers with the parameters that it is given, on the machine's own devices.

    No fault is injected here: what a synthetic run shows is what its training did to the parameters.

    Args:
        machine: of a fine-tuning build; its slots stay as they are.
        questions: in batches of the training's shape.
        every: steps between evaluations; 0: only at the end.
    """

    def __init__(self, machine: Machine, questions: Evaluation, every: int = 0) -> None:
        self.machine, self.questions, self.every = machine, questions, every

    @property
    def count(self) -> int:
        return len(self.questions.questions)

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def evaluate(self, state: Mapping[str, Any]) -> list[Scored]:
        """Every question with the score of each choice; ``state``: the persistent slots."""
        chain = self.machine.chain
        op, program = chain.extra[SCORE], chain.programs[SCORE]

        def batches() -> Iterator[np.ndarray]:
            for number in range(self.questions.batches):
                inputs = step_inputs(*self.questions.batch(number), 0, chain.mesh)
                outputs, _, _ = program([inputs[slot] if slot in inputs else state[slot] for slot in op.inputs])
                yield self.machine.shard(outputs[0], 0)
                self.machine.touch()

        return self.questions.scored(batches())

    def told(self, scores: Sequence[Sequence[float]]) -> list[Scored] | None:
        """The questions with scores that the suspect sent; None if these are not one for each choice."""
        asked = self.questions.questions
        if [len(q.choices) for q in asked] != [len(given) for given in scores]:
            return None
        return [
            Scored(q.question.task, q.question.id, list(given), choose(given), q.question.answer)
            for q, given in zip(asked, scores, strict=True)
        ]
