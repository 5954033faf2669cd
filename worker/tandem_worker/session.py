"""One attempt from a worker's point of view: prepare, shake hands, step, control, close.

`ReferenceSession` leads; `SuspectSession` follows what the reference's frames say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.errors import LinkError, ParityError
from tandem.records import FaultRecord, StepRecord
from tandem.spec import RunSpec
from tandem.vocabulary import ControlName, Role, SyncMode
from tandem_worker import parity
from tandem_worker.chain import Op
from tandem_worker.data import TokenStream
from tandem_worker.link import frames as f
from tandem_worker.link.channel import Channel
from tandem_worker.link.state import Activity, Progress
from tandem_worker.lockstep import controls
from tandem_worker.lockstep.inbox import Inbox
from tandem_worker.lockstep.ledger import Ledger
from tandem_worker.lockstep.machine import Execution, Machine
from tandem_worker.lockstep.reference import Reference
from tandem_worker.lockstep.side import Settings, Side
from tandem_worker.lockstep.suspect import Suspect
from tandem_worker.lockstep.transfer import send_value
from tandem_worker.model.init import step_inputs

LOSS, GRAD_NORM = "fwd.head.reduced.loss", "update.optimizer.grad_norm"
REFUSAL_S = 5.0
"""How long the reason of a refusal may take to arrive."""
FAULTS_PER_FRAME = 2000
"""Entries of one FaultLog frame: stays far below the largest frame."""


@dataclass(frozen=True)
class Prepared:
    """A worker that is ready for the handshake."""

    spec: RunSpec
    machine: Machine
    data: TokenStream
    parity: dict[str, str]
    steps: int | None
    attempt: int

    @property
    def settings(self) -> Settings:
        spec = self.spec
        return Settings(
            window=spec.window, replays=spec.replays, replay_budget=spec.replay_budget,
            self_replays=spec.self_replays, seed=spec.seed, row_cap=spec.row_cap,
        )  # fmt: skip


class _Session:
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


class SuspectSession(_Session):
    """Follows the reference."""

    def __init__(self, prepared: Prepared, channel: Channel, inbox: Inbox, progress: Progress) -> None:
        super().__init__(prepared, channel, inbox, progress)
        self.side = self.suspect = Suspect(self.machine, channel, inbox, progress, prepared.settings, time.monotonic)

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
                devices=[str(device) for device in self.machine.chain.mesh.devices.flat],
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
        entries = self.suspect.faults
        for i in range(0, len(entries), FAULTS_PER_FRAME):
            self.channel.send(f.FaultLog(step=step, entries=entries[i : i + FAULTS_PER_FRAME]))
        self.channel.send(
            f.StepDone(
                step=step, loss=self.scalar(LOSS),
                grad_norm=self.scalar(GRAD_NORM), busy_s=max(busy, 0.0),
            )
        )  # fmt: skip
        self.progress.end_step(busy)

    def _positive_control(self, step: int) -> None:
        """Send a copy of one stored site per rank with one bit flipped."""
        execution = self.suspect.kept
        if execution is None:
            return  # the reference notices: its own is missing too, or the control never arrives
        with self.progress.during(Activity.REPLAYING, "positive control"):
            output = self.control_output
            agrees = controls.digest_agrees(self.machine, execution, output)
            slot, array = execution.op.outputs[output], execution.outputs[output]
            for rank in range(self.plan.tp):
                value = self.machine.shard(array, rank)
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


@dataclass(frozen=True)
class Hooks:
    """What the reference's session tells its surroundings, and how it knows when to stop."""

    progress: Callable[[str], None]
    """Called with a phase (``handshake``, ``controls``, ``step`` ...) whenever something changed."""
    schedule: Callable[[int], SyncMode]
    """Sync mode of a step."""
    counters: Callable[[], int]
    """Bytes on the link so far, both ways."""


