"""The reference's session of a training run: leads, compares, measures the drift, writes the rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tandem.errors import CheckpointError, LinkError
from tandem.records import StepRecord
from tandem.vocabulary import Arm, ControlName, Role, SyncMode
from tandem_worker.drift.baseline import Baseline
from tandem_worker.drift.drifts import Drifts, parameter_bytes
from tandem_worker.drift.flight import Flight, arrived_whole, sketch_shape
from tandem_worker.drift.measure import look
from tandem_worker.drift.reference import DriftReference, Unequal
from tandem_worker.drift.room import Room
from tandem_worker.drift.saved import with_steps_left
from tandem_worker.drift.session import DriftSession
from tandem_worker.drift.sketch import Sketch
from tandem_worker.link import frames as f
from tandem_worker.lockstep.reference import Reference
from tandem_worker.model.whole import GRAD_NORM, LOSS
from tandem_worker.questions.evaluation import Scored
from tandem_worker.session.reference import ReferenceSession


class DriftReferenceSession(DriftSession, ReferenceSession):
    """Leads a pair whose sides train apart."""

    reference: DriftReference
    role = Role.REFERENCE

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reference.check_log = self._check_log
        self.reference.questions = self.parts.evaluation.count
        self.drifts = Drifts(self.ledger, self.plan)
        self.first_unequal: int | None = None
        """First step whose digests differed."""
        self._unequal: Unequal = []
        """Of the last settled step."""
        self._apart = False
        """Whether the sides began the step under way from states that differ."""
        self._theirs: np.ndarray = np.zeros(0, np.uint32)
        """The suspect's digests of that step, u32 ``[R, n, 2]``."""
        self.baseline = Baseline() if self.prepared.spec.baseline else None
        self._measured = 0
        """Last step whose drift was measured exactly."""
        self._untrusted = 0
        """Steps whose sketch could not be trusted where no exact measurement was due."""
        self._settled_at = self._link_bytes = 0.0
        self.look: Callable[[], Room] = lambda: look(self.machine.chain, 1 if self.suspect_node else 2)
        """What memory there is. Outside a cluster both sides are taken to be on one machine."""

    def _engine(self) -> type[Reference]:
        return DriftReference

    def run(self) -> str:
        """Run the attempt up to its end controls; returns ``completed`` or why it was asked to stop.

        Raises:
            PairError: parity, link or protocol ended it early, with what is known already written.
        """
        self.hooks.progress("handshake")
        self._shake_hands()
        done = self._resume() if self.prepared.resumes else 0
        self.hooks.progress("controls")
        self._record_self_replay(1, "start")
        self._step(0)
        if self.reference.loaded is not None:
            # Step 0 has told what differs in what was loaded: new differences cannot be told from that.
            self._apart = self.ledger.total.rows_total > 0
            self.reference.loaded = None
        self.started = time.monotonic()
        self._train(done)
        reason = self.inbox.stop_reason or "completed"
        self.hooks.progress("controls")
        self.channel.send(f.Finish())
        if self.last is not None:
            self._control_after(self.last, ControlName.POSITIVE_END)
            self._record_self_replay(self.last.step, "end")
            self.after(self.last, last=True)
        if self.baseline is not None and self.last is not None and self.inbox.stop_reason is None:
            self.baseline.train(self)
        return reason

    # -- resuming --------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Agree on the last checkpoint that both sides hold whole, and load the own one; its step, 0 if there is none.

        A checkpoint of the last step says nothing of what comes after it (end controls, baseline), for which a step
        must have run here: with it alone the training goes on from the one before.

        Raises:
            CheckpointError: all that both hold are damaged on one side, or the run has nothing left to do.
        """
        store = self.parts.store
        assert store is not None
        frame, _ = self.reference.expect(f.Held, lambda _: True)
        own = store.held()
        common = sorted({step for step, lineage in own if (step, lineage) in set(frame.checkpoints)}, reverse=True)
        usable = with_steps_left(common, self.prepared.steps, self.prepared.attempt)
        damaged: CheckpointError | None = None
        for step in usable:
            try:
                saved = self.restore(step)
            except CheckpointError as error:
                damaged = error
                continue
            self.channel.send(f.Restore(step=step))
            answer, _ = self.reference.expect(f.Restored, lambda _: True)
            if answer.step != step:
                raise LinkError("protocol", f"the suspect restored step {answer.step}, not {step}")
            if not answer.ok:
                damaged = CheckpointError(f"the suspect's checkpoint of step {step} is cut off or damaged")
                continue
            store.forget_after(step)
            self.reference.loaded = {slot: bytes.fromhex(value) for slot, value in saved.suspect.items()}
            self.first_unequal = saved.diverged or None
            self.ledger.control(
                ControlName.RESUMED, Role.REFERENCE, step, "", True,
                began=saved.lineage, diverged=saved.diverged, damaged=str(damaged or ""),
            )  # fmt: skip
            return step
        if damaged is not None:
            raise damaged
        self.channel.send(f.Restore(step=0))
        store.forget_own()
        why = "no checkpoint that both sides hold" + (" before the last step" if common else "")
        self.ledger.control(
            ControlName.RESUMED, Role.REFERENCE, 0, "", True, why=why, reference=[step for step, _ in own],
            suspect=[step for step, _ in frame.checkpoints],
        )  # fmt: skip
        return 0

    @property
    def diverged(self) -> int:
        return self.first_unequal or 0

    def theirs(self, flight: Flight) -> dict[str, bytes]:
        """The suspect's digests of the slots that differ after the last settled step."""
        op = flight.run.op
        return {
            op.outputs[output]: self._theirs[:, output].astype("<u4").tobytes()
            for output in sorted({output for output, _ in self._unequal})
        }

    # -- steps -----------------------------------------------------------------------------------

    def _train(self, done: int) -> None:
        """Every step after ``done``, and the exact drift of the last one."""
        engine, ahead = self.reference, self._run_ahead()
        self._settled_at, self._link_bytes = time.monotonic(), self.hooks.counters()
        step = done
        while not self._done(step):
            step += 1
            self.load(step)
            settled = self.last.step if self.last is not None else 0
            self.channel.send(f.Begin(step=step, sync=SyncMode.NONE, settled=settled))
            engine.launch(step)
            if step == done + 1:
                self._settle()
                assert self.last is not None
                self.channel.send(f.Control(step=step))
                self._control_after(self.last, ControlName.POSITIVE_START)
                self._settled_at, self._link_bytes = time.monotonic(), self.hooks.counters()
            while len(engine.pending) > ahead:
                self._settle()
            self.hooks.progress("step")
        while engine.pending:
            self._settle()
        if self.last is not None and self._unequal and self._measured < self.last.step:
            self._exact(self.last)

    def _run_ahead(self) -> int:
        """How many steps may run ahead, with what decided it stored."""
        room = self.look()
        self.ledger.control(
            ControlName.RUN_AHEAD, Role.REFERENCE, 0, "", True,
            steps=room.ahead, state_bytes=room.state, working_bytes=room.working, free_bytes=room.free,
            memory=room.source,
        )  # fmt: skip
        return room.ahead

    def _settle(self) -> None:
        """Compare and store the oldest step under way."""
        engine, started = self.reference, self._settled_at
        engine.waited_s = 0.0
        flight, report = engine.oldest()
        run, step = flight.run, flight.step
        engine.begin(step)
        assert run.lanes is not None
        theirs = np.frombuffer(report.lanes, "<u4").reshape(run.lanes.shape)
        self._theirs, self._unequal = theirs, engine.unequal(run, theirs)
        unequal = self._unequal
        if self.baseline is not None:
            self.baseline.keep(step, flight.sketch(), flight.tops())
        for entry in engine.logs.pop(step, []):
            self._store_fault(step, entry)
        if unequal:
            self._diverged(flight, report, theirs, unequal)
        self._apart = any(run.op.outputs[output] in self.plan.persistent for output, _ in unequal)
        flight.settled()
        self.last = flight
        now = time.monotonic()
        duration, counted = now - started, self.hooks.counters()
        waited = min(engine.waited_s, duration)
        self.ledger.total.device_seconds += duration * self.plan.tp
        self.ledger.step(
            StepRecord(
                run_id=self.ledger.run_id, attempt=self.ledger.attempt, step=step,
                classes=engine.tally.classes(), rows=engine.tally.rows,
                loss_reference=flight.scalar(LOSS), loss_suspect=report.loss,
                grad_norm_reference=flight.scalar(GRAD_NORM), grad_norm_suspect=report.grad_norm,
                duration_s=duration, busy_s=duration - waited,
                link_bytes=int(counted - self._link_bytes), full_bytes=self._full_bytes,
                window_max=len(engine.pending), generation=engine.generation,
                finished_at=self.ledger.now(), sync=SyncMode.NONE,
            )
        )  # fmt: skip
        self.progress.end_step(duration - waited)
        self.after(flight)
        self._settled_at, self._link_bytes = time.monotonic(), counted

    def _diverged(self, flight: Flight, report: f.Report, theirs: np.ndarray, unequal: Unequal) -> None:
        """Store how far the suspect is off after a step."""
        engine, step, spec = self.reference, flight.step, self.prepared.spec
        self.first_unequal = self.first_unequal or step
        if not self._apart:
            self.drifts.exact(Arm.SUSPECT, step, engine.first(flight.run, theirs, unequal))
            self._measured = step
        else:
            engine.count_unequal(flight.run, unequal)
        sketch = self._received(report)
        masters = {i for i, slot in enumerate(flight.run.op.outputs) if slot.startswith("master.")}
        differ = any(output in masters for output, _ in unequal)
        tops = [*report.tops, *flight.tops()]
        known = sketch is not None and self.drifts.sketched(
            Arm.SUSPECT, step, sketch, flight.sketch(), tops, differ=differ
        )
        if self._measured < step:
            if step % spec.exact_every == 0 or (not known and self._worth_it()):
                self._exact(flight)
            elif not known:
                self.drifts.unknown(Arm.SUSPECT, step, flight.sketch())
        if sketch is not None and self._measured == step:
            self.drifts.check(Arm.SUSPECT, sketch, flight.sketch(), tops)

    def _worth_it(self) -> bool:
        """Whether a sketch that cannot be trusted is made good by an exact measurement: of parameters up to
        ``exact_mib`` always, of larger ones the first, second, fourth, eighth ... time, so that it is known how far
        they are off, and whether the sketch is right all the same, at the price of few exchanges.
        """
        self._untrusted += 1
        small = parameter_bytes(self.plan) <= self.prepared.spec.exact_mib << 20
        return small or self._untrusted.bit_count() == 1

    def _received(self, report: f.Report) -> Sketch | None:
        """The suspect's sketch; None where it is not what its program stored."""
        sketch = np.frombuffer(report.sketch, "<i4").reshape(sketch_shape(self.plan.tp))
        lanes = np.frombuffer(report.sketch_lanes, "<u4").reshape(self.plan.tp, 2, 2)
        return sketch if arrived_whole(sketch, report.tops, lanes) else None

    def _exact(self, flight: Flight) -> None:
        """Measure the drift after a step, and store it whole and by parameter group."""
        self._measured = flight.step
        self.drifts.exact(Arm.SUSPECT, flight.step, self.reference.measure(flight.run, self._unequal))

    def answered(self, step: int, found: Sequence[Scored]) -> None:
        """Store both sides' answers; waits for the suspect's."""
        if not found:
            return
        told = self.parts.evaluation.told(self.reference.answers(step))
        if told is None:
            raise LinkError("protocol", "the suspect's answers are not one score for each choice")
        self.store_answers(Arm.REFERENCE, step, found)
        self.store_answers(Arm.SUSPECT, step, told)
        self.ledger.unequal_answers += sum(
            repr(mine.scores) != repr(theirs.scores) for mine, theirs in zip(found, told, strict=True)
        )

    def store_answers(self, arm: Arm, step: int, found: Sequence[Scored]) -> None:
        for scored in found:
            self.ledger.evaluation(
                scored.record(run_id=self.ledger.run_id, attempt=self.ledger.attempt, step=step, arm=arm)
            )

    # -- controls --------------------------------------------------------------------------------

    def _control_after(self, flight: Flight, name: ControlName) -> None:
        output, known = self.control_values(flight.step)
        self._control(flight.step, name, flight.run, output, known)
