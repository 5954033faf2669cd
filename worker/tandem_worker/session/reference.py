"""The reference's session: leads the attempt and writes its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.errors import LinkError, ParityError
from tandem.records import FaultRecord, StepRecord
from tandem.vocabulary import ControlName, Role, SyncMode
from tandem_worker import parity
from tandem_worker.chain import Op
from tandem_worker.link import frames as f
from tandem_worker.link.channel import Channel
from tandem_worker.link.state import Progress
from tandem_worker.link.words import printable
from tandem_worker.lockstep import controls
from tandem_worker.lockstep.inbox import Inbox
from tandem_worker.lockstep.ledger import Ledger
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.reference import Reference
from tandem_worker.lockstep.whole import WholeReference
from tandem_worker.model.whole import GRAD_NORM, LOSS
from tandem_worker.session.common import Prepared, Session

REFUSAL_S = 5.0
"""How long the reason of a refusal may take to arrive."""


@dataclass(frozen=True)
class Hooks:
    """What the reference's session tells its surroundings, and how it knows when to stop."""

    progress: Callable[[str], None]
    """Called with a phase (``handshake``, ``controls``, ``step`` ...) whenever something changed."""
    schedule: Callable[[int], SyncMode]
    """Sync mode of a step."""
    counters: Callable[[], int]
    """Bytes on the link so far, both ways."""


class ReferenceSession(Session):
    """Leads the attempt and writes its rows."""

    def __init__(
        self, prepared: Prepared, channel: Channel, inbox: Inbox, progress: Progress, ledger: Ledger, hooks: Hooks
    ) -> None:
        super().__init__(prepared, channel, inbox, progress)
        self.ledger, self.hooks = ledger, hooks
        self.started: float | None = None
        self.side = self.reference = self._engine()(
            self.machine, channel, inbox, progress, prepared.settings, time.monotonic
        )
        self.reference.ledger = ledger
        self.devices: list[str] = []
        """Names of the suspect's devices, as it says."""
        self.suspect_node = ""
        """Where the suspect runs, in a cluster, as it says."""
        self._full_bytes = (
            2 * self.plan.tp * sum(self.machine.spec(s).nbytes for op in self.plan.ops for s in op.outputs)
        )

    def _engine(self) -> type[Reference]:
        return Reference if self.machine.chain.submodules is self.plan else WholeReference

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
        ledger = self.ledger
        self.channel.send(
            f.Close(reason=reason, steps=ledger.total.steps, findings=ledger.findings, failed=ledger.control_failed)
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
        self.devices = [printable(device) for device in hello.devices]
        self.suspect_node = printable(hello.node)
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
        self.channel.send(f.Welcome(version=mine["tandem"]))
        own = controls.known_reduction(self.machine, self.seed)
        frame, _ = self.reference.expect(f.KnownReduction, lambda _: True)
        same = frame.lanes == own
        detail: dict[str, Any] = {"suspect_node": self.suspect_node} if hello.node else {}
        self.ledger.control(ControlName.KNOWN_REDUCTION, Role.SUSPECT, 0, "", same, **detail)
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
        original = [self.machine.shard(execution.outputs[output], rank) for rank in range(self.plan.tp)]
        self._control(step, name, execution, output, original)

    def _control(
        self, step: int, name: ControlName, execution: Execution, output: int, original: Sequence[np.ndarray]
    ) -> None:
        """``original``: per rank what the suspect copied before it flipped the bit."""
        site = execution.op.sites[output]
        agrees = controls.digest_agrees(self.machine, execution, output)
        self.ledger.control(name, Role.REFERENCE, step, "digest", agrees, site=str(site))
        for rank in range(self.plan.tp):
            told, _ = self.reference.expect(f.PositiveControl, lambda x: x.step == step)
            frame, received = self.reference.expect(f.Tensor, lambda x: x.purpose == "control")
            if told.rank != rank or frame.rank != rank:
                raise LinkError("protocol", f"the positive control of rank {rank} came as that of rank {told.rank}")
            own = original[rank]
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
        self.channel.send(f.Begin(step=step, sync=sync))
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
            self._check_log(step, entries)

    def _check_log(self, step: int, entries: Sequence[f.FaultEntry]) -> None:
        # Per program an entry per output, one of its operand, one of its kept inputs.
        most = self.plan.tp * sum(len(op.sites) + 2 for op in self._fault_ops(step))
        places = {(e.op, e.output, e.rank, e.level) for e in entries}
        if not self.machine.chain.synthetic or len(entries) > most or len(places) < len(entries):
            raise LinkError("protocol", "the suspect's fault log is not one of this step")

    def _fault_ops(self, step: int) -> Sequence[Op]:
        """What a fault log's numbers mean: in a whole-step workload the submodules inside the step."""
        return self.machine.chain.submodules.ops if step else self.plan.initial

    def _store_fault(self, step: int, entry: f.FaultEntry) -> None:
        ops = self._fault_ops(step)
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
