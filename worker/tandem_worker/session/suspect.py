"""The suspect's session: follows what the reference's frames say."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tandem.errors import LinkError
from tandem.vocabulary import Role, SyncMode
from tandem_worker.devices import device_names
from tandem_worker.link import frames as f
from tandem_worker.link.channel import Channel
from tandem_worker.link.state import Activity, Progress
from tandem_worker.lockstep import controls
from tandem_worker.lockstep.inbox import Inbox
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.suspect import Suspect
from tandem_worker.lockstep.transfer import send_value
from tandem_worker.model.whole import GRAD_NORM, LOSS
from tandem_worker.session.common import Prepared, Session

FAULTS_PER_FRAME = 2000
"""Entries of one FaultLog frame: stays far below the largest frame."""


class SuspectSession(Session):
    """Follows the reference."""

    def __init__(self, prepared: Prepared, channel: Channel, inbox: Inbox, progress: Progress, node: str = "") -> None:
        super().__init__(prepared, channel, inbox, progress)
        self.node = node
        """Where it runs, in a cluster."""
        self.side = self.suspect = self._engine()(
            self.machine, channel, inbox, progress, prepared.settings, time.monotonic
        )

    def _engine(self) -> type[Suspect]:
        return Suspect

    def run(self) -> f.Close:
        """Run the attempt; returns the reference's closing frame.

        Raises:
            PairError: parity, link or protocol ended it early.
        """
        self._shake_hands()
        self._report_self_replay(1, "start")
        last = 0
        while True:
            with self.progress.waiting("begin"):
                frame, _ = self.suspect.expect_any(f.Begin, f.Finish, f.Close)
            match frame:
                case f.Begin(step=step, sync=sync):
                    self._step(step, sync)
                    last = step
                    if step == 1:
                        self._positive_control(step)
                case f.Finish() if last:
                    self._positive_control(last)
                    self._report_self_replay(last, "end")
                case f.Finish():
                    pass  # nothing was compared; the reference expects no controls of it
                case f.Close():
                    self.channel.send(f.Bye(reason=frame.reason))
                    return frame

    def _shake_hands(self) -> None:
        self.channel.send(
            f.Hello(
                role=Role.SUSPECT,
                version=self.prepared.parity["tandem"],
                parity=self.prepared.parity,
                devices=device_names(self.machine.chain.mesh.devices.flat),
                node=self.node,
            )
        )
        with self.progress.waiting("handshake"):
            frame, _ = self.suspect.expect_any(f.Welcome, f.Refuse)
        if isinstance(frame, f.Refuse):
            raise LinkError(f"{frame.reason}:{frame.field}" if frame.field else frame.reason, frame.message)
        self.channel.send(f.KnownReduction(lanes=controls.known_reduction(self.machine, self.seed)))

    def _report_self_replay(self, step: int, when: str) -> None:
        for result in self.self_replay(max(step, 1), when):
            self.channel.send(
                f.SelfReplay(
                    when="start" if when == "start" else "end", program=result.program,
                    repeats=result.repeats, equal=result.equal, lanes=result.lanes.astype("<u4").tobytes(),
                )
            )  # fmt: skip

    def _step(self, step: int, sync: SyncMode) -> None:
        if step:
            self.load(step)
        self.channel.send(f.Ready(step=step))
        self.progress.begin_step(step)
        started, self.suspect.waited_s = time.monotonic(), 0.0
        self.suspect.step(step, sync, self.ops(step))
        busy = time.monotonic() - started - self.suspect.waited_s
        self._send_faults(step, self.suspect.faults)
        if self.inbox.stop_reason is not None:
            self.channel.send(f.Stop(reason=self.inbox.stop_reason))
        self.channel.send(
            f.StepDone(
                step=step, loss=self.scalar(LOSS),
                grad_norm=self.scalar(GRAD_NORM), busy_s=max(busy, 0.0),
            )
        )  # fmt: skip
        self.progress.end_step(busy)

    def _send_faults(self, step: int, entries: Sequence[f.FaultEntry]) -> None:
        for i in range(0, len(entries), FAULTS_PER_FRAME):
            self.channel.send(f.FaultLog(step=step, entries=list(entries[i : i + FAULTS_PER_FRAME])))

    def _positive_control(self, step: int) -> None:
        """Send a copy of one stored site per rank with one bit flipped."""
        execution = self.suspect.kept
        if execution is None:
            return  # the reference notices: its own is missing too, or the control never arrives
        array = execution.outputs[self.control_output]
        self._control(
            step, execution, self.control_output, [self.machine.shard(array, rank) for rank in range(self.plan.tp)]
        )

    def _control(self, step: int, execution: Execution, output: int, original: Sequence[np.ndarray]) -> None:
        """Send a copy of each rank's tensor with one bit flipped."""
        with self.progress.during(Activity.REPLAYING, "positive control"):
            agrees = controls.digest_agrees(self.machine, execution, output)
            slot = execution.op.outputs[output]
            for rank, value in enumerate(original):
                element, bit = controls.control_bit(
                    self.seed, self.prepared.attempt, step, rank, value.size, 8 * value.dtype.itemsize
                )
                copy = controls.flipped_copy(value, element, bit)
                self.channel.send(
                    f.PositiveControl(
                        step=step, op=execution.op.index, output=output, rank=rank, digest_ok=agrees
                    )
                )  # fmt: skip
                send_value(
                    self.suspect, execution, "control", output, rank, copy, self.machine.digest_value(slot, copy)
                )
