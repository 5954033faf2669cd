"""A whole pair in one process, over the real link, on the process's own virtual devices.

The reference runs on devices 0 .. tp-1, the suspect on the next tp, each in a thread of its own; records
go to a list. What needs real processes, PostgreSQL or kills uses the supervisor instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import jax

from tandem.faults.injection import FaultProfile, can_act, check_profile
from tandem.records import (
    AttemptRow,
    ClosingRecord,
    ControlRecord,
    DriftRecord,
    EvaluationRecord,
    FaultRecord,
    GradientRecord,
    MismatchRecord,
    Record,
    RunRecords,
    RunRow,
    StepRecord,
)
from tandem.spec import RunSpec, resolve
from tandem.vocabulary import UNSYNCHRONISED, Cause, Role, SyncMode, Workload
from tandem_worker import parity
from tandem_worker.chain import Chain
from tandem_worker.data import Stream, open_data
from tandem_worker.drift.checkpoints import open_store, start_slots
from tandem_worker.drift.held_out import HeldOut
from tandem_worker.drift.parts import DriftParts, Evaluation, NoEvaluation
from tandem_worker.drift.saved import check_start, content_digest
from tandem_worker.link.channel import Channel, PeerState, Progress, new_keys
from tandem_worker.lockstep.inbox import Inbox, StopRequested, Tripped
from tandem_worker.lockstep.ledger import Ledger
from tandem_worker.lockstep.machine import Machine
from tandem_worker.model.build import build_chain
from tandem_worker.model.init import Slots, random_parameters
from tandem_worker.model.plan import make_plan
from tandem_worker.model.whole_build import build_whole
from tandem_worker.questions.opened import open_questions
from tandem_worker.session.choose import reference_session, suspect_session
from tandem_worker.session.common import Prepared
from tandem_worker.session.reference import Hooks, ReferenceSession
from tandem_worker.session.suspect import SuspectSession
from tandem_worker.watchdog import Limits, Watchdog

_CHAINS: dict[tuple[object, ...], Chain] = {}


@dataclass
class Outcome:
    """What a pair left behind."""

    records: RunRecords
    reason: str
    reference: ReferenceSession
    suspect: SuspectSession
    errors: dict[Role, BaseException] = field(default_factory=dict)

    @property
    def keys(self) -> list[tuple[object, ...]]:
        """The mismatches without what may depend on timing: generation and time."""
        return sorted(
            (m.step, m.site, m.rank, m.tensor, m.cause, m.mismatched, m.first_index, tuple(m.bits or ()), m.replay)
            for m in self.records.mismatches
        )


class ListSink:
    """Keeps records in memory."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def put(self, record: Record) -> None:
        self.records.append(record)


def chain_for(spec: RunSpec, role: Role, profile: FaultProfile | None) -> Chain:
    """A compiled chain, once per process, shape and set of injected programs."""
    model, training = resolve(spec)
    ops = make_plan(model, training, spec.tp).ops
    injected = frozenset(op.program for op in ops if profile is not None and can_act(profile, op.sites))
    shape = model.model_dump_json() + training.model_dump_json()
    key = (shape, spec.workload, spec.tp, profile is not None, injected, role)
    if key not in _CHAINS:
        first = 0 if role is Role.REFERENCE else spec.tp
        devices = jax.devices()[first : first + spec.tp]
        if spec.workload is Workload.SUBMODULE:
            _CHAINS[key] = build_chain(model, training, spec.tp, profile=profile, devices=devices)
        else:
            _CHAINS[key] = build_whole(model, training, spec.tp, spec.workload, profile=profile, devices=devices)
    return _CHAINS[key]


