"""What both sides' sessions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.spec import RunSpec
from tandem_worker.chain import Op
from tandem_worker.data import Stream
from tandem_worker.link.channel import Channel
from tandem_worker.link.state import Activity, Progress
from tandem_worker.lockstep import controls
from tandem_worker.lockstep.inbox import Inbox
from tandem_worker.lockstep.machine import Machine
from tandem_worker.lockstep.side import Settings, Side
from tandem_worker.model.init import step_inputs
from tandem_worker.model.whole import GRAD_NORM, LOSS

if TYPE_CHECKING:
    from tandem_worker.drift.parts import DriftParts


@dataclass(frozen=True)
class Prepared:
    """A worker that is ready for the handshake."""

    spec: RunSpec
    machine: Machine
    data: Stream
    parity: dict[str, str]
    steps: int | None
    attempt: int
    drift: DriftParts | None = None
    """Of training and fine-tuning."""

    @property
    def resumes(self) -> bool:
        """Whether the attempt goes on from checkpoints: as asked, or because one before it may have left some."""
        return self.spec.checkpoints is not None and (self.spec.resume or self.attempt > 1)

    @property
    def settings(self) -> Settings:
        spec = self.spec
        return Settings(
            window=spec.window, replays=spec.replays, replay_budget=spec.replay_budget,
            self_replays=spec.self_replays, seed=spec.seed, row_cap=spec.row_cap,
            exchange_bytes=spec.exchange_mib << 20,
        )  # fmt: skip


class Session:
    """What both sides' sessions share."""

    side: Side

    def __init__(self, prepared: Prepared, channel: Channel, inbox: Inbox, progress: Progress) -> None:
        self.prepared, self.channel, self.inbox, self.progress = prepared, channel, inbox, progress
        self.machine = prepared.machine
        self.plan = prepared.machine.plan
        self.seed = prepared.spec.seed

    def ops(self, step: int) -> tuple[Op, ...]:
        return self.plan.ops if step else self.plan.initial

    def load(self, step: int) -> None:
        """Clear the last step's slots and fill this one's inputs."""
        self.machine.end_step()
        tokens, targets = self.prepared.data.batch(step)
        self.machine.slots.update(step_inputs(tokens, targets, step, self.machine.chain.mesh))
        op, self.control_output = controls.control_site(self.plan, self.seed, step)
        self.side.kept_op, self.side.kept = op.index, None
        self.machine.keep |= {op.outputs[self.control_output], LOSS, GRAD_NORM}

    def self_replay(self, step: int, when: str) -> list[controls.SelfReplay]:
        first = controls.START if when == "start" else controls.END
        with self.progress.during(Activity.REPLAYING, f"self-replay at {when}"):
            if when == "start":
                self.load(1)
            return controls.self_replay(self.machine, step, self.prepared.spec.self_replays, first)

    def scalar(self, slot: str) -> float | None:
        """Value of a scalar slot on rank 0; None if the step has not computed it."""
        return float(np.asarray(self.machine.slots[slot])[0]) if slot in self.machine.slots else None
