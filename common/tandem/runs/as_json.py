"""A run's summary as the JSON object of ``--json``. Pure; the keys are documented in ``docs/json.md``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tandem.json_parts import bits_json, bound_json, cells_json, counts_json, timing_json
from tandem.records import MismatchRecord
from tandem.runs.drift import DriftSummary
from tandem.runs.noise import NoiseSummary
from tandem.runs.parts import Counts, FaultTruth
from tandem.runs.rates import Rates
from tandem.runs.summary import RunSummary
from tandem.statistics.frequency import Rate

if TYPE_CHECKING:
    from tandem.answers import ArmResult, Share


def to_json(s: RunSummary) -> dict[str, Any]:
    """The object that ``--json`` prints; every key is documented in ``docs/json.md``."""
    return {
        "run": str(s.run.run_id),
        "verdict": s.run.verdict,
        "reason": s.run.reason,
        "sentence": s.run.sentence,
        "state": s.run.state,
        "created_at": s.run.created_at,
        "finished_at": s.run.finished_at,
        "workload": s.run.workload,
        "kind": s.run.kind,
        "model": s.run.model,
        "synthetic": s.run.synthetic,
        "reference_node": s.run.reference_node,
        "suspect_node": s.run.suspect_node,
        "spec": s.run.spec,
        "fingerprint": s.fingerprint,
        "parity": s.parity,
        "attempts": s.attempts,
        "attempts_closed": s.attempts_closed,
        "steps_compared": s.steps,
        "sites_compared": s.sites,
        "elements_compared": s.elements,
        "mismatched_sites": s.mismatched_sites,
        "mismatched_elements": s.mismatched_elements,
        "table": [_counts_json(c) | _rates_json(s.rates.get((c.phase, c.module))) for c in s.table],
        "other_tensors": [_counts_json(c) for c in s.others],
        "findings": s.findings,
        "uncounted_mismatches": s.uncounted,
        "first_mismatch": _row_json(s.first) if s.first else None,
        "ranks": cells_json(s.ranks),
        "layers": cells_json(s.layers),
        "replays": s.replays,
        "extents": s.extents,
        "bits": bits_json(s.bits),
        "steps_affected": _rate_json(s.overall.per_step),
        "timing": timing_json(s.timing),
        "gradient_noise": _noise_json(s.noise) if s.noise else None,
        "drift": _drift_json(s.drift) if s.drift else None,
        "answers": [_answer_json(step, r) for step, found in s.answers.items() for r in found],
        "nonfinite_elements": s.nonfinite,
        "nullified_elements": s.nullified,
        "zero_reference_elements": s.zero_reference,
        "controls": [
            {
                "name": c.name,
                "role": c.role,
                "status": c.status,
                "records": c.records,
                "failed": c.failed,
                "repeats": c.repeats,
                "failures": list(c.failures),
            }
            for c in s.controls
        ],
        "devices": s.devices,
        "device_hours": s.device_hours,
        "bound": bound_json(s.bound),
        "mismatch_rows": s.rows,
        "mismatch_rows_total": s.rows_total,
        "capped": s.capped,
        "link_bytes": s.link_bytes,
        "full_bytes": s.full_bytes,
        "duration_s": s.duration_s,
        "fault_log": _faults_json(s.faults) if s.faults else None,
        "not_checked": s.not_checked,
    }


def _counts_json(c: Counts) -> dict[str, Any]:
    return counts_json(c) | {"frequency": c.frequency}


def _finite(value: float | None) -> float | None:
    """None for what JSON has no number for."""
    return value if value is not None and math.isfinite(value) else None


def _rate_json(r: Rate | None) -> dict[str, Any] | None:
    return None if r is None else {"share": r.value, "low": r.low, "high": r.high}


def _rates_json(r: Rates | None) -> dict[str, Any]:
    return {"per_step": _rate_json(r.per_step if r else None), "per_element": _rate_json(r.per_element if r else None)}


def _noise_json(s: NoiseSummary) -> dict[str, Any]:
    t = s.totals
    return {
        "wcnts": _finite(s.wcnts),
        "largest_finite": t.worst,
        "largest_finite_step": t.worst_step,
        "steps": t.steps,
        "noisy_steps": t.noisy,
        "unbounded_steps": t.unbounded,
        "undefined_steps": t.undefined,
        "unmeasured_steps": s.unmeasured,
        "least_cosine": t.least_cosine,
        "leaves": [
            {
                "leaf": n.leaf,
                "steps": n.affected,
                "mismatched": n.mismatched,
                "elements": n.elements,
                "frequency": n.frequency,
                "worst": _finite(n.worst),
                "worst_step": n.worst_step,
                "cosine": _finite(n.cosine),
            }
            for n in s.leaves
        ],
    }


def _drift_json(s: DriftSummary) -> dict[str, Any]:
    apart = s.largest_difference()
    return {
        "first_divergence": s.first_divergence,
        "largest_loss_difference": {"step": apart[0], "difference": _finite(apart[1])} if apart else None,
        "loss_spikes": s.spikes,
        "resumed": {str(attempt): step for attempt, step in s.resumed.items()},
        "arms": [
            {
                "arm": line.arm,
                "first_step": line.first,
                "last_step": line.last,
                "last_drift": _finite(line.last_drift),
                "last_relative": _finite(line.last_relative),
                "growth_per_step": _finite(line.rate),
                "nonfinite": line.nonfinite,
            }
            for line in s.lines
        ],
        "groups": [
            {
                "arm": p.arm,
                "step": p.step,
                "group": p.part,
                "drift": _finite(p.drift),
                "relative": _finite(p.ratio),
            }
            for p in s.groups
        ],
    }


def _answer_json(step: int, r: ArmResult) -> dict[str, Any]:
    out: dict[str, Any] = {
        "step": step,
        "task": r.task,
        "arm": r.arm.value,
        "accuracy": _share_json(r.accuracy),
        "unanswered": r.unanswered,
        "against_reference": None,
    }
    if a := r.against:
        out["against_reference"] = {
            "disagreement": _share_json(a.disagreement),
            "only_arm": a.only_arm,
            "only_reference": a.only_reference,
            "difference": a.difference,
            "difference_interval": list(a.difference_interval),
            "p_value": a.p_value,
            "equal_scores": a.equal_scores,
            "missing": a.missing,
        }
    return out


def _share_json(s: Share) -> dict[str, Any]:
    return {"found": s.found, "of": s.of, "share": s.share, "low": s.interval[0], "high": s.interval[1]}


def _row_json(row: MismatchRecord) -> dict[str, Any]:
    return {
        "attempt": row.attempt,
        "step": row.step,
        "site": row.site,
        "phase": row.phase.value,
        "module": row.module.value,
        "layer": row.layer,
        "tensor": row.tensor,
        "rank": row.rank,
        "cause": row.cause.value,
        "elements": row.elements,
        "mismatched": row.mismatched,
        "severity_mean": row.severity_mean,
        "severity_median": row.severity_median,
        "severity_max": row.severity_max,
        "first_index": row.first_index,
        "extent": row.extent.value if row.extent else None,
        "replay": row.replay.value,
    }


def _faults_json(f: FaultTruth) -> dict[str, Any]:
    return {
        "records": f.records,
        "changed_elements": f.changed_elements,
        "by_level": {level: {"records": n, "changed_elements": e} for level, (n, e) in f.by_level.items()},
        "output_sites": f.output_sites,
        "output_changed": f.output_changed,
        "found_sites": f.found_sites,
        "found_elements": f.found_elements,
        "unequal": f.unequal,
        "unexplained_sites": f.unexplained_sites,
        "exact": f.exact,
    }
