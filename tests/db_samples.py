"""Runs and records for the tests of the database, and small questions to it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from tandem.db import store
from tandem.ids import new_run_id
from tandem.records import (
    AttemptRow,
    ClassCounts,
    ClosingRecord,
    ControlRecord,
    FaultRecord,
    MismatchRecord,
    Record,
    RunRow,
    StepRecord,
)
from tandem.vocabulary import Cause, ControlName, Extent, Module, Phase, Role


def make_run(
    engine: Engine,
    *,
    synthetic: bool = False,
    hosts: tuple[str, str] = ("healthy", "sick"),
    supervisor: Mapping[str, Any] | None = None,
) -> UUID:
    """Create a run with one running attempt."""
    now = time.time()
    run_id = new_run_id(now, os.urandom(10))
    store.create_run(engine, run_row(run_id, synthetic=synthetic), supervisor=supervisor)
    store.start_attempt(
        engine,
        AttemptRow(
            run_id=run_id,
            attempt=1,
            state="running",
            started_at=now,
            reference_host=hosts[0],
            suspect_host=hosts[1],
            devices=2,
        ),
    )
    return run_id


def run_row(run_id: UUID, *, synthetic: bool = False) -> RunRow:
    return RunRow(
        run_id=run_id,
        created_at=1_790_000_000.25,
        workload="submodule",
        kind="suspect",
        model="tiny",
        synthetic=synthetic,
        reference_node="healthy",
        suspect_node="sick",
        spec={"tp": 2, "model": "tiny"},
        state="running",
    )


def step(run_id: UUID, number: int) -> StepRecord:
    return StepRecord(
        run_id=run_id,
        attempt=1,
        step=number,
        classes={"fwd/attn/out": ClassCounts(4, 400, 1, 3), "bwd/ffn/dx": ClassCounts(4, 400, 0, 0)},
        rows=1,
        loss_reference=2.5,
        duration_s=0.5,
        finished_at=1_790_000_000.5,
        sync="optimistic",
    )


def mismatch(run_id: UUID, number: int, site: int = 0, rank: int = 0, tensor: str = "out") -> MismatchRecord:
    return MismatchRecord(
        run_id=run_id,
        attempt=1,
        step=number,
        site=site,
        rank=rank,
        phase=Phase.FWD,
        module=Module.ATTN,
        layer=3,
        tensor=tensor,
        cause=Cause.COMPUTE,
        elements=100,
        mismatched=3,
        severity_mean=0.125,
        bits=[0, 3, 0],
        first_index=17,
        extent=Extent.TILE,
        box=[[0, 1], [2, 3]],
        detected_at=1_790_000_000.125,
    )


def fault(run_id: UUID, number: int) -> FaultRecord:
    return FaultRecord(run_id=run_id, attempt=1, step=number, site=0, rank=0, level="output", changed=3, elements=[17])


def some_records(run_id: UUID, steps: int) -> list[Record]:
    """One step, mismatch and fault per step, a control, and the closing record that counts them."""
    records: list[Record] = []
    for number in range(steps):
        records += [
            step(run_id, number),
            mismatch(run_id, number),
            FaultRecord(
                run_id=run_id, attempt=1, step=number, site=0, rank=0, level="output", changed=3, elements=[17]
            ),
        ]
    records.append(
        ControlRecord(
            run_id=run_id, attempt=1, name=ControlName.PARITY, role=Role.REFERENCE, step=0, subject="", ok=True
        )
    )
    records.append(
        ClosingRecord(
            run_id=run_id,
            attempt=1,
            steps=steps,
            mismatches=steps,
            mismatches_total=steps,
            controls=1,
            faults=steps,
            capped=False,
            reason="completed",
            device_seconds=float(steps),
            devices=["cpu:0", "cpu:1"],
            finished_at=1_790_000_100.0,
        )
    )
    return records


def scalar(engine: Engine, query: str, **values: Any) -> Any:
    with engine.connect() as conn:
        return conn.scalar(text(query), values)