def prepared(
    spec: RunSpec,
    role: Role,
    profile: FaultProfile | None,
    change: Callable[[dict[str, str]], dict[str, str]] = lambda fields: fields,
    run: str = "",
    attempt: int = 1,
) -> Prepared:
    """One side, ready for the handshake; ``change`` alters its parity fields."""
    model, training = resolve(spec)
    chain = chain_for(spec, role, profile)
    if profile is not None:
        check_profile(profile, chain.submodules.sites, spec.tp)
    machine = Machine(chain, profile if role is Role.SUSPECT else None)

    def fresh(seed: int) -> Slots:
        if spec.start is not None:
            return start_slots(spec.start, chain.plan, chain.mesh)
        return random_parameters(chain.plan, model, chain.mesh, seed)

    shape = {"seed": spec.seed, "batch": training.batch, "sequence": training.sequence, "vocab": model.vocab}
    data: Stream
    evaluation: Evaluation = NoEvaluation()
    if spec.workload is Workload.FINETUNE:
        opened = open_questions(
            spec.questions, spec.tokenizer, **shape,
            held_out_percent=spec.held_out_percent, scoring=spec.scoring, packed=spec.packed,
        )  # fmt: skip
        data, evaluation = opened.training, HeldOut(machine, opened.evaluation, spec.evaluate_every)
    else:
        data = open_data(spec.data, None, **shape)
    weights = f"checkpoint {content_digest(spec.start)}" if spec.start is not None else "random"
    fields = parity.gather(spec, model, training, chain, data=data.digest, weights=weights, profile=profile)
    drift = None
    if spec.workload in UNSYNCHRONISED:
        if spec.start is not None:
            check_start(spec.start, fields)
        drift = DriftParts(fresh, open_store(spec, role, fields, run, attempt), evaluation)
    machine.slots.update(fresh(spec.seed))
    return Prepared(spec, machine, data, change(fields), spec.steps, attempt, drift)


End = tuple[Channel, Inbox, Progress, PeerState]


@contextmanager
def channels(run: UUID) -> Iterator[tuple[End, End]]:
    """Both ends of a real link on loopback."""
    keys, ends = new_keys(), []
    endpoint = "tcp://127.0.0.1:0"
    for role in (Role.REFERENCE, Role.SUSPECT):
        inbox, progress, peer = Inbox(), Progress(), PeerState()
        own = keys.reference if role is Role.REFERENCE else keys.suspect
        channel = Channel(role, endpoint, own, run.hex, 1, inbox.queue, progress, peer).start()
        endpoint = channel.endpoint
        ends.append((channel, inbox, progress, peer))
    try:
        yield ends[0], ends[1]
    finally:
        for channel, *_ in reversed(ends):
            channel.close(0.5)


