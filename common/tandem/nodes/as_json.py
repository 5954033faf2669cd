"""Profiles of nodes as the JSON objects of ``--json``. Pure; the keys are documented in ``docs/json.md``."""

from __future__ import annotations

import math
from typing import Any

from tandem.json_parts import bits_json, bound_json, cells_json, counts_json, timing_json
from tandem.nodes.profile import ClassProfile, DeviceProfile, NodeProfile, RunLine
from tandem.nodes.run_profile import Detail
from tandem.nodes.verdict import NodeDecided, NodeDecision
from tandem.runs.parts import MapRow
from tandem.statistics import sketch
from tandem.statistics.drift import DriftLine
from tandem.statistics.frequency import Rate, Sums
from tandem.statistics.noise import Noise


def to_json(p: NodeProfile) -> dict[str, Any]:
    """The object that ``tandem node NAME --json`` prints."""
    return {
        "node": p.node,
        "verdict": str(p.verdict),
        "rule": p.rule,
        "sentence": p.sentence,
        "evidence": p.evidence,
        "since": p.since,
        "missing": list(p.missing),
        "runs_counted": p.counted_runs,
        "runs_matching": p.matches,
        "runs_as_reference": p.as_reference,
        "references": list(p.references),
        "workloads": list(p.workloads),
        "steps_compared": p.steps,
        "steps_affected": p.affected_steps,
        "per_step": rate_json(p.per_step),
        "sites_compared": p.sites,
        "elements_compared": p.elements,
        "device_hours": p.device_hours,
        "mismatched_sites": p.mismatched_sites,
        "mismatched_elements": p.mismatched_elements,
        "bound": bound_json(p.bound),
        "classes": [_class_json(c) for c in p.classes],
        "devices": [_device_json(d) for d in p.devices],
        "device_count": p.device_count or None,
        "ranks": cells_json(p.ranks),
        "layer_map": [_map_json(row) for row in p.layer_map],
        "rank_map": [_map_json(row) for row in p.rank_map],
        "bits": bits_json(p.bits),
        "severities": [
            {"from": _edge(number), "to": _edge(number + 1), "tensors": n} for number, n in p.severities.items()
        ],
        "extents": p.extents,
        "replays": p.replays,
        "findings": p.findings,
        "nonfinite_elements": p.nonfinite,
        "nullified_elements": p.nullified,
        "zero_reference_elements": p.zero_reference,
        "uncounted_mismatches": p.uncounted,
        "timing": timing_json(p.timing),
        "wcnts": None if p.wcnts is None or math.isinf(p.wcnts) else p.wcnts,
        "wcnts_unbounded": p.wcnts is not None and math.isinf(p.wcnts),
        "wcnts_run": None if p.wcnts_run is None else str(p.wcnts_run),
        "leaves": p.leaves,
        "drift_rate": p.drift_rate,
        "runs": [_run_json(line) for line in p.runs],
        "decisions": [_decision_json(d) for d in p.decisions],
        "not_checked": list(p.not_checked),
    }


def fleet_json(node: str, decided: NodeDecided, **more: object) -> dict[str, Any]:
    """One node of ``tandem nodes --json``."""
    return {
        "node": node,
        "verdict": str(decided.verdict),
        "rule": decided.rule,
        "sentence": decided.sentence,
        "since": decided.since,
        "missing": list(decided.missing),
        "references": list(decided.references),
        **more,
    }


def statistics_json(d: Detail) -> dict[str, Any]:
    """The statistics of a run: ``tandem verdict RUN --json``."""
    from tandem.statistics.frequency import per_element, per_step

    return {
        "classes": [
            {
                "class": name,
                "sites": c.sites,
                "elements": c.sums.elements,
                "mismatched_sites": c.mismatched_sites,
                "mismatched_elements": c.sums.mismatched,
                "steps": c.sums.clusters,
                "affected_steps": c.sums.affected,
                "per_element": rate_json(per_element(c.sums)),
                "per_step": rate_json(per_step(c.sums)),
            }
            for name, c in d.classes.items()
        ],
        "per_step": rate_json(per_step(Sums(clusters=d.timing.steps, affected=d.timing.affected))),
        "timing": timing_json(d.timing),
        "noise": noise_json(d.noise),
        "drifts": [drift_json(line) for line in d.drifts],
        "loss_spikes": d.loss_spikes,
    }


