"""Runs of one node whose rows differ in everything that a profile counts, drawn by a seed."""

from __future__ import annotations

import random

import msgspec

from node_runs import BEGAN, HOUR, drift, gradient, node_run
from tandem.records import ClassCounts, GradientRecord, MismatchRecord, RunRecords
from tandem.runs.verdict import decide
from tandem.vocabulary import Cause, Extent, Module, Phase, ReplayClass

LAYERS, RANKS, WIDTHS = 4, 2, {"out": 16, "dx": 16, "dw": 32}
PLACES = [
    (Phase.FWD, Module.ATTN, "out"), (Phase.FWD, Module.FFN, "out"), (Phase.BWD, Module.ATTN, "dx"),
    (Phase.BWD, Module.FFN, "dx"), (Phase.BWD, Module.FFN, "dw.w1"),
]  # fmt: skip
ELEMENTS = 1000
"""Of each tensor."""


def rich_run(seed: int, *, steps: int = 60, hours: float = 1.0, **fields: object) -> RunRecords:
    """A run that mismatches in bursts, in several classes, layers and ranks; other fields as of `node_run`."""
    rng = random.Random(seed)
    records = node_run(
        steps=steps, hours=hours, seed=seed, began=BEGAN + seed * HOUR, devices=("GPU-a", f"GPU-{seed % 2}"),
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip
    bad, on = [], False
    for step in range(1, steps + 1):
        on = rng.random() < (0.6 if on else 0.15)
        if on:
            bad.append(step)
    rows = [row for step in bad for row in _rows(rng, records, step)]
    names = [f"{p}/{m}/{t.split('.')[0]}" for p, m, t in PLACES]
    made = []
    for s in records.steps:
        mine = [r for r in rows if r.step == s.step]
        counted = [r for r in mine if r.cause is Cause.COMPUTE]
        classes = dict(s.classes) if s.step == 0 else {}
        for name in names if s.step else ():
            hit = [r for r in counted if f"{r.phase}/{r.module}/{r.tensor.split('.')[0]}" == name]
            compared = LAYERS * RANKS
            size = ELEMENTS * compared + (seed * 40 if name.startswith("fwd") else 0)  # runs of unequal shape
            classes[name] = ClassCounts(compared, size, len(hit), sum(r.mismatched or 0 for r in hit))
        made.append(msgspec.structs.replace(s, classes=classes, rows=len(mine)))
    records.steps, records.mismatches = made, rows
    records.closings = [
        msgspec.structs.replace(c, mismatches=len(rows), mismatches_total=len(rows)) for c in records.closings
    ]
    return _judged(records)


def _rows(rng: random.Random, records: RunRecords, step: int) -> list[MismatchRecord]:
    places = [(p, m, t, layer, rank) for p, m, t in PLACES for layer in range(LAYERS) for rank in range(RANKS)]
    out = []
    for site, (phase, module, tensor, layer, rank) in rng.sample(list(enumerate(places)), rng.randint(1, 6)):
        width, n = WIDTHS[tensor.split(".")[0]], rng.randint(1, 300)
        state = rng.random() < 0.1
        median = None if rng.random() < 0.1 else 10 ** rng.uniform(-8, 8)
        zero, odd = (rng.randint(0, n // 3) for _ in range(2))
        out.append(
            MismatchRecord(
                run_id=records.run.run_id, attempt=1, step=step, site=site, rank=rank, phase=phase, module=module,
                layer=layer, tensor="input.w" if state else tensor, cause=Cause.STATE if state else Cause.COMPUTE,
                elements=ELEMENTS, mismatched=n, severity_mean=None if median is None else median * 3,
                severity_median=median, severity_max=None if median is None else median * 40, zero_reference=zero,
                nonfinite=odd, nullified=rng.randint(0, n), bits=[rng.randint(0, n) for _ in range(width)],
                first_index=7, extent=rng.choice(list(Extent)), box=[[0, 9]], replay=rng.choice(list(ReplayClass)),
                replays=2, replays_right=1, detected_at=BEGAN,
            )
        )  # fmt: skip
    return out


def noisy_run(seed: int, *, steps: int = 40, **fields: object) -> RunRecords:
    """A gradient run whose gradients differ in a third of the steps, in one or two leaves."""
    rng = random.Random(seed)
    hit = sorted(rng.sample(range(1, steps + 1), steps // 3))
    rows: list[GradientRecord] = []
    for step in hit:
        noise, signal = 10 ** rng.uniform(-6, -1), rng.uniform(1, 3)
        rows.append(gradient(step, noise, signal, mismatched=rng.randint(1, 90)))
        rows += [gradient(step, noise / 2, signal, leaf, rng.randint(1, 90)) for leaf in rng.sample(["a", "b", "c"], 2)]
    return node_run(
        steps=steps, workload="gradient", hits=dict.fromkeys(hit, 3), seed=seed, began=BEGAN + seed * HOUR,
        devices=("GPU-a", f"GPU-{seed % 2}"), gradients=rows, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def drifting_run(seed: int, *, steps: int = 40, **fields: object) -> RunRecords:
    """A training run whose drift grows from its tenth step on, beside a baseline's."""
    rng = random.Random(seed)
    rate = rng.uniform(0.01, 0.2)
    rows = [
        drift(step, 1e-3 * 2.718281828 ** (rate * step + rng.gauss(0, 0.3)), arm=arm)
        for arm in ("suspect", "baseline")
        for step in range(1 if arm == "baseline" else 10, steps + 1)
    ]
    return node_run(
        steps=steps, workload="training", hits={10: 1}, seed=seed, began=BEGAN + seed * HOUR,
        devices=("GPU-a", f"GPU-{seed % 2}"), drifts=rows, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def _judged(records: RunRecords) -> RunRecords:
    decision = decide(records)
    records.run = msgspec.structs.replace(
        records.run, verdict=decision.verdict.value, reason=decision.reason, sentence=decision.sentence
    )
    return records
