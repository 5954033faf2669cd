"""Small runs made from raw tensors: the records beside the very arrays that they are of.

What a worker measures goes through `tandem.statistics.mismatch`; what a page shows of it can so be computed anew from
the arrays, by another path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from sample_runs import sample_run
from tandem.records import (
    ClassCounts,
    ControlRecord,
    DriftRecord,
    EvaluationRecord,
    GradientRecord,
    MismatchRecord,
    RunRecords,
    StepRecord,
)
from tandem.report.run_page import render
from tandem.sites import Site
from tandem.statistics.mismatch import compare
from tandem.vocabulary import Cause, ControlName, Module, Phase, ReplayClass, Role

STEPS, LAYERS, TP = 40, 3, 2
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass
class RawRun:
    """Records, and what they are of."""

    records: RunRecords
    tensors: dict[tuple[int, Site, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """(step, site, rank) -> reference, suspect."""
    params: dict[tuple[int, str], dict[str, np.ndarray]] = field(default_factory=dict)
    """(step, arm) -> parameter group -> its parameters, flat fp32."""
    losses: dict[tuple[int, str], float] = field(default_factory=dict)
    norms: dict[tuple[int, str], float] = field(default_factory=dict)
    """Gradient norms, by (step, arm)."""


@cache
def made_page(make: Callable[[], RawRun]) -> tuple[RawRun, str]:
    """A run and its page, made once for all tests of a process; they change neither."""
    run = make()
    return run, render(run.records)


def submodule_run(seed: int = 0, evil: str = "") -> RawRun:
    """RQ1: a suspect that corrupts in two bursts, at outputs and at a weight gradient."""
    rng = np.random.default_rng(seed)
    sites = [
        Site(n, phase, module, layer, tensor, (8, 16), dtype)
        for n, (phase, module, layer, tensor, dtype) in enumerate(
            (phase, module, layer, tensor, dtype)
            for phase, tensor, dtype in (
                (Phase.FWD, "out", "bfloat16"),
                (Phase.BWD, "dx", "bfloat16"),
                (Phase.BWD, "dw.wq", "float32"),
            )
            for module in (Module.ATTN, Module.FFN)
            for layer in range(LAYERS)
        )
    ]
    run = RawRun(sample_run(steps=STEPS, layers=LAYERS, tp=TP, verdict="mismatch", evil=evil))
    for step in range(1, STEPS + 1):
        for site in sites:
            for rank in range(TP):
                reference = rng.standard_normal(site.shape).astype(BF16 if site.dtype == "bfloat16" else np.float32)
                suspect = reference.copy()
                bad = rank == 1 and (7 <= step <= 10 or step == 31) and rng.random() < 0.6
                if bad:
                    _corrupt(rng, suspect)
                run.tensors[step, site, rank] = reference, suspect
    _fill(run, rng)
    return run


def gradient_run(seed: int = 0) -> RawRun:
    """RQ2: leaves that differ in some steps, once by a NaN."""
    rng = np.random.default_rng(seed)
    leaves = [(Module.ATTN, layer, "wq") for layer in range(LAYERS)] + [(Module.FFN, layer, "w1") for layer in range(2)]
    sites = [
        Site(n, Phase.BWD, module, layer, f"dw.{leaf}", (12, 20), "float32")
        for n, (module, layer, leaf) in enumerate(leaves)
    ]
    run = RawRun(sample_run(steps=STEPS, layers=LAYERS, tp=TP, verdict="mismatch"))
    for step in range(1, STEPS + 1):
        for site in sites:
            for rank in range(TP):
                reference = rng.standard_normal(site.shape).astype(np.float32)
                suspect = reference.copy()
                if step % 9 == 0 and site.number in (1, 4):
                    suspect += (rng.standard_normal(site.shape) * 10.0 ** rng.integers(-6, -1)).astype(np.float32)
                if step == 30 and site.number == 2 and rank == 0:
                    suspect[3, 4] = np.nan
                run.tensors[step, site, rank] = reference, suspect
    _fill(run, rng, workload="gradient")
    for step in range(1, STEPS + 1):
        total: list[GradientRecord] = []
        for site in sites:
            pairs = [run.tensors[step, site, rank] for rank in range(TP)]
            total.append(_gradient(run, step, f"{site.module}.{site.layer}.{site.tensor.split('.')[1]}", pairs))
        if any(g.mismatched for g in total):
            run.records.gradients += [g for g in total if g.mismatched]
            every = [run.tensors[step, site, rank] for site in sites for rank in range(TP)]
            run.records.gradients.append(_gradient(run, step, "", every))
    return run


def training_run(
    seed: int = 0, *, baseline: bool = True, workload: str = "training", resumed: bool = False, wrecked: bool = False
) -> RawRun:
    """RQ3: a suspect that corrupts once and drifts from then on, beside a baseline that drifts from the start.

    With ``resumed`` the first attempt ends after step 25 and a second one goes on from a checkpoint of step 20. With
    ``wrecked`` the suspect's head is not a number from step 36 on: no sketch holds it, exact points do.
    """
    rng = np.random.default_rng(seed)
    groups = ["embed", *(f"{m}.{layer}" for layer in range(LAYERS) for m in ("attn", "ffn")), "head"]
    run = RawRun(sample_run(steps=STEPS, layers=LAYERS, tp=TP, verdict="mismatch"))
    arms = ["reference", "suspect", *(["baseline"] if baseline else [])]
    now = {arm: {g: np.zeros(50, np.float32) for g in groups} for arm in arms}
    for g in groups:
        start = rng.standard_normal(50).astype(np.float32)
        for arm in arms:
            now[arm][g] = start + (
                0 if arm != "baseline" else rng.standard_normal(50).astype(np.float32) * np.float32(0.01)
            )
    steps: list[StepRecord] = []
    for step in range(1, STEPS + 1):
        move = {g: rng.standard_normal(50).astype(np.float32) * np.float32(0.02) for g in groups}
        for arm in arms:
            for g in groups:
                noise = 0.0 if arm == "reference" or (arm == "suspect" and step < 12) else 1e-4 * step
                extra = rng.standard_normal(50).astype(np.float32) * np.float32(noise)
                now[arm][g] = now[arm][g] + move[g] + extra
            if wrecked and arm == "suspect" and step >= 36:
                now[arm]["head"][7] = np.nan
            run.params[step, arm] = {g: v.copy() for g, v in now[arm].items()}
            spike = 9.0 if arm == "suspect" and step == 33 else 0.0
            drift = float(_distance(now[arm], now["reference"]))
            run.norms[step, arm] = float(np.linalg.norm(move["head"])) * (1 + drift / 30)
            run.losses[step, arm] = 5.0 * 0.98**step + drift / 50 + spike
        steps.append(_step(run, step, drifted=step >= 12))
        for arm in arms[1:]:
            run.records.drifts += _drifts(run, rng, step, arm)
    run.records.run = msgspec.structs.replace(
        run.records.run, workload=workload, spec={**run.records.run.spec, "workload": workload, "exact_every": 10}
    )
    run.records.steps = steps
    run.records.mismatches = []
    if resumed:
        _resume(run)
    return run


def finetune_run(seed: int = 0, questions: int = 60) -> RunRecords:
    """Fine-tuning: three arms answer questions of three tasks after steps 20 and 40, some not at all."""
    rng = np.random.default_rng(seed)
    run = training_run(workload="finetune").records
    rows: dict[tuple[object, ...], EvaluationRecord] = {}
    for attempt, step in ((1, 20), (2, 20), (2, 40)):  # a second attempt answered the first ones again
        for task, number in ((f"task {n % 3}", n) for n in range(questions)):
            scores = rng.normal(size=4)
            for arm, spread in (("reference", 0.0), ("suspect", 0.4), ("baseline", 2.0)):
                mine = scores + rng.normal(size=4) * spread * (rng.random() < 0.5)
                if rng.random() < 0.05:
                    mine = np.full(4, np.nan)
                if arm != "reference" and rng.random() < 0.05:
                    continue
                chosen = -1 if np.isnan(mine).all() else int(np.nanargmax(mine))
                rows[attempt, step, task, number, arm] = EvaluationRecord(
                    run_id=run.run.run_id, attempt=attempt, step=step, task=task, question=f"q{number}", arm=arm,
                    scores=mine.tolist(), chosen=chosen, answer=number % 4 if number % 2 else int(scores.argmax()),
                )  # fmt: skip
    run.evaluations = list(rows.values())
    return run


def _resume(run: RawRun) -> None:
    """What steps 21 to 25 of the first attempt say is not part of the course that the second one went on with.

    Its step 0 tells what differed in the checkpoints, as it was since step 12.
    """
    r = run.records
    first = r.attempts[0]
    r.attempts.append(msgspec.structs.replace(first, attempt=2))
    lost = [msgspec.structs.replace(s, loss_suspect=99.0) for s in r.steps if 20 < s.step <= 25]
    r.steps = [msgspec.structs.replace(s, attempt=2) if s.step > 20 else s for s in r.steps] + lost
    r.drifts = [msgspec.structs.replace(d, attempt=2) if d.step > 20 else d for d in r.drifts]
    r.controls.append(
        ControlRecord(
            run_id=r.run.run_id,
            attempt=2,
            name=ControlName.RESUMED,
            role=Role.REFERENCE,
            step=20,
            subject="",
            ok=True,
            detail={"began": "", "diverged": 12, "damaged": ""},
        )
    )
    r.mismatches += [
        MismatchRecord(
            run_id=r.run.run_id,
            attempt=2,
            step=0,
            site=layer,
            rank=0,
            phase=Phase.UPDATE,
            module=Module.ATTN,
            layer=layer,
            tensor="param.wq",
            cause=Cause.DERIVED,
            elements=50,
        )
        for layer in range(LAYERS)
    ]


def _corrupt(rng: np.random.Generator, x: np.ndarray) -> None:
    flat = x.reshape(-1)
    hit = rng.choice(flat.size, rng.integers(1, 9), replace=False)
    bits = flat.view(f"u{x.dtype.itemsize}")
    bits[hit] ^= np.array(1 << int(rng.integers(0, 8 * x.dtype.itemsize - 1)), bits.dtype)
    if rng.random() < 0.3:
        flat[hit[0]] = 0


def _fill(run: RawRun, rng: np.random.Generator, workload: str = "submodule") -> None:
    """Steps and mismatch rows of the tensors, by way of the production's own comparison."""
    r = run.records
    rows: list[MismatchRecord] = []
    classes: dict[int, dict[str, list[int]]] = {}
    for (step, site, rank), (reference, suspect) in run.tensors.items():
        counts = classes.setdefault(step, {}).setdefault(site.site_class, [0, 0, 0, 0])
        counts[0] += 1
        counts[1] += site.elements
        found = compare(suspect, reference)
        if found is None:
            continue
        counts[2] += 1
        counts[3] += found.mismatched
        rows.append(
            MismatchRecord(
                run_id=r.run.run_id, attempt=1, step=step, site=site.number, rank=rank, phase=site.phase,
                module=site.module, layer=site.layer, tensor=site.tensor, cause=Cause.COMPUTE,
                replay=list(ReplayClass)[int(rng.integers(len(ReplayClass)))], replays=3, replays_right=1,
                **found.fields(),
            )
        )  # fmt: skip
    r.mismatches = rows
    r.faults = []
    r.run = msgspec.structs.replace(r.run, workload=workload, spec={**r.run.spec, "workload": workload})
    r.steps = [
        msgspec.structs.replace(
            r.steps[step], classes={name: ClassCounts(*c) for name, c in found.items()},
            rows=sum(m.step == step for m in rows),
        )
        for step, found in classes.items()
    ]  # fmt: skip
    r.closings = [
        msgspec.structs.replace(c, mismatches=len(rows), mismatches_total=len(rows), steps=len(r.steps))
        for c in r.closings
    ]


