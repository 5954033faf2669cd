"""Made-up but consistent runs for tests of what reads records: counts of the steps equal the mismatch rows."""

from __future__ import annotations

import random
from uuid import UUID

from tandem.ids import new_run_id
from tandem.records import (
    AttemptRow,
    ClassCounts,
    ClosingRecord,
    ControlRecord,
    FaultRecord,
    MismatchRecord,
    RunRecords,
    RunRow,
    StepRecord,
)
from tandem.vocabulary import Cause, ControlName, Extent, Module, Phase, ReplayClass, Role

CREATED = 1_764_500_000.0
CLASSES = (
    ("fwd", "embed", "out"),
    ("fwd", "attn", "out"),
    ("fwd", "attn", "reduced"),
    ("fwd", "ffn", "out"),
    ("fwd", "head", "out"),
    ("bwd", "ffn", "dx"),
    ("bwd", "attn", "dx"),
    ("bwd", "attn", "dw"),
    ("update", "optimizer", "grad_norm"),
    ("update", "attn", "param"),
)
ELEMENTS = 4096
"""Elements of every tensor."""


def sample_run(
    *,
    seed: int = 0,
    steps: int = 12,
    layers: int = 4,
    tp: int = 2,
    rows: int = 0,
    verdict: str | None = None,
    synthetic: bool = False,
    closed: bool = True,
    evil: str = "",
    run_id: UUID | None = None,
) -> RunRecords:
    """A run with ``rows`` mismatches (fewer if two fall on one place); ``evil`` is put into every free text."""
    rng = random.Random(seed)
    run_id = run_id or new_run_id(CREATED, rng.randbytes(10))
    verdict = verdict or ("mismatch" if rows else "match")
    found: dict[tuple[int, int, int], MismatchRecord] = {}
    for _ in range(rows):
        row = _mismatch(rng, run_id, steps, layers, tp, evil)
        found[row.step, row.site, row.rank] = row
    mismatches = sorted(found.values(), key=lambda m: (m.step, m.site, m.rank))
    controls = _controls(run_id, tp, steps, end=closed, evil=evil)
    faults = [
        FaultRecord(
            run_id=run_id, attempt=1, step=m.step, site=m.site, rank=m.rank, level="output",
            changed=m.mismatched or 0, elements=[m.first_index or 0],
        )
        for m in mismatches
        if synthetic and m.cause is Cause.COMPUTE
    ]  # fmt: skip
    closing = ClosingRecord(
        run_id=run_id, attempt=1, steps=steps + 1, mismatches=len(mismatches), mismatches_total=len(mismatches),
        controls=len(controls), faults=len(faults), capped=False, reason="completed", device_seconds=steps * tp * 2.0,
        devices=[f"cpu:{i}{evil}" for i in range(tp)], finished_at=CREATED + 2 * steps,
    )  # fmt: skip
    return RunRecords(
        run=RunRow(
            run_id=run_id, created_at=CREATED, workload="submodule", kind="suspect", model="tiny", synthetic=synthetic,
            reference_node=f"healthy-7{evil}", suspect_node=f"quarantined-42{evil}",
            spec={"workload": "submodule", "model": "tiny", "tp": tp, "steps": steps, "sync": "optimistic", "seed": 9,
                  "data": [f"a corpus.txt{evil}"]},
            state="finished", verdict=verdict, reason="completed", sentence=f"{verdict}: as the test says{evil}",
            finished_at=CREATED + 60,
        ),
        attempts=[
            AttemptRow(
                run_id=run_id, attempt=1, state="closed" if closed else "orphaned", started_at=CREATED,
                ended_at=CREATED + 50, reason="completed", fingerprint="ab12" * 8,
                parity={"jaxlib": "0.10.2", "flags": f"--x{evil}"},
                reference_host="host-a", suspect_host=f"host-b{evil}",
            )
        ],
        steps=[_step(run_id, step, layers, tp, mismatches) for step in range(steps + 1)],
        mismatches=mismatches,
        controls=controls,
        faults=faults,
        closings=[closing] if closed else [],
    )  # fmt: skip


