"""Made-up conclusive runs of a pair of nodes, and their way into a database, for the tests of node profiles."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from uuid import UUID

import msgspec
from sqlalchemy import Engine

from tandem import recovery
from tandem.db import store, writer
from tandem.db.engine import open_connection
from tandem.ids import new_run_id
from tandem.records import (
    AttemptRow,
    ClassCounts,
    ClosingRecord,
    ControlRecord,
    DriftRecord,
    EvaluationRecord,
    GradientRecord,
    MismatchRecord,
    Record,
    RunRecords,
    RunRow,
    StepRecord,
)
from tandem.runs.conclusive import REQUIRED_PARITY, REQUIRED_PROGRAMS
from tandem.runs.verdict import decide
from tandem.vocabulary import Cause, ControlName, Extent, Module, Phase, ReplayClass, Role

BEGAN = 1_790_000_000.0
HOUR = 3600.0
CLASSES = {"fwd/attn/out": (8, 8000), "bwd/ffn/dx": (8, 8000), "update/attn/param": (4, 4000)}
"""Site class -> tensors and elements of every step."""

PROGRAMS = tuple(dict.fromkeys(name for names in REQUIRED_PROGRAMS.values() for name in names))
"""Of all workloads: more than any one needs."""


def node_run(
    *,
    suspect: str = "sick",
    reference: str = "healthy",
    hosts: tuple[str, str] | None = None,
    kind: str = "suspect",
    workload: str = "submodule",
    model: str = "small",
    synthetic: bool = False,
    began: float = BEGAN,
    steps: int = 10,
    hits: Mapping[int, int] | None = None,
    rank: int = 1,
    devices: Sequence[str] = ("cuda:0", "cuda:1"),
    device_count: int | None = None,
    hours: float = 1.0,
    programs: str = "one",
    differs: Sequence[Role] = (),
    missing: Sequence[ControlName] = (),
    reason: str = "completed",
    gradients: Sequence[GradientRecord] = (),
    drifts: Sequence[DriftRecord] = (),
    evaluations: Sequence[EvaluationRecord] = (),
    seed: int = 0,
) -> RunRecords:
    """A run with its verdict.

    Args:
        suspect: name of the node, like ``reference``.
        reference: the other one.
        hosts: of reference and suspect; without it their names.
        kind: of the run, like the following.
        workload: ...
        model: ...
        synthetic: ...
        began: UTC seconds; it takes a minute.
        steps: trained, beside step 0.
        hits: step -> mismatching elements of ``fwd/attn/out`` on ``rank``.
        rank: of the mismatches.
        devices: of the suspect, one a rank.
        device_count: that it has; without it as many.
        hours: device-hours.
        programs: fingerprint of its executables.
        differs: sides that differ from themselves.
        missing: controls that were never recorded.
        reason: of the closing record.
        gradients: records, whose run and attempt are set here; likewise ``drifts``.
        drifts: ...
        evaluations: ...
        seed: of the run's id.
    """
    run_id = new_run_id(began, random.Random(f"{seed} {suspect} {reference} {kind} {workload}").randbytes(10))
    hits = dict(hits or {})
    tp = len(devices)
    controls = [c for c in _controls(run_id, tp, steps, device_count or tp, programs, differs) if c.name not in missing]
    mismatches = [_mismatch(run_id, step, rank, n) for step, n in sorted(hits.items())]
    known = {"run_id": run_id, "attempt": 1}
    closing = ClosingRecord(
        run_id=run_id, attempt=1, steps=steps + 1, mismatches=len(mismatches), mismatches_total=len(mismatches),
        controls=len(controls), faults=0, gradients=len(gradients), drifts=len(drifts),
        evaluations=len(evaluations), capped=False, reason=reason, device_seconds=hours * HOUR, devices=list(devices),
        finished_at=began + 55,
    )  # fmt: skip
    reference_host, suspect_host = hosts or (reference, suspect)
    records = RunRecords(
        run=RunRow(
            run_id=run_id, created_at=began, workload=workload, kind=kind, model=model, synthetic=synthetic,
            reference_node=reference, suspect_node=suspect, spec={"tp": tp, "self_replays": 2, "steps": steps},
            state="running",
        ),
        attempts=[
            AttemptRow(
                run_id=run_id, attempt=1, state="closed", started_at=began, ended_at=began + 55, reason=reason,
                reference_host=reference_host, suspect_host=suspect_host, devices=tp,
            )
        ],
        steps=[_step(run_id, step, hits, hours * HOUR / steps / tp) for step in range(steps + 1)],
        mismatches=mismatches,
        controls=controls,
        faults=[],
        closings=[closing],
        gradients=[msgspec.structs.replace(g, **known) for g in gradients],
        drifts=[msgspec.structs.replace(d, **known) for d in drifts],
        evaluations=[msgspec.structs.replace(e, **known) for e in evaluations],
    )  # fmt: skip
    decision = decide(records)
    records.run = msgspec.structs.replace(
        records.run, state="finished", verdict=decision.verdict.value, reason=decision.reason,
        sentence=decision.sentence, finished_at=began + 60,
    )  # fmt: skip
    return records


def gradient(step: int, noise: float, signal: float, leaf: str = "", mismatched: int = 1) -> GradientRecord:
    """Of no run yet."""
    return GradientRecord(
        run_id=UUID(int=0), attempt=1, step=step, leaf=leaf, noise=noise, signal=signal, suspect=signal, cosine=1.0,
        elements=100, mismatched=mismatched,
    )  # fmt: skip


def drift(
    step: int, value: float | None, *, arm: str = "suspect", method: str = "exact", part: str = ""
) -> DriftRecord:
    """Of no run yet; the norm is 10."""
    return DriftRecord(
        run_id=UUID(int=0), attempt=1, step=step, arm=arm, part=part, method=method, drift=value, norm=10.0, error=0.0
    )


def answer(question: str, arm: str, scores: Sequence[float]) -> EvaluationRecord:
    """After step 10, of no run yet."""
    return EvaluationRecord(
        run_id=UUID(int=0), attempt=1, step=10, task="quiz", question=question, arm=arm, scores=list(scores), chosen=0,
        answer=0,
    )  # fmt: skip


def store_run(engine: Engine, records: RunRecords) -> UUID:
    """Write a run as a supervisor and a reference worker do; the verdict is given by the real rules."""
    run, (attempt,) = records.run, records.attempts
    bare = msgspec.structs.replace(run, state="running", verdict=None, reason="", sentence="", finished_at=None)
    store.create_run(engine, bare)
    store.start_attempt(engine, msgspec.structs.replace(attempt, state="running", ended_at=None, reason=""))
    write(engine, records)
    recovery.close_attempt(engine, run.run_id, 1, attempt.reason)
    verdict, reason, sentence = recovery.judge(records)
    store.finish_run(
        engine, run.run_id, verdict=verdict, reason=reason, sentence=sentence, finished_at=run.finished_at or 0.0
    )
    return run.run_id


def write(engine: Engine, records: RunRecords) -> None:
    groups: tuple[Sequence[Record], ...] = (
        records.steps, records.mismatches, records.controls, records.gradients, records.drifts, records.evaluations,
        records.closings,
    )  # fmt: skip
    with open_connection(engine.url.render_as_string(hide_password=False)) as conn:
        writer.prepare(conn)
        writer.write(conn, [writer.line(record) for group in groups for record in group])


def _mismatch(run_id: UUID, step: int, rank: int, mismatched: int) -> MismatchRecord:
    return MismatchRecord(
        run_id=run_id, attempt=1, step=step, site=3, rank=rank, phase=Phase.FWD, module=Module.ATTN, layer=2,
        tensor="out", cause=Cause.COMPUTE, elements=1000, mismatched=mismatched, severity_mean=0.5,
        severity_median=0.25, severity_max=4.0, zero_reference=0, nonfinite=0, nullified=1,
        bits=[mismatched] + [0] * 15, first_index=7, extent=Extent.SCATTERED, box=[[0, 9]],
        replay=ReplayClass.TRANSIENT, replays=2, replays_right=2, detected_at=BEGAN,
    )  # fmt: skip


def _step(run_id: UUID, step: int, hits: Mapping[int, int], duration: float) -> StepRecord:
    classes = {
        name: ClassCounts(
            sites, elements, int(step in hits and name == "fwd/attn/out"),
            hits.get(step, 0) if name == "fwd/attn/out" else 0,
        )
        for name, (sites, elements) in CLASSES.items()
        if step or name.endswith("param")
    }  # fmt: skip
    return StepRecord(
        run_id=run_id, attempt=1, step=step, classes=classes, rows=int(step in hits), loss_reference=2.0,
        loss_suspect=2.0, duration_s=duration if step else 0.0, finished_at=BEGAN, sync="optimistic",
    )  # fmt: skip


def _controls(
    run_id: UUID, tp: int, steps: int, device_count: int, programs: str, differs: Sequence[Role]
) -> list[ControlRecord]:
    def control(
        name: ControlName, role: Role, step: int, subject: str, repeats: int = 0, value: str = "", *, ok: bool = True
    ) -> ControlRecord:
        detail = {"reference": value, "suspect": value} if name is ControlName.PARITY else {}
        return ControlRecord(
            run_id=run_id, attempt=1, name=name, role=role, step=step, subject=subject, ok=ok, repeats=repeats,
            detail=detail,
        )  # fmt: skip

    parity = dict.fromkeys(REQUIRED_PARITY, "same") | {
        "device_count": str(device_count),
        "programs": ";".join(PROGRAMS),
        **{f"program.{name}": f"{name} {programs}" for name in PROGRAMS},
    }
    out = [control(ControlName.PARITY, Role.SUSPECT, 0, field, value=value) for field, value in parity.items()]
    out.append(control(ControlName.KNOWN_REDUCTION, Role.SUSPECT, 0, ""))
    for when, step in (("start", 1), ("end", steps)):
        for role in Role:
            out += [
                control(
                    ControlName(f"self_replay_{when}"), role, step, program, 2,
                    ok=not (role in differs and when == "end" and program == "attn.fwd"),
                )
                for program in PROGRAMS
            ]  # fmt: skip
        for subject in ("digest", *(f"rank {r}" for r in range(tp))):
            out.append(control(ControlName(f"positive_{when}"), Role.SUSPECT, step, subject))
    out.append(control(ControlName.REPLAY_REFERENCE, Role.REFERENCE, steps, "", 2))
    return out
