"""The reference's side of the lock-step: compares, decides, repairs the suspect, writes down.

It never rolls back: its own run-ahead is right whatever the suspect did. It never sends a digest
or a tensor of a site before it has the suspect's digests of that site.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from tandem.errors import LinkError, PairError
from tandem.records import MismatchRecord
from tandem.statistics.mismatch import Difference, compare
from tandem.vocabulary import Cause, SyncMode
from tandem_worker.chain import Op
from tandem_worker.link import frames as f
from tandem_worker.link.state import Activity
from tandem_worker.link.words import peer_reason, printable
from tandem_worker.lockstep.classify import classify
from tandem_worker.lockstep.ledger import Ledger
from tandem_worker.lockstep.machine import Execution
from tandem_worker.lockstep.side import F, Side
from tandem_worker.lockstep.tally import StepTally
from tandem_worker.lockstep.transfer import lanes_bytes, send_outputs, send_tensor, slot_of

D = TypeVar("D", f.InputDigests, f.ReplayDigests)

TRIES = 3
"""How often a tensor that arrives changed is asked for again, and an input repaired, before the pair ends."""


class Reference(Side):
    """Lock-step on the reference. ``ledger`` takes the rows."""

    ledger: Ledger

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._unsettled: dict[tuple[int, int], Execution] = {}
        """What differs and is not stored yet, by (output, rank)."""
        self._asked: tuple[int, int, int] | None = None
        """Step, op and generation of the dialogue that goes on."""
        self._answers: list[tuple[f.Frame, np.ndarray | None]] = []
        """Answers that came before they were awaited: while a tensor is sent again, the next ones arrive."""
        self._expected_answers = 0

    def step(self, step: int, sync: SyncMode, ops: tuple[Op, ...]) -> StepTally:
        """Run one step's ops in lock-step; returns the counts when every site is settled."""
        self.step_number, self.sync = step, sync
        self.tally = StepTally()
        self._budget = self.settings.replay_budget
        self._lanes: dict[int, np.ndarray] = {}
        self._tensors: dict[tuple[int, int, int], tuple[np.ndarray, bytes]] = {}
        self._repairs: dict[int, int] = {}
        self.window.largest = self.window.limit = 0 if sync is not SyncMode.OPTIMISTIC else self.settings.window
        if sync is SyncMode.NONE:
            self.unsynchronised(ops)
            return self.tally
        for op in ops:
            while not self.admits(op):
                self.pump(None)
                self._advance()
            self.start(op)
            self.pump_all()
            self._advance()
        while self.pending:
            self.pump(None)
            self._advance()
        return self.tally

    def expect(self, kind: type[F], matches: Callable[[F], bool]) -> tuple[F, np.ndarray | None]:
        """As `Side.expect`, after a look at the answers that came early."""
        for place, (frame, payload) in enumerate(self._answers):
            if isinstance(frame, kind) and matches(frame):
                del self._answers[place]
                return frame, payload
        return super().expect(kind, matches)

    def handle(self, frame: f.Frame, payload: np.ndarray | None) -> None:
        match frame:
            case f.Digests(step=step, generation=generation, op=op, lanes=lanes):
                if (step, generation) == (self.step_number, self.generation) and op >= 0:
                    self._store_lanes(op, lanes)
            case f.Tensor(purpose="full", step=step, generation=generation) if payload is not None:
                if (step, generation) == (self.step_number, self.generation):
                    self._store_tensor(frame, payload)
            case f.InputDigests() | f.Tensor() | f.ReplayDigests() if self._asked == (
                frame.step, frame.op, frame.generation,
            ):  # fmt: skip
                if len(self._answers) >= self._expected_answers:
                    raise LinkError("protocol", "the suspect answers more than it was asked")
                self._answers.append((frame, payload))
            case f.Stop():
                self.inbox.stop_reason = self.inbox.stop_reason or "stopped"
            case f.Bye(reason=reason):
                raise PairError(peer_reason(reason), f"the suspect ended the run: {printable(reason)}")
            case _:
                pass  # of an older generation, or an answer that is no longer awaited

    def _store_lanes(self, op: int, lanes: bytes) -> None:
        ops = self.plan.initial if self.step_number == 0 else self.plan.ops
        if op >= len(ops) or len(lanes) != self.plan.tp * len(ops[op].outputs) * 8:
            raise LinkError(
                "protocol", f"the suspect sent digests of a wrong size for op {op} of step {self.step_number}"
            )
        self.progress.touch()
        self._lanes[op] = np.frombuffer(lanes, "<u4").reshape(self.plan.tp, len(ops[op].outputs), 2)

    def _store_tensor(self, frame: f.Tensor, payload: np.ndarray) -> None:
        ops = self.plan.initial if self.step_number == 0 else self.plan.ops
        known = frame.op < len(ops) and frame.index < len(ops[frame.op].outputs) and frame.rank < self.plan.tp
        if self.sync is not SyncMode.FULL or not known:
            raise LinkError("protocol", "the suspect sent a tensor that full exchange does not ask for")
        self._check_shape(payload, ops[frame.op].outputs[frame.index])
        self._tensors[frame.op, frame.index, frame.rank] = (payload, frame.digest)

    def _check_shape(self, payload: np.ndarray, slot: str) -> None:
        spec = self.machine.spec(slot)
        if payload.shape != spec.shape or str(payload.dtype) != spec.dtype:
            raise LinkError("protocol", f"the suspect sent {payload.dtype}{list(payload.shape)} for {slot}")

    # -- comparing -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Settle executions in order as far as both sides' digests are here."""
        confirmed = -1
        while self.pending and self.pending[0].lanes is not None and self.pending[0].op.index in self._lanes:
            execution = self.pending[0]
            theirs = self._lanes.pop(execution.op.index)
            unequal = self._unequal(execution, theirs)
            if self.sync is SyncMode.FULL:
                send_outputs(self, execution)
            if not unequal:
                confirmed = execution.op.index
                self._count(execution)
                self.confirm_head()
                continue
            self._confirm(confirmed)
            confirmed = -1
            self._resolve(execution, theirs, unequal)
        self._confirm(confirmed)

    def _confirm(self, op: int) -> None:
        if op >= 0:
            self.channel.send(f.Confirm(step=self.step_number, op=op, generation=self.generation))

    def _count(self, execution: Execution) -> None:
        for site in execution.op.sites:
            self.tally.compared(site, self.plan.tp)

    @staticmethod
    def differing(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        """Which digests differ: bool [R, n] of two u32 [R, n, 2]. Decides every comparison, the control's too."""
        different: np.ndarray = (mine != theirs).any(axis=2)
        return different

    def _unequal(self, execution: Execution, theirs: np.ndarray) -> list[tuple[int, int]]:
        """(output, rank) pairs that differ, in site order."""
        assert execution.lanes is not None
        different = self.differing(execution.lanes, theirs)
        if self.sync is SyncMode.FULL:
            for output in range(len(execution.op.outputs)):
                for rank in range(self.plan.tp):
                    if different[rank, output]:
                        continue
                    key = (execution.op.index, output, rank)
                    if key not in self._tensors:
                        raise LinkError("protocol", "full exchange: digests came without the tensors")
                    own = self.machine.shard(execution.outputs[output], rank)
                    kept = self._tensors.pop(key)
                    if compare(kept[0], own) is None:
                        continue
                    # Equal digests, other bits: it arrived changed, or the digests collide.
                    whole = self._fetch(execution, "full", output, rank, kept)
                    if compare(whole, own) is not None:
                        self._tensors[key] = (whole, self.machine.digest_value(execution.op.outputs[output], whole))
                        different[rank, output] = True
        return [(int(output), int(rank)) for output, rank in np.argwhere(different.T)]

    # -- a mismatch ------------------------------------------------------------------------------

    def _resolve(self, execution: Execution, theirs: np.ndarray, unequal: list[tuple[int, int]]) -> None:
        """Find out why an execution differs, store it, repair the suspect, say where to go on."""
        op = execution.op
        self._unsettled = dict.fromkeys(unequal, execution)
        replayed = self._replayed(op, sorted({output for output, _ in unequal}))
        repeats = self.settings.replays if replayed else 0
        self._asked, self._answers = (self.step_number, op.index, self.generation), []
        self._expected_answers = 2 + TRIES * (len(unequal) + len(op.inputs) * self.plan.tp)
        self.channel.send(
            f.Mismatch(
                step=self.step_number, op=op.index, generation=self.generation,
                wanted=self._wanted(unequal), repeats=repeats,
            )
        )  # fmt: skip
        if op.inputs:
            differing = self._unequal_inputs(execution)
            if differing:
                self._repair_inputs(execution, differing)
                return
        self._settle(execution, theirs, unequal, replayed, repeats)
        self._budget -= len(replayed)
        self._count(execution)
        for output, rank in unequal:
            if self._keeps(op, output):
                self._overwrite(execution, "output", output, rank)
        rollback = any(self._ran_ahead(op, output) for output, _ in unequal)
        self._resume(execution, rerun=False, rollback=rollback)
        self.confirm_head()

    def _replayed(self, op: Op, outputs: list[int]) -> set[int]:
        """Which of the differing outputs are replayed: the first within the step's budget."""
        return set(outputs[: self._budget]) if op.replayable else set()

    def _wanted(self, unequal: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What the suspect sends at once."""
        return unequal

    def _keeps(self, op: Op, output: int) -> bool:  # noqa: ARG002 - whole steps ask
        """Whether the suspect's differing output must be overwritten."""
        return True

    def _settle(
        self,
        execution: Execution,
        theirs: np.ndarray,
        unequal: list[tuple[int, int]],
        replayed: set[int],
        repeats: int,
    ) -> None:
        """Store what differs, once everything that says more of it is here."""
        tensors = {
            (output, rank): self._fetch(
                execution, "output", output, rank, self._tensors.pop((execution.op.index, output, rank), None)
            )
            for output, rank in unequal
        }
        replays = self._replays(execution, repeats)
        self._unsettled = {}
        for output, rank in unequal:
            runs = [lanes[rank, output] for lanes in replays] if output in replayed else []
            difference = compare(tensors[output, rank], self.machine.shard(execution.outputs[output], rank))
            self._write(execution, output, rank, theirs, difference, runs)

    def _ran_ahead(self, op: Op, output: int) -> bool:
        """Whether the suspect may already have used this output: a reader comes before the next drain."""
        ops = self.plan.initial if self.step_number == 0 else self.plan.ops
        readers = set(self.plan.consumed_by(op, output)) if self.step_number else set()
        for later in ops[op.index + 1 :]:
            if later.drain:
                return False
            if later.index in readers:
                return True
        return False

    def _unequal_inputs(self, execution: Execution) -> list[tuple[int, int]]:
        mine = self.machine.input_digests(execution)
        frame, _ = self._dialogue(execution, f.InputDigests)
        if len(frame.lanes) != mine.nbytes:
            raise LinkError("protocol", "the suspect sent input digests of a wrong size")
        theirs = np.frombuffer(frame.lanes, "<u4").reshape(mine.shape)
        return [(int(index), int(rank)) for index, rank in np.argwhere((mine != theirs).any(axis=2).T)]

    def _repair_inputs(self, execution: Execution, differing: list[tuple[int, int]]) -> None:
        """Cause ``state``: a kept input differed. Store it, overwrite it, let the suspect run the program again."""
        op = execution.op
        self._repairs[op.index] = self._repairs.get(op.index, 0) + 1
        if self._repairs[op.index] > TRIES:
            raise PairError(
                "state_not_repairable", f"the suspect's inputs of {op.sites[0]} differ again after {TRIES} repairs"
            )
        self._store_inputs(execution, differing, again=self._repairs[op.index])
        self._unsettled = {}
        for index, rank in differing:
            self._overwrite(execution, "input", index, rank)
        self._resume(execution, rerun=True, rollback=True)

    def _store_inputs(self, execution: Execution, differing: list[tuple[int, int]], again: int = 1) -> None:
        """Ask for the inputs that differ, and store them; ``again``: which time at this program in this step."""
        op = execution.op
        self.channel.send(
            f.InputsUnequal(step=self.step_number, op=op.index, generation=self.generation, unequal=differing)
        )
        number = f"#{again}" if again > 1 else ""
        for index, rank in differing:
            theirs = self._fetch(execution, "input", index, rank)
            mine = self.machine.shard(execution.inputs[index], rank)
            difference = compare(theirs, mine)
            self._store(
                execution, 0, rank, Cause.STATE, f"input.{op.input_names[index]}{number}", mine.size,
                difference.fields() if difference else {"mismatched": 0},
            )  # fmt: skip

    def _replays(self, execution: Execution, repeats: int) -> list[np.ndarray]:
        """The suspect's replays (u32 [R, n, 2] each); the reference replays as often and must repeat itself."""
        if not repeats:
            return []
        assert execution.lanes is not None
        with self.progress.during(Activity.REPLAYING, f"replays of {execution.op.program}"):
            own = self.machine.replay(execution, repeats)
        if not all(np.array_equal(lanes, execution.lanes) for lanes in own):
            self.ledger.reference_differs(self.step_number, execution.op, repeats)
        self.ledger.reference_replays += repeats
        frame, _ = self._dialogue(execution, f.ReplayDigests)
        shape = execution.lanes.shape
        if len(frame.lanes) != repeats or any(len(lanes) != execution.lanes.nbytes for lanes in frame.lanes):
            raise LinkError("protocol", "the suspect sent replay digests of a wrong size")
        return [np.frombuffer(lanes, "<u4").reshape(shape) for lanes in frame.lanes]

    def _write(
        self,
        execution: Execution,
        output: int,
        rank: int,
        theirs: np.ndarray,
        difference: Difference | None,
        runs: list[np.ndarray],
    ) -> None:
        assert execution.lanes is not None
        replay, right = classify(theirs[rank, output], execution.lanes[rank, output], runs)
        fields = difference.fields() if difference else {"mismatched": 0}
        cause = Cause.COMPUTE if difference else Cause.DIGEST
        site = execution.op.sites[output]
        fields |= {"replay": replay, "replays": len(runs), "replays_right": right}
        self._store(execution, output, rank, cause, site.tensor, site.elements, fields)

    def _store(
        self,
        execution: Execution,
        output: int,
        rank: int,
        cause: Cause,
        tensor: str,
        elements: int,
        fields: dict[str, Any],
    ) -> None:
        site = execution.op.sites[output]
        row = MismatchRecord(
            run_id=self.ledger.run_id, attempt=self.ledger.attempt, step=self.step_number, site=site.number, rank=rank,
            phase=site.phase, module=site.module, layer=site.layer, tensor=tensor, cause=cause,
            generation=self.generation, detected_at=self.ledger.now(), **{"elements": elements} | fields,
        )  # fmt: skip
        self.tally.found(site, row)
        self.ledger.mismatch(row)

    def store_unsettled(self) -> None:
        """When the pair ends inside a dialogue: what differed but whose tensor never came is stored without counts."""
        for (output, rank), execution in self._unsettled.items():
            site = execution.op.sites[output]
            self._store(execution, output, rank, Cause.COMPUTE, site.tensor, site.elements, {})
        self._unsettled = {}

    # -- the dialogue ----------------------------------------------------------------------------

    def _dialogue(self, execution: Execution, kind: type[D]) -> tuple[D, np.ndarray | None]:
        position = (self.step_number, execution.op.index, self.generation)
        return self.expect(kind, lambda x: (x.step, x.op, x.generation) == position)

    def _fetch(
        self,
        execution: Execution,
        purpose: f.Purpose,
        index: int,
        rank: int,
        kept: tuple[np.ndarray, bytes] | None = None,
    ) -> np.ndarray:
        """The suspect's tensor, digested again on arrival; asked for again when it arrived changed."""
        slot = slot_of(execution, purpose, index)
        for attempt in range(1, TRIES + 1):
            if kept is not None:
                payload, claimed = kept
                kept = None
            else:
                frame, received = self.expect(
                    f.Tensor,
                    lambda x: (
                        (x.step, x.op, x.generation, x.purpose, x.index, x.rank)
                        == (self.step_number, execution.op.index, self.generation, purpose, index, rank)
                    ),
                )
                if received is None:
                    raise LinkError("protocol", "a tensor frame came without its tensor")
                payload, claimed = received, frame.digest
            self._check_shape(payload, slot)
            if self.machine.digest_value(slot, payload) == claimed:
                if attempt > 1:
                    self.ledger.transport(self.step_number, execution.op, purpose, index, rank, repaired=True)
                return payload
            self.channel.send(
                f.Resend(
                    step=self.step_number, op=execution.op.index, generation=self.generation,
                    purpose=purpose, index=index, rank=rank,
                )
            )  # fmt: skip
        self.ledger.transport(self.step_number, execution.op, purpose, index, rank, repaired=False)
        raise LinkError("transport", f"the suspect's tensor arrived changed {TRIES} times at {execution.op.sites[0]}")

    def _overwrite(self, execution: Execution, purpose: f.Purpose, index: int, rank: int) -> None:
        """Send the reference's tensor until the suspect's overwritten buffer digests to the same."""
        array = (execution.inputs if purpose == "input" else execution.outputs)[index]
        digest = lanes_bytes(self.machine.digest(slot_of(execution, purpose, index), array)[rank])
        for attempt in range(1, TRIES + 1):
            send_tensor(self, execution, purpose, index, rank)
            frame, _ = self.expect(
                f.Overwritten,
                lambda x: (
                    (x.step, x.op, x.generation, x.purpose, x.index, x.rank)
                    == (self.step_number, execution.op.index, self.generation, purpose, index, rank)
                ),
            )
            if frame.lanes == digest:
                if attempt > 1:
                    self.ledger.transport(self.step_number, execution.op, purpose, index, rank, repaired=True)
                return
        self.ledger.transport(self.step_number, execution.op, purpose, index, rank, repaired=False)
        raise LinkError(
            "transport", f"the suspect's buffer stayed unequal after {TRIES} overwrites at {execution.op.sites[0]}"
        )

    def _resume(self, execution: Execution, *, rerun: bool, rollback: bool) -> None:
        """Tell the suspect where to go on; a roll-back starts a new generation."""
        new = self.generation + 1 if rollback else self.generation
        self.channel.send(
            f.Resume(
                step=self.step_number, op=execution.op.index, generation=self.generation,
                new_generation=new, rerun=rerun, rollback=rollback,
            )
        )  # fmt: skip
        self.generation = new
        self._asked, self._answers = None, []
        if rollback:
            self._lanes.clear()
            self._tensors.clear()
