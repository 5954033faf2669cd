"""The profile of a node, from the summaries of its runs. Pure; merges, and never reads a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from uuid import UUID

from tandem import formats
from tandem.nodes.profile import ClassProfile, DeviceProfile, NodeProfile, RunLine
from tandem.nodes.run_profile import Cells, ClassStats, Detail, RunProfile, evidence_words
from tandem.nodes.verdict import (
    NodeDecided,
    NodeDecision,
    NodeRules,
    NullPass,
    RunFacts,
    before_clearance,
    cleared_at,
    decide_node,
    present,
)
from tandem.runs.parts import MapRow, bound, class_order
from tandem.statistics.frequency import Sums, per_element, per_step, total
from tandem.statistics.noise import LeafNoise
from tandem.statistics.sketch import merge, quantile
from tandem.statistics.timing import Timing
from tandem.vocabulary import Arm, NodeVerdict, Verdict, Workload


@dataclass(frozen=True, slots=True)
class Summarised:
    """A run and, where it may be counted, its summary."""

    facts: RunFacts
    profile: RunProfile | None


def summarise_node(
    node: str,
    runs: Iterable[Summarised],
    *,
    nulls: Iterable[NullPass] = (),
    unsteady: Mapping[str, float] = MappingProxyType({}),
    decisions: Sequence[NodeDecision] = (),
    as_reference: int = 0,
    rules: NodeRules = NodeRules(),  # noqa: B008 - frozen
) -> NodeProfile:
    """The profile of a node.

    Args:
        node: its name.
        runs: real runs on two hosts with the node on either side, in any order.
        nulls: see `node_verdict.decide_node`, like the following.
        unsteady: of references.
        decisions: about this node.
        as_reference: finished runs in which it was the reference.
        rules: of the verdict.
    """
    listed = sorted(runs, key=lambda r: r.facts.run_id, reverse=True)
    facts = [r.facts for r in listed]
    decided = decide_node(node, facts, nulls=nulls, unsteady=unsteady, decisions=decisions, rules=rules)
    after = cleared_at(decisions)
    counted = [
        (r.facts, r.profile)
        for r in listed
        if r.profile is not None and r.facts.suspect == node and r.facts.conclusive
        and not before_clearance(r.facts, after)
    ]  # fmt: skip
    ids = {f.run_id for f, _ in counted}
    profiles = [p for _, p in counted]
    details = [p.detail for p in profiles]
    steps, when = sum(p.steps for p in profiles), sum((d.timing for d in details), Timing())
    hours = sum(p.device_seconds for p in profiles) / 3600
    elements = sum(p.elements for p in profiles)
    classes, severities = _classes(details)
    by_rank = _sum_cells(d.by_rank for d in details)
    replays = _sum_counts(d.replays for d in details)
    findings = _sum_counts(d.findings for d in details)
    references = tuple(sorted({f.reference for f, _ in counted}))
    evidence = evidence_words(
        by_rank,
        {f"{c.phase}/{c.module}/{c.family}": (c.mismatched_elements, c.elements) for c in classes},
        replays,
        findings,
        "unlike itself" if findings.get("self_replay") else "",
    ) or next((f.evidence for f in facts if f.evidence and not before_clearance(f, after)), "")
    if evidence and len(decided.references) > 1:
        evidence += f", {len(decided.references)} references"
    wcnts, wcnts_run = _wcnts(counted)
    rates = [line.rate for d in details for line in d.drifts if line.arm == Arm.SUSPECT and line.rate is not None]
    device_count = max((f.device_count for f in facts if f.suspect == node), default=0)
    matched = [p for f, p in counted if f.verdict == Verdict.MATCH]
    found = len(matched) < len(counted) or decided.verdict in (NodeVerdict.CORRUPTING, NodeVerdict.SUSPECTED)
    behind = [p for f, p in counted if f.run_id in decided.behind] if decided.verdict is NodeVerdict.CLEAN else matched
    return NodeProfile(
        node=node,
        verdict=decided.verdict,
        rule=decided.rule,
        sentence=decided.sentence,
        evidence=evidence,
        since=decided.since,
        missing=decided.missing,
        runs=tuple(_line(r, node, counted=r.facts.run_id in ids, after=after, rules=rules) for r in listed),
        as_reference=as_reference,
        counted_runs=len(counted),
        matches=len(matched),
        references=references,
        workloads=tuple(sorted({f.workload for f, _ in counted})),
        steps=steps,
        affected_steps=when.affected,
        per_step=per_step(Sums(clusters=when.steps, affected=when.affected)),
        sites=sum(p.sites for p in profiles),
        elements=elements,
        device_hours=hours,
        mismatched_sites=sum(p.mismatched_sites for p in profiles),
        mismatched_elements=sum(p.mismatched_elements for p in profiles),
        bound=bound(
            sum(p.steps for p in behind), sum(p.device_seconds for p in behind) / 3600, sum(p.elements for p in behind)
        )
        if behind and not found
        else None,
        classes=classes,
        devices=_devices(profiles, device_count),
        device_count=device_count,
        ranks=by_rank,
        layer_map=_map(d.layers for d in details),
        rank_map=_map(d.ranks for d in details),
        bits=_bits(d.bits for d in details),
        severities=severities,
        extents=_sum_counts(d.extents for d in details),
        replays=replays,
        findings=findings,
        nonfinite=sum(d.nonfinite for d in details),
        nullified=sum(d.nullified for d in details),
        zero_reference=sum(d.zero_reference for d in details),
        uncounted=sum(d.uncounted for d in details),
        timing=when,
        wcnts=wcnts,
        wcnts_run=wcnts_run,
        leaves=_leaves(counted),
        drift_rate=median(rates) if rates else None,
        decisions=tuple(sorted(decisions, key=lambda d: d.decided_at, reverse=True)),
        not_checked=_not_checked(decided, counted, details, device_count, rules),
    )


def _line(run: Summarised, node: str, *, counted: bool, after: float | None, rules: NodeRules) -> RunLine:
    f, detail = run.facts, run.profile.detail if run.profile is not None and counted else Detail()
    if f.reference == node:
        note = (
            "as reference: it did not repeat its own results"
            if f.reference_differs
            else "as reference of a null run that mismatched"
        )
    elif f.verdict is None:
        note = "not finished"
    elif before_clearance(f, after):
        note = "before the node was cleared: counts no more"
    elif f.verdict == Verdict.INCONCLUSIVE:
        what = f"; {formats.plural(f.findings, 'finding')} all the same" if f.findings else ""
        note = f"inconclusive ({formats.clean(f.reason, 80)}): enters no statistic{what}"
    elif not counted:
        note = "its rows were dropped before it could be summarised: enters no statistic"
    elif f.verdict == Verdict.MATCH and rules.small(f.model):
        note = "too small a model to clear a node"
    else:
        note = ""
    return RunLine(
        facts=f, counted=counted, note=note, timeline=tuple(detail.timeline),
        timing=detail.timing if counted else None, noise=detail.noise, drifts=tuple(detail.drifts),
        loss_spikes=dict(detail.loss_spikes),
    )  # fmt: skip


def _classes(details: Sequence[Detail]) -> tuple[tuple[ClassProfile, ...], dict[int, int]]:
    """The classes, and the sketch of severities of all together."""
    grouped: dict[str, list[ClassStats]] = {}
    for d in details:
        for name, stats in d.classes.items():
            grouped.setdefault(name, []).append(stats)
    out, sketches = [], []
    for name in sorted(grouped, key=class_order):
        every = grouped[name]
        sketches.append(merge(c.severities for c in every if c.severities))
        both = total(c.sums for c in every)
        weight = sum(c.severity_weight for c in every)
        phase, module, family = [*name.split("/"), "", ""][:3]
        out.append(
            ClassProfile(
                phase=phase, module=module, family=family, sites=sum(c.sites for c in every), elements=both.elements,
                mismatched_sites=sum(c.mismatched_sites for c in every), mismatched_elements=both.mismatched,
                steps=both.clusters, affected_steps=both.affected, per_element=per_element(both),
                per_step=per_step(both),
                # each term divided before it is added: a sum of severities may exceed fp64
                severity_mean=sum(c.severity_total / weight for c in every) if weight else None,
                severity_median=quantile(sketches[-1], 0.5),
                severity_max=max((c.severity_max for c in every if c.severity_max is not None), default=None),
            )
        )  # fmt: skip
    return tuple(out), merge(sketches)


def _devices(profiles: Sequence[RunProfile], count: int) -> tuple[DeviceProfile, ...]:
    """Every device of the runs, which come newest first."""
    now = set(present((p.devices for p in profiles), count))
    ranks: dict[str, set[int]] = {}
    hours: dict[str, float] = {}
    damage: dict[str, tuple[int, int]] = {}
    for p in profiles:
        for rank, name in enumerate(p.devices):
            ranks.setdefault(name, set()).add(rank)
            hours[name] = hours.get(name, 0.0) + p.device_seconds / 3600 / len(p.devices)
            sites, elements = p.detail.by_rank.get(rank, (0, 0))
            before = damage.get(name, (0, 0))
            damage[name] = before[0] + sites, before[1] + elements
    return tuple(
        DeviceProfile(
            name, next(iter(ranks[name])) if len(ranks[name]) == 1 else None, hours[name], *damage[name], name in now
        )
        for name in sorted(hours, key=lambda n: (min(ranks[n]), n))
    )


def _wcnts(counted: Sequence[tuple[RunFacts, RunProfile]]) -> tuple[float | None, UUID | None]:
    worst: tuple[float, UUID] | None = None
    for f, p in counted:
        value = p.detail.noise.wcnts if p.detail.noise is not None else None
        if value is not None and (worst is None or value > worst[0]):
            worst = value, f.run_id
    return worst if worst is not None else (None, None)


def _leaves(counted: Sequence[tuple[RunFacts, RunProfile]]) -> dict[str, float]:
    """Of the runs whose model and tp have a run in which the leaf differed: only there is its width known."""
    noises = [((f.model, len(p.devices)), p.detail.noise) for f, p in counted if p.detail.noise is not None]
    width: dict[str, dict[tuple[str, int], int]] = {}
    for shape, n in noises:
        for leaf, found in n.leaves.items():
            widths = width.setdefault(leaf, {})
            widths[shape] = max(widths.get(shape, 0), found.elements // n.steps if n.steps else 0)
    out = {}
    for leaf, widths in sorted(width.items()):
        total = LeafNoise(0, 0, 0)
        for shape, n in noises:  # a run in which the leaf never differed compared it all the same
            total += n.leaves.get(leaf, LeafNoise(0, 0, widths.get(shape, 0) * n.steps))
        out[leaf] = total.frequency
    return out


def _sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _sum_cells(cells: Iterable[Mapping[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    total: dict[int, tuple[int, int]] = {}
    for one in cells:
        for key, (sites, elements) in one.items():
            before = total.get(key, (0, 0))
            total[key] = before[0] + sites, before[1] + elements
    return dict(sorted(total.items()))


def _map(lines: Iterable[Sequence[Cells]]) -> tuple[MapRow, ...]:
    grouped: dict[tuple[str, str, str], list[dict[int, tuple[int, int]]]] = {}
    for one in lines:
        for c in one:
            grouped.setdefault((c.phase, c.module, c.tensor), []).append(c.cells)
    keys = sorted(grouped, key=lambda k: (*class_order(f"{k[0]}/{k[1]}/"), k[2]))
    return tuple(MapRow(*key, _sum_cells(grouped[key])) for key in keys)


def _bits(histograms: Iterable[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    total: dict[int, list[int]] = {}
    for one in histograms:
        for width, counts in one.items():
            before = total.get(width, [0] * len(counts))
            total[width] = [a + b for a, b in zip(before, counts, strict=True)]
    return dict(sorted(total.items()))


def _not_checked(
    decided: NodeDecided,
    counted: Sequence[tuple[RunFacts, RunProfile]],
    details: Sequence[Detail],
    device_count: int,
    rules: NodeRules,
) -> tuple[str, ...]:
    out = []
    covered = present((p.devices for _, p in counted), device_count)
    if not counted:
        out.append("Everything: no conclusive run of it on two hosts counts.")
    elif device_count > len(covered):
        out.append(f"{device_count - len(covered)} of its {device_count} devices: no counted run covered them.")
    done = {f.workload for f, _ in counted}
    if counted and (absent := [w for w in (*rules.workloads, Workload.TRAINING) if w not in done]):
        out.append(f"What the workload{'s' if len(absent) > 1 else ''} {', '.join(absent)} would show.")
    if any(d.capped for d in details):
        out.append("Place, severity, bits and replay class of rows beyond a run's cap (its counts are exact).")
    if counted and decided.verdict is not NodeVerdict.CORRUPTING:
        out.append("Corruption that is rarer than the bound, or that needs another model, shape, temperature or load.")
    out.append("Communication between nodes: only what the node's own devices compute is compared.")
    return tuple(out)
