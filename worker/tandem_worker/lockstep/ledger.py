"""The reference's way to the database: every row of an attempt goes through here, and is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol
from uuid import UUID

from tandem.records import (
    ClosingRecord,
    ControlRecord,
    DriftRecord,
    EvaluationRecord,
    FaultRecord,
    GradientRecord,
    MismatchRecord,
    Record,
    StepRecord,
)
from tandem.vocabulary import ControlName, Role
from tandem_worker.chain import Op
from tandem_worker.lockstep.tally import RunTally


class RecordSink(Protocol):
    """Where records go; never blocks the caller."""

    def put(self, record: Record) -> None: ...


class Ledger:
    """Rows and totals of one attempt.

    Args:
        now: wall clock, UTC seconds.
        row_cap: mismatch rows that are written at most; totals stay exact.
    """

    def __init__(self, sink: RecordSink, run_id: UUID, attempt: int, row_cap: int, now: Callable[[], float]) -> None:
        self.sink, self.run_id, self.attempt, self.now = sink, run_id, attempt, now
        self.row_cap = row_cap
        self.total = RunTally()
        self.states: dict[str, str] = {}
        """Control -> what progress shows of it."""
        self.failures: Mapping[tuple[str, str], int] = {}
        """Control and side -> how often it failed. Replaced whole: any thread may read it without a lock."""
        self.reference_replays = 0
        self.suspect_differs = 0
        """Self-replays in which the suspect differed from itself."""
        self.unequal_answers = 0
        """Questions whose scores differ between the sides."""
        self.control_failed = False
        """Whether anything but the suspect's self-replay failed: the run cannot speak."""
        self._reference_differs = False
        self._transport_failures = 0

    @property
    def findings(self) -> int:
        """Mismatch rows, failed self-replays of the suspect, and unequal answers."""
        return self.total.rows_total + self.suspect_differs + self.unequal_answers

    def mismatch(self, row: MismatchRecord) -> None:
        if self.total.add_row(row, self.row_cap):
            self.sink.put(row)

    def fault(self, row: FaultRecord) -> None:
        self.total.faults += 1
        self.sink.put(row)

    def gradient(self, row: GradientRecord) -> None:
        self.total.gradients += 1
        self.sink.put(row)

    def drift(self, row: DriftRecord) -> None:
        self.total.drifts += 1
        self.sink.put(row)

    def evaluation(self, row: EvaluationRecord) -> None:
        self.total.evaluations += 1
        self.sink.put(row)

    def step(self, row: StepRecord) -> None:
        self.total.add_step(row)
        self.sink.put(row)

    def control(
        self, name: ControlName, role: Role, step: int, subject: str, ok: bool, repeats: int = 0, **detail: Any
    ) -> None:
        self.total.controls += 1
        if not ok:
            self.failures = {**self.failures, (name, role): self.failures.get((name, role), 0) + 1}
        if not ok and role is Role.SUSPECT and name in (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END):
            self.suspect_differs += 1
        elif not ok:
            self.control_failed = True
        shown = f"ok ({repeats})" if ok and repeats else "ok" if ok else f"failed: {role} {subject}".strip()
        if not self.states.get(name, "").startswith("failed"):
            self.states[name] = shown
        self.sink.put(
            ControlRecord(
                run_id=self.run_id, attempt=self.attempt, name=name, role=role, step=step,
                subject=subject, ok=ok, repeats=repeats, detail=detail,
            )
        )  # fmt: skip

    def reference_differs(self, step: int, op: Op, repeats: int) -> None:
        """The reference did not repeat its own result: nothing that it says about the suspect counts."""
        self._reference_differs = True
        subject = f"{op.program}@{op.index}"
        self.control(ControlName.REPLAY_REFERENCE, Role.REFERENCE, step, subject, ok=False, repeats=repeats)

    def transport(self, step: int, op: Op, purpose: str, index: int, rank: int, *, repaired: bool) -> None:
        """A tensor arrived changed; ``repaired`` if a later try arrived whole."""
        self._transport_failures += 1
        subject = f"{op.program}@{op.index} {purpose} {index} rank {rank} #{self._transport_failures}"
        self.control(ControlName.TRANSPORT, Role.SUSPECT, step, subject, ok=repaired, repaired=repaired)

    def close(self, reason: str, devices: list[str]) -> ClosingRecord:
        """Write the summary controls and the closing record, with the counts of everything put before it."""
        step = self.total.steps - 1
        if not self._reference_differs:
            self.control(
                ControlName.REPLAY_REFERENCE, Role.REFERENCE, max(step, 0), "", ok=True, repeats=self.reference_replays
            )
        closing = ClosingRecord(
            run_id=self.run_id, attempt=self.attempt,
            steps=self.total.steps, mismatches=self.total.rows_written, mismatches_total=self.total.rows_total,
            controls=self.total.controls, faults=self.total.faults, gradients=self.total.gradients,
            drifts=self.total.drifts, evaluations=self.total.evaluations,
            capped=self.total.rows_total > self.total.rows_written, reason=reason,
            device_seconds=self.total.device_seconds, devices=devices, finished_at=self.now(),
        )  # fmt: skip
        self.sink.put(closing)
        return closing