def _mismatch(rng: random.Random, run_id: UUID, steps: int, layers: int, tp: int, evil: str) -> MismatchRecord:
    kind = rng.randrange(len(CLASSES))
    phase, module, family = CLASSES[kind]
    layer = rng.randrange(layers) if module in ("attn", "ffn") else -1
    state = rng.random() < 0.1
    n = rng.randint(1, ELEMENTS)
    leaf = {"dw": ".wq", "param": ".wq"}.get(family, "")
    return MismatchRecord(
        run_id=run_id, attempt=1, step=rng.randint(1, steps), site=kind * 100 + layer + 1, rank=rng.randrange(tp),
        phase=Phase(phase), module=Module(module), layer=layer,
        tensor=f"input.x{evil}" if state else family + leaf,
        cause=Cause.STATE if state else Cause.COMPUTE, elements=ELEMENTS, mismatched=n,
        severity_mean=10 ** rng.uniform(-3, 12), severity_median=10 ** rng.uniform(-3, 3),
        severity_max=10 ** rng.uniform(3, 12), zero_reference=0, nonfinite=rng.randint(0, 2), nullified=1,
        bits=[rng.randint(0, n) for _ in range(rng.choice((16, 32)))], first_index=rng.randrange(ELEMENTS),
        extent=rng.choice(list(Extent)), box=[[0, 3], [5, 17]], replay=rng.choice(list(ReplayClass)), replays=3,
        replays_right=1, generation=1, detected_at=CREATED + 7.25,
    )  # fmt: skip


def _step(run_id: UUID, step: int, layers: int, tp: int, mismatches: list[MismatchRecord]) -> StepRecord:
    classes = {}
    for phase, module, family in CLASSES:
        if step == 0 and family != "param":
            continue
        mine = [
            m
            for m in mismatches
            if (m.step, m.phase, m.module, m.tensor.split(".")[0], m.cause)
            == (step, phase, module, family, Cause.COMPUTE)
        ]
        sites = tp * (layers if module in ("attn", "ffn") else 1)
        classes[f"{phase}/{module}/{family}"] = ClassCounts(
            sites, sites * ELEMENTS, len(mine), sum(m.mismatched or 0 for m in mine)
        )
    return StepRecord(
        run_id=run_id, attempt=1, step=step, classes=classes, rows=sum(m.step == step for m in mismatches),
        loss_reference=5.5 - step / 100, loss_suspect=5.5 - step / 100, grad_norm_reference=1.25, duration_s=2.0,
        busy_s=1.5, link_bytes=1000 + step, full_bytes=10_000_000, window_max=5, finished_at=CREATED + 2 * step,
        sync="optimistic",
    )  # fmt: skip


def _controls(run_id: UUID, tp: int, steps: int, *, end: bool, evil: str) -> list[ControlRecord]:
    def control(name: ControlName, role: Role, step: int, subject: str, repeats: int = 0) -> ControlRecord:
        return ControlRecord(
            run_id=run_id, attempt=1, name=name, role=role, step=step, subject=subject + evil, ok=True,
            repeats=repeats, detail={"note": f"x{evil}"},
        )  # fmt: skip

    out = [control(ControlName.PARITY, Role.SUSPECT, 0, field) for field in ("jaxlib", "flags")]
    out.append(control(ControlName.KNOWN_REDUCTION, Role.SUSPECT, 0, ""))
    for when, step in (("start", 1), ("end", steps)):
        if when == "end" and not end:
            continue
        for role in Role:
            out += [control(ControlName(f"self_replay_{when}"), role, step, p, 8) for p in ("attn.fwd", "ffn.fwd")]
        out += [control(ControlName(f"positive_{when}"), Role.SUSPECT, step, f"rank {r}") for r in range(tp)]
    if end:
        out.append(control(ControlName.REPLAY_REFERENCE, Role.REFERENCE, steps, "", 3))
    return out