def rate_json(r: Rate | None) -> dict[str, float] | None:
    return None if r is None else {"value": r.value, "low": r.low, "high": r.high, "effective": r.effective}


def noise_json(n: Noise | None) -> dict[str, Any] | None:
    return None if n is None else {
        "steps": n.steps,
        "noisy": n.noisy,
        "wcnts": n.worst if not n.unbounded else None,
        "worst_finite": n.worst,
        "worst_step": n.worst_step,
        "unbounded": n.unbounded,
        "undefined": n.undefined,
        "least_cosine": n.least_cosine,
        "leaves": {
            leaf: {"affected_steps": x.affected, "mismatched": x.mismatched, "elements": x.elements,
                   "frequency": x.frequency}
            for leaf, x in n.leaves.items()
        },
    }  # fmt: skip


def drift_json(line: DriftLine) -> dict[str, Any]:
    return {
        "arm": line.arm,
        "points": line.points,
        "first": line.first,
        "last": line.last,
        "last_drift": line.last_drift,
        "last_relative": line.last_relative,
        "rate": line.rate,
        "nonfinite": line.nonfinite,
    }


def _edge(number: int) -> float | None:
    power = number / sketch.BINS
    return 10**power if power < 308 else None


def _class_json(c: ClassProfile) -> dict[str, Any]:
    return counts_json(c) | {
        "steps": c.steps,
        "affected_steps": c.affected_steps,
        "per_element": rate_json(c.per_element),
        "per_step": rate_json(c.per_step),
    }


def _device_json(d: DeviceProfile) -> dict[str, Any]:
    return {
        "device": d.name,
        "rank": d.rank,
        "device_hours": d.hours,
        "mismatched_sites": d.mismatched_sites,
        "mismatched_elements": d.mismatched_elements,
        "present": d.present,
    }


def _map_json(row: MapRow) -> dict[str, Any]:
    return {"phase": row.phase, "module": row.module, "tensor": row.tensor, "cells": cells_json(row.cells)}


def _run_json(line: RunLine) -> dict[str, Any]:
    f = line.facts
    return {
        "run": str(f.run_id),
        "counted": line.counted,
        "note": line.note,
        "kind": f.kind,
        "workload": f.workload,
        "model": f.model,
        "reference_node": f.reference,
        "suspect_node": f.suspect,
        "verdict": f.verdict,
        "reason": f.reason,
        "created_at": f.created_at,
        "finished_at": f.finished_at,
        "executables": f.executables or None,
        "findings": f.findings,
        "evidence": f.evidence,
        "suspect_differs": f.suspect_differs,
        "reference_differs": f.reference_differs,
        "steps_compared": f.steps,
        "steps_affected": f.affected_steps,
        "elements_compared": f.elements,
        "mismatched_elements": f.mismatched_elements,
        "device_hours": f.device_hours,
        "devices": list(f.devices),
        "timing": None if line.timing is None else timing_json(line.timing),
        "timeline": [
            {"attempt": b.attempt, "first": b.first, "steps": b.steps, "affected": b.affected, "elements": b.elements,
             "mismatched": b.mismatched}
            for b in line.timeline
        ],
        "noise": noise_json(line.noise),
        "drifts": [drift_json(d) for d in line.drifts],
        "loss_spikes": line.loss_spikes,
    }  # fmt: skip


def _decision_json(d: NodeDecision) -> dict[str, Any]:
    return {
        "decision": d.decision,
        "reason": d.reason,
        "decided_by": d.decided_by,
        "decided_at": d.decided_at,
        "run": None if d.run_id is None else str(d.run_id),
    }
