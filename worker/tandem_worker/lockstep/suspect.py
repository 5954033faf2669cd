"""The suspect's side of the lock-step: runs ahead, answers, is overwritten, rolls back.

It decides nothing: which sites mismatch, what is replayed and where to resume is the reference's word.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tandem.errors import LinkError
from tandem.faults.injection import LOGGED
from tandem.vocabulary import SyncMode
from tandem_worker.chain import Op
from tandem_worker.link import frames as f
from tandem_worker.link.state import Activity
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.side import Side
from tandem_worker.lockstep.transfer import lanes_bytes, send_outputs, send_piece, send_tensor
from tandem_worker.lockstep.window import Window


class Suspect(Side):
    """Lock-step on the suspect."""

    _mismatch: f.Mismatch | None = None

    def step(self, step: int, sync: SyncMode, ops: tuple[Op, ...]) -> None:
        """Run one step's ops in lock-step; returns when every site is confirmed or settled."""
        self.step_number, self.sync = step, sync
        self.faults: list[f.FaultEntry] = []
        """Ground truth of this step's surviving executions."""
        self._received: dict[tuple[int, int, int], tuple[np.ndarray, bytes]] = {}
        self._mismatch = None
        self.window = self.ahead if sync is SyncMode.OPTIMISTIC else Window(0)
        if sync is SyncMode.NONE:
            self.unsynchronised(ops)
            return
        position = 0
        while position < len(ops) or self.pending:
            if position < len(ops) and self.admits(ops[position]):
                self.start(ops[position])
                position += 1
                self.pump_all()
            else:
                self.pump(None)
            if asked := self._take_mismatch():
                position = self._answer(asked, position)

    def digest_ready(self, execution: Execution) -> None:
        """Stream the digests of an execution that was not discarded meanwhile."""
        if execution not in self.pending:
            return
        op, lanes = execution.op, execution.lanes
        assert lanes is not None
        if self.sync is SyncMode.FULL:
            send_outputs(self, execution)
        self.channel.send(
            f.Digests(step=execution.step, op=op.index, generation=self.generation, lanes=lanes_bytes(lanes))
        )

    def handle(self, frame: f.Frame, payload: np.ndarray | None) -> None:
        match frame:
            case f.Confirm(step=step, op=op, generation=generation):
                if (step, generation) == (self.step_number, self.generation):
                    self._confirm(op)
            case f.Mismatch(step=step, generation=generation):
                if (step, generation) == (self.step_number, self.generation):
                    self._mismatch = frame
            case f.Tensor(purpose="full", step=step, op=op) if step == self.step_number and payload is not None:
                self._received[op, frame.index, frame.rank] = (payload, frame.digest)
            case f.Resend(purpose=purpose, index=index, rank=rank, step=step, generation=generation):
                if (step, generation) == (self.step_number, self.generation) and self.pending:
                    send_tensor(self, self.pending[0], purpose, index, rank)
            case f.Bye(reason=reason):
                raise LinkError(reason, f"the reference ended the run: {reason}")
            case _:
                pass  # an answer to something that a roll-back made moot

    # -- confirmed -------------------------------------------------------------------------------

    def _confirm(self, through: int) -> None:
        while self.pending and self.pending[0].op.index <= through:
            if self.sync is SyncMode.FULL:
                self._install(self.pending[0])
            self._log_faults(self.pending[0])
            self.confirm_head()

    def _install(self, execution: Execution) -> None:
        """Full mode overwrites at every site, also where nothing differed."""
        for output in range(len(execution.op.outputs)):
            for rank in range(self.plan.tp):
                received = self._received.pop((execution.op.index, output, rank), None)
                if received is None:
                    continue
                lanes = self.machine.overwrite_output(execution, output, rank, received[0], differed=False)
                if lanes_bytes(lanes) != received[1]:
                    raise LinkError(
                        "transport", f"the reference's tensor arrived changed at {execution.op.sites[output]}"
                    )

    def _log_faults(self, execution: Execution) -> None:
        """Ground truth of the surviving execution only."""
        at = 0
        for op in self.machine.chain.fault_ops(execution.op) if execution.changed is not None else ():
            outputs = len(op.sites)
            assert execution.changed is not None
            changed = execution.changed[:, at : at + outputs + 1]
            at += outputs + 1
            for rank, index in np.argwhere(changed[:, :, 0] > 0).tolist():
                row = changed[rank, index]
                level: f.Level = "operand" if index == outputs else "output"
                elements = [int(i) for i in row[1:] if i >= 0]
                self._fault(op, index if level == "output" else 0, rank, level, row[0], elements)
        self._log_flips(execution)

    def _log_flips(self, execution: Execution) -> None:
        places: dict[tuple[int, int], set[tuple[str, int]]] = {}
        ops = {flip.op.index: flip.op for flip in execution.flips}
        for flip in execution.flips:
            places.setdefault((flip.op.index, flip.flip.rank), set()).add((flip.slot, flip.flip.element))
        for (index, rank), changed in places.items():
            elements = sorted(element for _, element in changed)[:LOGGED]
            self._fault(ops[index], 0, rank, "state", len(changed), elements)

    def _fault(self, op: Op, output: int, rank: int, level: f.Level, changed: Any, elements: list[int]) -> None:
        """Note what was changed at one place; what was changed there before, in a discarded run, is added."""
        place = (op.index, output, rank, level)
        before = next((e for e in self.faults if (e.op, e.output, e.rank, e.level) == place), None)
        if before is not None:
            self.faults.remove(before)
            elements = sorted({*before.elements, *elements})[:LOGGED]
            changed = before.changed + int(changed)
        self.faults.append(
            f.FaultEntry(op=op.index, output=output, rank=rank, level=level, changed=int(changed), elements=elements)
        )

    def _take_mismatch(self) -> f.Mismatch | None:
        asked, self._mismatch = self._mismatch, None
        return asked

    # -- mismatching -----------------------------------------------------------------------------

    def _answer(self, asked: f.Mismatch, position: int) -> int:
        """Answer the reference's questions about the oldest execution; returns the position to go on from."""
        execution = self.pending[0]
        if execution.op.index != asked.op:
            raise LinkError(
                "protocol", f"asked about op {asked.op}, but op {execution.op.index} is the oldest unconfirmed"
            )
        if execution.op.inputs:
            lanes = self.machine.input_digests(execution)
            self.channel.send(
                f.InputDigests(step=asked.step, op=asked.op, generation=asked.generation, lanes=lanes_bytes(lanes))
            )
        if self.sync is not SyncMode.FULL:
            for output, rank in asked.wanted:
                send_tensor(self, execution, "output", output, rank)
        if asked.repeats:
            with self.progress.during(Activity.REPLAYING, f"replays of {execution.op.program}"):
                replays = [lanes_bytes(lanes) for lanes in self.machine.replay(execution, asked.repeats)]
            self.channel.send(f.ReplayDigests(step=asked.step, op=asked.op, generation=asked.generation, lanes=replays))
        while True:
            frame, payload = self.expect_any(
                f.InputsUnequal, f.Resend, f.Want, f.Tensor, f.Resume,
                matches=lambda x: (x.step, x.op, x.generation) == (asked.step, asked.op, asked.generation),
            )  # fmt: skip
            match frame:
                case f.InputsUnequal(unequal=unequal):
                    for index, rank in unequal:
                        send_tensor(self, execution, "input", index, rank)
                case f.Resend(purpose=purpose, index=index, rank=rank):
                    send_tensor(self, execution, purpose, index, rank)
                case f.Want():
                    send_piece(self, execution, frame)
                case f.Tensor(purpose=purpose, index=index, rank=rank) if payload is not None:
                    overwrite = self.machine.overwrite_input if purpose == "input" else self.machine.overwrite_output
                    lanes = overwrite(execution, index, rank, payload)
                    self.channel.send(
                        f.Overwritten(
                            step=asked.step, op=asked.op, generation=asked.generation,
                            purpose=purpose, index=index, rank=rank, lanes=lanes_bytes(lanes),
                        )
                    )  # fmt: skip
                case f.Resume(new_generation=generation, rerun=rerun, rollback=rollback):
                    return self._go_on(execution, position, generation, rerun=rerun, rollback=rollback)
                case _:
                    pass

    def _go_on(self, execution: Execution, position: int, generation: int, *, rerun: bool, rollback: bool) -> int:
        """After the reference settled the oldest execution: keep what ran ahead, or discard it."""
        self._received.clear()
        if rerun:
            self._log_flips(execution)
        else:
            self._log_faults(execution)
        if not (rerun or rollback):
            self.confirm_head()
            return position
        ahead = list(self.pending)[1:]
        self.machine.discard(ahead)
        for discarded in ahead:
            self.pending.pop()
            self.unconfirmed -= len(discarded.op.sites)
        self.generation = generation
        self.window.rolled_back()
        if rerun:
            self.pending.popleft()
            self.unconfirmed -= len(execution.op.sites)
            self.machine.rewind(execution)
            return execution.op.index
        self.confirm_head()
        return execution.op.index + 1
