"""A decision in the making: the status as it will be written, and what will be done then. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.pairrun.status import AttemptStatus, PairRunStatus, set_condition
from tandem_controller.observed import Action, Decision, Event, Observed


@dataclass
class Draft:
    """A decision in the making."""

    o: Observed
    status: PairRunStatus
    actions: list[Action] = field(default_factory=list)
    requeue: float | None = None

    def set(self, **values: object) -> None:
        self.status = self.status.model_copy(update=values)

    def condition(self, kind: str, status: bool | None, reason: str, message: str) -> None:
        self.set(
            conditions=set_condition(
                self.status.conditions, kind, status, reason, message, self.o.now, self.o.generation
            )
        )

    def do(self, *actions: Action) -> None:
        self.actions += actions

    def again(self, after: float) -> None:
        self.requeue = after if self.requeue is None else min(self.requeue, after)

    def decision(self) -> Decision:
        self.set(observed_generation=self.o.generation, run_id=str(self.o.run_id))
        actions = sorted(self.actions, key=lambda action: isinstance(action, Event))  # people can wait, pods cannot
        return Decision(self.status, tuple(actions), self.requeue)

    @property
    def current(self) -> AttemptStatus | None:
        """The newest attempt, if it has not ended."""
        last = self.status.attempts[-1] if self.status.attempts else None
        return last if last is not None and last.ended_at is None else None

    def replace_last(self, attempt: AttemptStatus) -> None:
        self.set(attempts=[*self.status.attempts[:-1], attempt])