def run_pair(
    spec: RunSpec,
    profile: FaultProfile | None = None,
    *,
    schedule: Callable[[int], SyncMode] | None = None,
    tamper: Callable[[ReferenceSession, SuspectSession], None] = lambda *_: None,
    reference_change: Callable[[dict[str, str]], dict[str, str]] = lambda fields: fields,
    suspect_change: Callable[[dict[str, str]], dict[str, str]] = lambda fields: fields,
    timeout: float = 300.0,
    step_timeout: float | None = None,
    run: UUID | None = None,
    attempt: int = 1,
) -> Outcome:
    """Run an attempt to its end and return what was recorded.

    Args:
        spec: the run.
        profile: fault profile of the suspect; makes the pair synthetic.
        schedule: sync mode of each step; default: the spec's.
        tamper: called with both sessions before they start, to break something on purpose.
        reference_change: alters the reference's parity fields.
        suspect_change: alters the suspect's.
        timeout: seconds after which the test fails.
        step_timeout: of a watchdog on the reference; None: no watchdog.
        run: its id; None: a new one.
        attempt: of that run.
    """
    run = run or uuid4()
    sink = ListSink()
    errors: dict[Role, BaseException] = {}
    reasons: list[str] = []
    both = (
        prepared(spec, Role.REFERENCE, profile, reference_change, run.hex, attempt),
        prepared(spec, Role.SUSPECT, profile, suspect_change, run.hex, attempt),
    )
    with channels(run) as ((r_channel, r_inbox, r_progress, r_peer), (s_channel, s_inbox, s_progress, _)):
        ledger = Ledger(sink, run, attempt, spec.row_cap, time.time)
        hooks = Hooks(
            progress=lambda _: None,
            schedule=schedule or (lambda _: spec.sync),
            counters=lambda: r_channel.bytes_sent + r_channel.bytes_received,
        )
        reference = reference_session(spec.workload)(both[0], r_channel, r_inbox, r_progress, ledger, hooks)
        suspect = suspect_session(spec.workload)(both[1], s_channel, s_inbox, s_progress)
        tamper(reference, suspect)
        watchdog = None
        if step_timeout is not None:
            trip = lambda t: r_inbox.queue.put(Tripped(t.reason, t.detail))
            limits = Limits(step_timeout=step_timeout, grace=timeout)
            watchdog = Watchdog(r_progress, r_peer, limits, trip, end=lambda: None, interval=0.1).start()

        def lead() -> None:
            try:
                reasons.append(reference.run())
                reference.close(reasons[0])
            except BaseException as error:
                errors[Role.REFERENCE] = error
                reasons.append(getattr(error, "reason", "crashed"))
                reference.reference.store_unsettled()
                r_channel.say_bye(reasons[0])
                s_inbox.queue.put(StopRequested("test"))
            ledger.close(reasons[0], ["cpu:0"])

        def follow() -> None:
            try:
                suspect.run()
            except BaseException as error:
                errors[Role.SUSPECT] = error
                s_channel.say_bye(getattr(error, "reason", "crashed"))

        threads = [threading.Thread(target=target, daemon=True) for target in (lead, follow)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        if watchdog is not None:
            watchdog.stop()
        for side in (reference.side, suspect.side):
            side.reader.close()
        assert not any(thread.is_alive() for thread in threads), f"the pair hangs: {errors}"
    return Outcome(_records(spec, run, sink.records, both[0], both[1]), reasons[0], reference, suspect, errors)


def natural_key(row: Record) -> tuple[object, ...]:
    """What the database knows a row by, within an attempt."""
    match row:
        case MismatchRecord():
            return (row.step, row.site, row.rank, row.tensor)
        case FaultRecord():
            return (row.step, row.site, row.rank, row.level)
        case GradientRecord():
            return (row.step, row.leaf)
        case DriftRecord():
            return (row.step, row.arm, row.part, row.method)
        case EvaluationRecord():
            return (row.step, row.task, row.question, row.arm)
        case ControlRecord():
            return (row.name, row.role, row.step, row.subject)
        case StepRecord():
            return (row.step,)
        case _:
            return ()


def _records(spec: RunSpec, run: UUID, found: list[Record], reference: Prepared, suspect: Prepared) -> RunRecords:
    def of(kind: type) -> list:  # type: ignore[type-arg]
        rows = [r for r in found if isinstance(r, kind)]
        keys = [natural_key(r) for r in rows]
        doubled = {key for key in keys if keys.count(key) > 1}
        assert not doubled, f"two rows with one natural key, of which the database keeps one: {doubled}"
        return rows

    attempt = AttemptRow(
        run_id=run, attempt=reference.attempt, state="closed", started_at=0.0, reference_host="a", suspect_host="b",
    )  # fmt: skip
    row = RunRow(
        run_id=run, created_at=0.0, workload=spec.workload, kind=spec.kind, model=spec.model,
        synthetic=spec.fault is not None,
        reference_node="a", suspect_node="b", spec=spec.model_dump(mode="json"), state="finished",
    )  # fmt: skip
    return RunRecords(
        run=row, attempts=[attempt], steps=of(StepRecord), mismatches=of(MismatchRecord), controls=of(ControlRecord),
        faults=of(FaultRecord), closings=of(ClosingRecord), gradients=of(GradientRecord), drifts=of(DriftRecord),
        evaluations=of(EvaluationRecord),
    )  # fmt: skip


# -- what tests say of an outcome -----------------------------------------------------------------------------


def profile(*faults: dict[str, Any], seed: int = 1) -> FaultProfile:
    return FaultProfile.model_validate({"name": "test", "seed": seed, "fault": list(faults)})


def truth(records: RunRecords) -> dict[tuple[int, int, int], int]:
    """(step, site, rank) -> elements that the injector changed at sites' outputs."""
    return {(t.step, t.site, t.rank): t.changed for t in records.faults if t.level == "output"}


def found(records: RunRecords, cause: Cause = Cause.COMPUTE) -> dict[tuple[int, int, int], int | None]:
    return {(m.step, m.site, m.rank): m.mismatched for m in records.mismatches if m.cause is cause}


def clean_end(outcome: Outcome) -> None:
    assert not outcome.errors
    assert outcome.reason == "completed"
