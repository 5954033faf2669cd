"""What one run adds to its node's profile: a small, mergeable summary of its records. Pure.

Made once, when the run gets its verdict, in the same transaction (``tandem.db.store``); kept when retention drops the
rows. The statistics are of the conclusive attempts of a conclusive run, and empty for any other; the facts on which
a node's verdict rests are of all attempts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import isfinite

import msgspec

from tandem import formats
from tandem.records import MismatchRecord, RunRecords, StepRecord
from tandem.runs import parts
from tandem.runs.attempt import devices_of_node
from tandem.runs.independent import affected, independent
from tandem.runs.lineage import resumed_at
from tandem.runs.rates import timing_of
from tandem.runs.verdict import AttemptFacts, attempt_facts
from tandem.sites import in_frequency
from tandem.statistics.drift import DriftLine, drift_lines, spikes_of
from tandem.statistics.frequency import Sums, sums
from tandem.statistics.noise import Noise, noise
from tandem.statistics.sketch import sketch
from tandem.statistics.timing import Timing
from tandem.vocabulary import REGULAR_ENDS, AttemptState, Cause, ReplayClass, Verdict, Workload

VERSION = 4
"""Of what is stored: a run whose summary has another one is summarised anew, as long as its rows are there."""
BINS = 120
"""Most bins of an attempt's timeline."""


class ClassStats(msgspec.Struct, frozen=True, kw_only=True):
    """One site class of a run."""

    sites: int
    mismatched_sites: int
    sums: Sums
    severity_weight: int = 0
    """Elements behind ``severity_total``."""
    severity_total: float = 0.0
    """Sum of the tensors' mean severities times their elements; divided by the weight it is the mean."""
    severity_max: float | None = None
    severities: dict[int, int] = {}
    """Sketch of the tensors' median severities."""


class Cells(msgspec.Struct, frozen=True, array_like=True):
    """One line of a map."""

    phase: str
    module: str
    tensor: str
    cells: dict[int, tuple[int, int]]
    """Layer or rank -> (mismatching tensors, elements)."""


class TimelineBin(msgspec.Struct, frozen=True, array_like=True):
    """Successive steps of an attempt."""

    attempt: int
    first: int
    """Number of the first step."""
    steps: int
    affected: int
    elements: int
    """Per-rank partials only, as in the frequency; so is the next."""
    mismatched: int


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a run's conclusive attempts."""

    classes: dict[str, ClassStats] = {}
    layers: list[Cells] = []
    ranks: list[Cells] = []
    by_rank: dict[int, tuple[int, int]] = {}
    bits: dict[int, list[int]] = {}
    extents: dict[str, int] = {}
    replays: dict[str, int] = {}
    findings: dict[str, int] = {}
    nonfinite: int = 0
    nullified: int = 0
    zero_reference: int = 0
    uncounted: int = 0
    capped: bool = False
    timing: Timing = Timing()
    timeline: list[TimelineBin] = []
    noise: Noise | None = None
    drifts: list[DriftLine] = []
    loss_spikes: dict[str, list[int]] = {}


class RunProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A run in its node's profile."""

    version: int = VERSION
    executables: str = ""
    """Digest of the executables of the last counted attempt (``verdict.executables``); of the last one without any."""
    comparable: bool = False
    """Whether what was found in it is its suspect's, although it may be inconclusive."""
    reference_differs: bool = False
    suspect_differs: bool = False
    findings: int = 0
    """Mismatch rows, self-replays that differ and unequal answers of comparable attempts, the inconclusive included."""
    attempts: list[int] = []
    """Those that are counted: the conclusive ones of a conclusive run."""
    steps: int = 0
    affected_steps: int = 0
    sites: int = 0
    elements: int = 0
    mismatched_sites: int = 0
    mismatched_elements: int = 0
    device_seconds: float = 0.0
    devices: list[str] = []
    """Names of the suspect's devices, by rank."""
    device_count: int = 0
    """Devices that the suspect has; 0: never told."""
    evidence: str = ""
    """What was found, in a few words."""
    detail: Detail = Detail()


def two_hosts(records: RunRecords) -> bool:
    """Whether every attempt ran on two hosts: a pair on one host says nothing about a node."""
    run = records.run
    return run.reference_node != run.suspect_node and all(
        a.reference_host and a.suspect_host and a.reference_host != a.suspect_host for a in records.attempts
    )