def _gradient(run: RawRun, step: int, leaf: str, pairs: list[tuple[np.ndarray, np.ndarray]]) -> GradientRecord:
    sums = np.zeros(4)
    mismatched = elements = 0
    for reference, suspect in pairs:
        r, s = reference.astype(np.float64), suspect.astype(np.float64)
        sums += [np.sum((s - r) ** 2), np.sum(r**2), np.sum(s**2), np.sum(s * r)]
        elements += r.size
        found = compare(suspect, reference)
        mismatched += found.mismatched if found else 0
    noise, signal, own = np.sqrt(sums[:3])
    cosine = float(sums[3] / (signal * own)) if np.isfinite(own) and signal * own > 0 else None
    return GradientRecord(
        run_id=run.records.run.run_id, attempt=1, step=step, leaf=leaf, noise=float(noise), signal=float(signal),
        suspect=float(own), cosine=cosine, elements=elements, mismatched=mismatched,
    )  # fmt: skip


def _distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> Any:
    return np.sqrt(sum(np.sum((a[g].astype(np.float64) - b[g].astype(np.float64)) ** 2) for g in a))


def _step(run: RawRun, step: int, *, drifted: bool) -> StepRecord:
    r = run.records
    n = TP * LAYERS
    return msgspec.structs.replace(
        r.steps[step],
        classes={"update/attn/param": ClassCounts(n, 50 * n, n if drifted else 0, 50 * n if drifted else 0)},
        rows=0,
        loss_reference=run.losses[step, "reference"],
        loss_suspect=run.losses[step, "suspect"],
        grad_norm_reference=run.norms[step, "reference"],
        grad_norm_suspect=run.norms[step, "suspect"],
    )


