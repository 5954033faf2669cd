"""What a training session is made with besides what every session is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.vocabulary import Arm
from tandem_worker.drift.checkpoints import Store
from tandem_worker.model.init import Slots


class Evaluation(Protocol):
    """Called on each side with its own parameters: what fine-tuning asks of them. Must leave the slots as they are."""

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step, beside the last one; alike on both sides."""

    def evaluate(self, arm: Arm, step: int, state: Mapping[str, Any]) -> None:
        """Evaluate an arm's persistent slots after a step.

        The suspect's side is given `Arm.SUSPECT` and sends what it finds by frames of its own.
        """


class NoEvaluation:
    """Training asks no questions."""

    def due(self, step: int) -> bool:  # noqa: ARG002
        return False

    def evaluate(self, arm: Arm, step: int, state: Mapping[str, Any]) -> None:
        """Nothing."""


@dataclass(frozen=True)
class DriftParts:
    """Of one side."""

    fresh: Callable[[int], Slots]
    """The persistent slots at step 0 for a seed; where the weights are given, the same for each."""
    store: Store | None = None
    evaluation: Evaluation = field(default_factory=NoEvaluation)