def profile_run(records: RunRecords) -> RunProfile:
    """Summary of a finished run; the order of the records does not matter."""
    facts = attempt_facts(records)
    counted = _counted(records, facts)
    chosen = [f for f in facts if f.attempt in counted] or facts
    capped = any(c.capped for c in records.closings if c.attempt in counted)
    steps = sorted((s for s in records.steps if s.attempt in counted), key=lambda s: (s.attempt, s.step))
    rows = sorted((m for m in records.mismatches if m.attempt in counted), key=parts.row_order)
    trained = [s for s in steps if s.step > 0]
    totals = [c for s in steps for c in s.classes.values()]
    closings = [c for c in records.closings if c.attempt in counted]
    selves = sorted({p for f in facts if f.attempt in counted for p in f.suspect_differs})
    answers = sum(f.unequal_answers for f in facts if f.attempt in counted)
    detail = _detail(records, counted, steps, rows, selves, answers, capped=capped) if counted else Detail()
    return RunProfile(
        executables=next((f.executables for f in reversed(chosen) if f.executables), ""),
        comparable=any(f.comparable for f in facts),
        reference_differs=any(f.reference_differs for f in facts),
        suspect_differs=any(f.suspect_differs and f.comparable for f in facts),
        findings=sum(f.findings for f in facts if f.comparable),
        attempts=sorted(counted),
        steps=len(trained),
        affected_steps=detail.timing.affected,
        sites=sum(c.sites for c in totals),
        elements=sum(c.elements for c in totals),
        mismatched_sites=sum(c.mismatched_sites for c in detail.classes.values()),
        mismatched_elements=sum(c.sums.mismatched for c in detail.classes.values()),
        device_seconds=sum(c.device_seconds for c in closings),
        devices=max((c.devices for c in closings), key=len, default=[]),
        device_count=_device_count(records, counted),
        evidence=_evidence(detail, selves) if counted else _open_findings(facts),
        detail=detail,
    )


def _counted(records: RunRecords, facts: Sequence[AttemptFacts]) -> set[int]:
    """The conclusive attempts of a conclusive run.

    A verdict is given once: where the rules have become stricter since, so that no attempt would pass now, those that
    were closed regularly are taken.
    """
    if records.run.verdict not in (Verdict.MATCH, Verdict.MISMATCH):
        return set()
    if conclusive := {f.attempt for f in facts if f.conclusive}:
        return conclusive
    closed = {c.attempt for c in records.closings if c.reason in REGULAR_ENDS}
    return {a.attempt for a in records.attempts if a.state == AttemptState.CLOSED and a.attempt in closed}


def _device_count(records: RunRecords, counted: set[int]) -> int:
    return max((devices_of_node([c for c in records.controls if c.attempt == a]) for a in counted), default=0)


def _detail(
    records: RunRecords,
    counted: set[int],
    steps: list[StepRecord],
    rows: list[MismatchRecord],
    selves: list[str],
    answers: int,
    *,
    capped: bool,
) -> Detail:
    shown = [row for row in rows if row.cause is not Cause.DERIVED]
    compute = [row for row in rows if row.cause is Cause.COMPUTE]
    findings = dict(Counter(r.cause.value for r in shown if r.cause is not Cause.COMPUTE))
    if selves:
        findings["self_replay"] = len(selves)
    if answers:
        findings["unequal_answers"] = answers
    spikes: dict[str, list[int]] = {}
    drifts: list[DriftLine] = []
    for attempt in sorted(counted):
        of_attempt = [d for d in records.drifts if d.attempt == attempt]
        drifts += drift_lines(of_attempt)
        for arm, begins in spikes_of((s for s in steps if s.attempt == attempt), of_attempt).items():
            spikes.setdefault(arm, []).extend(begins)
    told = independent(steps, records.run.workload, resumed_at(records.controls))
    gradient = records.run.workload == Workload.GRADIENT
    return Detail(
        classes=_classes(told, compute),
        layers=[Cells(m.phase, m.module, m.tensor, m.cells) for m in parts.site_map(shown)],
        ranks=_rank_map(shown),
        by_rank=parts.group(shown, lambda row: row.rank),
        bits=parts.bits(compute),
        extents=dict(sorted(Counter(row.extent.value if row.extent else "unknown" for row in compute).items())),
        replays={c.value: n for c in ReplayClass if (n := sum(row.replay is c for row in compute))},
        findings=findings,
        nonfinite=sum(row.nonfinite or 0 for row in compute),
        nullified=sum(row.nullified or 0 for row in compute),
        zero_reference=sum(row.zero_reference or 0 for row in compute),
        uncounted=sum(row.mismatched is None and row.cause is not Cause.DERIVED for row in rows),
        capped=capped,
        timing=timing_of(told),
        timeline=timeline(told, records.run.workload),
        noise=noise((g for g in records.gradients if g.attempt in counted), sum(s.step > 0 for s in steps))
        if gradient
        else None,
        drifts=drifts,
        loss_spikes=spikes,
    )


def class_sums(steps: Iterable[StepRecord]) -> dict[str, Sums]:
    """Sums for the intervals, by site class."""
    series: dict[str, list[tuple[int, int, bool]]] = defaultdict(list)
    for step in steps:
        for name, c in step.classes.items():
            series[name].append((c.elements, c.mismatched_elements, c.mismatched_sites > 0))
    return {name: sums(series[name]) for name in sorted(series, key=parts.class_order)}


