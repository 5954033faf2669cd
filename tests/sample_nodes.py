"""Made-up node profiles for tests of what shows them."""

from __future__ import annotations

from uuid import UUID

from sample_runs import CREATED
from tandem.ids import new_run_id
from tandem.nodes.profile import ClassProfile, DeviceProfile, NodeProfile, RunLine
from tandem.nodes.run_profile import TimelineBin
from tandem.nodes.verdict import NodeDecision, RunFacts
from tandem.runs.parts import MapRow, bound
from tandem.statistics.drift import DriftLine
from tandem.statistics.frequency import per_element, per_step, sums
from tandem.statistics.noise import LeafNoise, Noise
from tandem.statistics.timing import Timing, timing
from tandem.vocabulary import NodeVerdict


def run_id(n: int) -> UUID:
    return new_run_id(CREATED + 3600 * n, bytes(9) + bytes([n]))


def line(n: int, workload: str, verdict: str, *, counted: bool = True, evil: str = "") -> RunLine:
    bins = tuple(
        TimelineBin(1, step, 1, int(step in (5, 6, 14)), 4096, 40 * step if step in (5, 6, 14) else 0)
        for step in range(1, 31)
    )
    facts = RunFacts(
        run_id=run_id(n), workload=workload, kind="suspect", model=f"small{evil}", reference=f"healthy-{n}{evil}",
        suspect=f"bad-1{evil}", created_at=CREATED + 3600 * n, finished_at=CREATED + 3600 * n + 600, verdict=verdict,
        reason=f"completed{evil}", steps=30, affected_steps=3, elements=30 * 4096, mismatched_elements=1000,
        device_hours=0.5,
    )  # fmt: skip
    return RunLine(
        facts=facts,
        counted=counted,
        note="" if counted else f"inconclusive{evil}",
        timeline=bins if counted and workload == "submodule" else (),
        timing=timing(30, (5, 6, 14)) if counted else None,
        noise=Noise(
            steps=30, noisy=3, worst=0.05, worst_step=6, least_cosine=0.998,
            leaves={"attn.1.wq": LeafNoise(3, 70, 30 * 4096)},
        )
        if counted and workload == "gradient"
        else None,
        drifts=tuple(
            DriftLine(
                arm=arm, points=30, first=5, last=30, last_drift=0.3, last_relative=0.01 * i, rate=0.01, nonfinite=0
            )
            for i, arm in enumerate(("suspect", "baseline"), 1)
        )
        if counted and workload == "training"
        else (),
        loss_spikes={"suspect": [14]} if counted and workload == "training" else {},
    )  # fmt: skip


def sample_node(*, clean: bool = False, evil: str = "") -> NodeProfile:
    """A corrupting node with runs of every workload, or a clean one; ``evil`` is put into every free text."""
    runs = tuple(
        line(n, workload, "match" if clean else verdict, counted=verdict != "inconclusive", evil=evil)
        for n, (workload, verdict) in reversed(
            list(enumerate([("submodule", "mismatch"), ("submodule", "mismatch"), ("gradient", "mismatch"),
                            ("training", "mismatch"), ("submodule", "inconclusive")]))
        )
    )  # fmt: skip
    total = sums(
        (4096, 0 if clean else 40 * step * (step in (5, 6)), not clean and step in (5, 6)) for step in range(60)
    )
    return NodeProfile(
        node=f"bad-1{evil}",
        verdict=NodeVerdict.CLEAN if clean else NodeVerdict.CORRUPTING,
        rule="clean" if clean else "reproduced",
        sentence=f"clean: nothing differed{evil}" if clean else f"corrupting: reproduced with 2 references{evil}",
        evidence="" if clean else f"rank 5, fwd/attn, 3e-3, transient, 2 references{evil}",
        since=CREATED,
        missing=() if clean else (f"nothing but patience{evil}",),
        runs=runs,
        as_reference=2,
        counted_runs=4,
        matches=4 if clean else 0,
        references=("healthy-0", "healthy-1"),
        workloads=("gradient", "submodule", "training"),
        steps=120,
        affected_steps=0 if clean else 12,
        per_step=per_step(total),
        sites=1000,
        elements=491520,
        device_hours=2.0,
        mismatched_sites=0 if clean else 14,
        mismatched_elements=0 if clean else 1234,
        bound=bound(120, 2.0, 491520) if clean else None,
        classes=(ClassProfile("fwd", "attn", "out", 1000, 491520, 14, 1234, 120, 12, per_element(total),
                              per_step(total), 3.5, 0.2, 1e12),),
        devices=(DeviceProfile(f"GPU-aa{evil}", 0, 1.0, 0, 0), DeviceProfile("GPU-bb", 1, 1.0, 14, 1234)),
        device_count=8,
        ranks={} if clean else {1: (14, 1234)},
        layer_map=() if clean else (MapRow("fwd", "attn", f"out{evil}", {0: (4, 34), 2: (10, 1200)}),),
        rank_map=() if clean else (MapRow("fwd", "attn", f"out{evil}", {1: (14, 1234)}),),
        bits={} if clean else {16: [3] * 16},
        severities={} if clean else {-25: 4, 0: 9, 121: 1},
        extents={} if clean else {"element": 10, "row": 4},
        replays={} if clean else {"transient": 14},
        findings={} if clean else {"self_replay": 1},
        nonfinite=0,
        nullified=5,
        zero_reference=0,
        uncounted=0,
        timing=Timing() if clean else timing(30, (5, 6, 14)),
        wcnts=None if clean else 0.05,
        wcnts_run=None if clean else run_id(2),
        leaves={} if clean else {f"attn.1.wq{evil}": 5.7e-4},
        drift_rate=None if clean else 0.01,
        decisions=(NodeDecision("cleared", f"new board{evil}", f"ana{evil}", CREATED - 9000),),
        not_checked=(f"Other temperatures{evil}.",),
    )  # fmt: skip