class ReferenceSession(_Session):
    """Leads the attempt and writes its rows."""

    def __init__(
        self, prepared: Prepared, channel: Channel, inbox: Inbox, progress: Progress, ledger: Ledger, hooks: Hooks
    ) -> None:
        super().__init__(prepared, channel, inbox, progress)
        self.ledger, self.hooks = ledger, hooks
        self.started: float | None = None
        self.side = self.reference = Reference(
            self.machine, channel, inbox, progress, prepared.settings, time.monotonic
        )
        self.reference.ledger = ledger
        self.devices: list[str] = []
        """Names of the suspect's devices, as it says."""
        self._full_bytes = (
            2 * self.plan.tp * sum(self.machine.spec(s).nbytes for op in self.plan.ops for s in op.outputs)
        )

    def run(self) -> str:
        """Run the attempt up to its end controls; returns ``completed`` or why it was asked to stop.

        Raises:
            PairError: parity, link or protocol ended it early, with what is known already written.
        """
        self.hooks.progress("handshake")
        self._shake_hands()
        self.hooks.progress("controls")
        self._record_self_replay(1, "start")
        self._step(0)
        reason, step, self.started = "completed", 0, time.monotonic()
        while not self._done(step):
            step += 1
            self._step(step)
            if step == 1:
                self._positive_control(step, ControlName.POSITIVE_START)
            self.hooks.progress("step")
        if self.inbox.stop_reason is not None:
            reason = self.inbox.stop_reason
        self.hooks.progress("controls")
        self.channel.send(f.Finish())
        if step:
            self._positive_control(step, ControlName.POSITIVE_END)
            self._record_self_replay(step, "end")
        return reason

    def close(self, reason: str) -> None:
        """Tell the suspect that the attempt is over."""
        self.channel.send(
            f.Close(reason=reason, steps=self.ledger.total.steps, mismatches=self.ledger.total.rows_total)
        )

    @property
    def steps_per_s(self) -> float | None:
        """Of the steps so far; None before the first."""
        done = self.ledger.total.steps - 1
        return done / (time.monotonic() - self.started) if self.started is not None and done > 0 else None

    def _done(self, step: int) -> bool:
        spec = self.prepared.spec
        self.reference.pump_all()
        if self.inbox.stop_reason is not None:
            return True
        if spec.duration is not None and time.monotonic() - (self.started or 0.0) >= spec.duration:
            return True
        return self.prepared.steps is not None and step >= self.prepared.steps

    # -- handshake -------------------------------------------------------------------------------

    def _shake_hands(self) -> None:
        with self.progress.waiting("handshake"):
            hello, _ = self.reference.expect(f.Hello, lambda _: True)
        self.devices = [f.printable(device) for device in hello.devices]
        mine, theirs = self.prepared.parity, hello.parity
        for name in dict.fromkeys([*mine, *theirs]):
            same = name in mine and mine[name] == theirs.get(name)
            self.ledger.control(
                ControlName.PARITY, Role.SUSPECT, 0, name, same,
                reference=mine.get(name, "(absent)"), suspect=theirs.get(name, "(absent)"),
            )  # fmt: skip
        field = parity.first_difference(mine, theirs)
        if field is not None:
            error = ParityError(field, mine.get(field, "(absent)"), theirs.get(field, "(absent)"))
            self._refuse(f.Refuse(reason="parity", field=field, message=str(error)))
            raise error
        self.channel.send(f.Welcome(parity={}, version=mine["tandem"]))
        own = controls.known_reduction(self.machine, self.seed)
        frame, _ = self.reference.expect(f.KnownReduction, lambda _: True)
        same = frame.lanes == own
        self.ledger.control(ControlName.KNOWN_REDUCTION, Role.SUSPECT, 0, "", same)
        if not same:
            message = "the sides add the ranks' known values to different bits: their collectives run in another order"
            self._refuse(f.Refuse(reason="collective_order", field="", message=message))
            raise LinkError("collective_order", message)

    def _refuse(self, frame: f.Refuse) -> None:
        """Give the reason time to arrive: the goodbye that follows may overtake it."""
        self.channel.send(frame)
        self.channel.drained(REFUSAL_S)

    # -- controls --------------------------------------------------------------------------------

    def _record_self_replay(self, step: int, when: str) -> None:
        name = ControlName.SELF_REPLAY_START if when == "start" else ControlName.SELF_REPLAY_END
        own = self.self_replay(max(step, 1), when)
        known = {result.program for result in own}
        for result in own:
            self.ledger.control(name, Role.REFERENCE, step, result.program, result.equal, repeats=result.repeats)
        for _ in own:
            frame, _ = self.reference.expect(f.SelfReplay, lambda x: x.when == when)
            if frame.repeats != self.prepared.spec.self_replays or frame.program not in known:
                raise LinkError("protocol", "the suspect's self-replay is not the one that was asked for")
            known.remove(frame.program)
            self.ledger.control(name, Role.SUSPECT, step, frame.program, frame.equal, repeats=frame.repeats)

    def _positive_control(self, step: int, name: ControlName) -> None:
        """Feed the suspect's corrupted copies to the ordinary comparator: it must report exactly the flipped bit."""
        execution, output = self.reference.kept, self.control_output
        if execution is None:
            return  # nothing was compared; the missing row makes the run inconclusive
        site = execution.op.sites[output]
        agrees = controls.digest_agrees(self.machine, execution, output)
        self.ledger.control(name, Role.REFERENCE, step, "digest", agrees, site=str(site))
        for rank in range(self.plan.tp):
            told, _ = self.reference.expect(f.PositiveControl, lambda x: x.step == step)
            frame, received = self.reference.expect(f.Tensor, lambda x: x.purpose == "control")
            if told.rank != rank or frame.rank != rank:
                raise LinkError("protocol", f"the positive control of rank {rank} came as that of rank {told.rank}")
            own = self.machine.shard(execution.outputs[output], rank)
            element, bit = controls.control_bit(
                self.seed, self.prepared.attempt, step, rank, own.size, 8 * own.dtype.itemsize
            )
            detail: dict[str, Any] = {"site": str(site), "element": element, "bit": bit}
            ok = False
            if received is None or received.shape != own.shape or received.dtype != own.dtype:
                detail["reported"] = "a tensor of another shape or dtype"
            elif self.machine.digest_value(execution.op.outputs[output], received) != frame.digest:
                detail["reported"] = "a tensor that arrived changed"
            elif not self._digests_differ(execution, output, rank, frame.digest):
                detail["reported"] = "equal digests"
            elif (reported := controls.reports_exactly(received, own, element, bit)) is not None:
                detail["reported"] = reported
            else:
                ok = told.digest_ok
                detail["digest_ok"] = told.digest_ok
            self.ledger.control(name, Role.SUSPECT, step, f"rank {rank}", ok, **detail)

    def _digests_differ(self, execution: Execution, output: int, rank: int, digest: bytes) -> bool:
        """Whether the comparator that decides every site sees this one digest, and no other, differ."""
        assert execution.lanes is not None
        theirs = execution.lanes.copy()
        theirs[rank, output] = np.frombuffer(digest, "<u4")
        seen = self.reference.differing(execution.lanes, theirs)
        return [tuple(place) for place in np.argwhere(seen)] == [(rank, output)]

    # -- steps -----------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        sync = self.hooks.schedule(step)
        if step:
            self.load(step)
        self.channel.send(f.Begin(step=step, sync=sync, window=self.prepared.spec.window))
        self.reference.expect(f.Ready, lambda x: x.step == step)
        self.progress.begin_step(step)
        started, self.reference.waited_s, self.reference.window_max = time.monotonic(), 0.0, 0
        before = self.hooks.counters()
        tally = self.reference.step(step, sync, self.ops(step))
        done, entries = self._end_of_step(step)
        duration = time.monotonic() - started
        for entry in entries:
            self._store_fault(step, entry)
        waited = min(self.reference.waited_s, duration)
        if step and sync is not SyncMode.NONE:
            self.ledger.total.device_seconds += duration * self.plan.tp
        self.ledger.step(
            StepRecord(
                run_id=self.ledger.run_id, attempt=self.ledger.attempt, step=step,
                classes=tally.classes(), rows=tally.rows,
                loss_reference=self.scalar(LOSS), loss_suspect=done.loss,
                grad_norm_reference=self.scalar(GRAD_NORM), grad_norm_suspect=done.grad_norm,
                duration_s=duration, busy_s=duration - waited,
                link_bytes=self.hooks.counters() - before, full_bytes=self._full_bytes if step else 0,
                window_max=self.reference.window_max, generation=self.reference.generation,
                finished_at=self.ledger.now(), sync=sync,
            )
        )  # fmt: skip
        self.progress.end_step(duration - waited)

    def _end_of_step(self, step: int) -> tuple[f.StepDone, list[f.FaultEntry]]:
        entries: list[f.FaultEntry] = []
        while True:
            frame, _ = self.reference.expect_any(f.FaultLog, f.StepDone)
            if frame.step != step:
                continue
            if isinstance(frame, f.StepDone):
                return frame, entries
            entries += frame.entries
            # Per program an entry per output, one of its operand, one of its kept inputs.
            most = self.plan.tp * sum(len(op.sites) + 2 for op in self.ops(step))
            places = {(e.op, e.output, e.rank, e.level) for e in entries}
            if not self.machine.chain.synthetic or len(entries) > most or len(places) < len(entries):
                raise LinkError("protocol", "the suspect's fault log is not one of this step")

    def _store_fault(self, step: int, entry: f.FaultEntry) -> None:
        ops = self.ops(step)
        if entry.op >= len(ops) or entry.output >= len(ops[entry.op].sites) or entry.rank >= self.plan.tp:
            raise LinkError("protocol", "the suspect's fault log names a site that does not exist")
        if entry.level == "output" and entry.changed > ops[entry.op].sites[entry.output].elements:
            raise LinkError("protocol", "the suspect's fault log changes more elements than a site has")
        self.ledger.fault(
            FaultRecord(
                run_id=self.ledger.run_id, attempt=self.ledger.attempt, step=step,
                site=ops[entry.op].sites[entry.output].number, rank=entry.rank, level=entry.level,
                changed=entry.changed, elements=entry.elements,
            )
        )  # fmt: skip