def _classes(steps: Sequence[StepRecord], compute: Iterable[MismatchRecord]) -> dict[str, ClassStats]:
    rows: dict[str, list[MismatchRecord]] = defaultdict(list)
    for row in compute:
        rows[f"{row.phase}/{row.module}/{row.tensor.split('.', 1)[0]}"].append(row)
    sites: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for step in steps:
        for name, c in step.classes.items():
            sites[name][0] += c.sites
            sites[name][1] += c.mismatched_sites
    out = {}
    for name, total in class_sums(steps).items():
        mine = rows[name]
        weighted = [(m, parts.with_severity(r)) for r in mine if (m := _finite(r.severity_mean)) is not None]
        out[name] = ClassStats(
            sites=sites[name][0],
            mismatched_sites=sites[name][1],
            sums=total,
            severity_weight=sum(w for _, w in weighted),
            severity_total=min(sum(m * w for m, w in weighted), _LARGEST),
            severity_max=max((m for r in mine if (m := _finite(r.severity_max)) is not None), default=None),
            severities=sketch(r.severity_median for r in mine if r.severity_median is not None),
        )
    return out


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


_LARGEST = 1.7976931348623157e308
"""Of fp64: a sum of severities may exceed it, and JSON has no infinity."""


def _rank_map(rows: Iterable[MismatchRecord]) -> list[Cells]:
    grouped: dict[tuple[str, str, str], list[MismatchRecord]] = defaultdict(list)
    for row in rows:
        tensor = row.tensor if row.cause is Cause.STATE else row.tensor.split(".", 1)[0]
        grouped[row.phase.value, row.module.value, tensor].append(row)
    keys = sorted(grouped, key=lambda k: (*parts.class_order(f"{k[0]}/{k[1]}/"), k[2]))
    by_rank: Callable[[MismatchRecord], int] = lambda row: row.rank
    return [Cells(*key, parts.group(grouped[key], by_rank)) for key in keys]


def timeline(steps: Sequence[StepRecord], workload: str) -> list[TimelineBin]:
    """Mismatches over the trained steps, at most `BINS` bins of equal width an attempt."""
    out = []
    for attempt in sorted({s.attempt for s in steps}):
        mine = sorted((s for s in steps if s.attempt == attempt and s.step > 0), key=lambda s: s.step)
        width = -(-len(mine) // BINS) if mine else 1
        for begin in range(0, len(mine), width):
            group = mine[begin : begin + width]
            points = [parts.point(s, workload) for s in group]
            out.append(
                TimelineBin(
                    attempt,
                    group[0].step,
                    len(group),
                    sum(affected(s) for s in group),
                    sum(p.partial_elements for p in points),
                    sum(p.partial_mismatched for p in points),
                )
            )
    return out


def _evidence(detail: Detail, selves: Sequence[str]) -> str:
    return evidence_words(
        detail.by_rank,
        {name: (c.sums.mismatched, c.sums.elements) for name, c in detail.classes.items()},
        detail.replays,
        detail.findings,
        f"unlike itself in {', '.join(formats.clean(s, 40) for s in selves[:3])}" if selves else "",
    )


def _open_findings(facts: Sequence[AttemptFacts]) -> str:
    found = sum(f.findings for f in facts if f.comparable)
    return f"{formats.plural(found, 'finding')} in an inconclusive run" if found else ""


def evidence_words(
    ranks: dict[int, tuple[int, int]],
    classes: dict[str, tuple[int, int]],
    replays: dict[str, int],
    findings: dict[str, int],
    itself: str = "",
) -> str:
    """``rank 5, fwd/attn, 3e-3, transient``: the class of partials with the largest frequency (else of any tensor), the
    most frequent replay class; empty if nothing was found.
    """
    words = [itself] if itself else []
    if ranks:
        named = ", ".join(map(str, ranks)) if len(ranks) < 4 else ""
        words.append(f"rank{'' if len(ranks) == 1 else 's'} {named}" if named else f"{len(ranks)} ranks")
    hit = {name: m / e for name, (m, e) in classes.items() if e and m}
    partial = {name: f for name, f in hit.items() if in_frequency(name.rsplit("/", 1)[-1])}
    if pool := partial or hit:
        name = max(pool, key=lambda n: pool[n])
        words += [name.rsplit("/", 1)[0] if partial else name, formats.scientific(pool[name], 1)]
    played = {k: n for k, n in replays.items() if k != ReplayClass.NOT_REPLAYED}
    if played:
        words.append(max(played, key=lambda k: played[k]))
    words += [f"{n:,} {k.replace('_', ' ')}" for k, n in findings.items() if k != "self_replay"]
    return ", ".join(words)