def _drifts(run: RawRun, rng: np.random.Generator, step: int, arm: str) -> list[DriftRecord]:
    mine, reference = run.params[step, arm], run.params[step, "reference"]
    whole = float(_distance(mine, reference))
    norm = float(np.sqrt(sum(np.sum(v.astype(np.float64) ** 2) for v in reference.values())))
    key = {"run_id": run.records.run.run_id, "attempt": 1, "step": step, "arm": arm}
    own = {"loss": run.losses[step, arm], "grad_norm": run.norms[step, arm]} if arm == "baseline" else {}
    estimate = whole * float(1 + 0.01 * rng.standard_normal())
    told = (estimate, 0.01) if np.isfinite(whole) else (None, 1.0)
    out = [DriftRecord(**key, part="", method="sketch", drift=told[0], norm=norm, error=told[1], **own)]
    if step % 10 == 0:
        out.append(DriftRecord(**key, part="", method="exact", drift=whole, norm=norm, error=0.0, **own))
        out += [
            DriftRecord(
                **key, part=g, method="exact", drift=float(np.linalg.norm(mine[g].astype(np.float64) - reference[g])),
                norm=float(np.linalg.norm(reference[g].astype(np.float64))), error=0.0,
            )
            for g in mine
        ]  # fmt: skip
    return out
