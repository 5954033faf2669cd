"""What a training session is made with besides what every session is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem_worker.drift.checkpoints import Store
from tandem_worker.model.init import Slots
from tandem_worker.questions.evaluation import Scored


class Evaluation(Protocol):
    """Called on each side with its own parameters: what fine-tuning asks of them. Must leave the slots as they are."""

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step, beside the last one; alike on both sides."""

    @property
    def count(self) -> int:
        """How many questions there are."""

    def evaluate(self, state: Mapping[str, Any]) -> Sequence[Scored]:
        """Answer every question with these persistent slots."""

    def told(self, scores: Sequence[Sequence[float]]) -> Sequence[Scored] | None:
        """The questions with the scores that the suspect sent; None if these are not one for each choice."""


class NoEvaluation:
    """Training asks no questions."""

    def due(self, step: int) -> bool:  # noqa: ARG002
        return False

    count = 0

    def evaluate(self, state: Mapping[str, Any]) -> Sequence[Scored]:  # noqa: ARG002
        return ()

    def told(self, scores: Sequence[Sequence[float]]) -> Sequence[Scored] | None:
        return None if scores else ()


@dataclass(frozen=True)
class DriftParts:
    """Of one side."""

    fresh: Callable[[int], Slots]
    """The persistent slots at step 0 for a seed; where the weights are given, the same for each."""
    store: Store | None = None
    evaluation: Evaluation = field(default_factory=NoEvaluation)
