"""A run's summary as the JSON object of ``--json``. Pure; the keys are documented in ``docs/json.md``."""

from __future__ import annotations

from typing import Any

from tandem.records import MismatchRecord
from tandem.summary import RunSummary
from tandem.summary_parts import Bound, Counts, FaultTruth


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
        "resumed_from": s.resumed,
        "sites_compared": s.sites,
        "elements_compared": s.elements,
        "mismatched_sites": s.mismatched_sites,
        "mismatched_elements": s.mismatched_elements,
        "table": [_counts_json(c) for c in s.table],
        "other_tensors": [_counts_json(c) for c in s.others],
        "findings": s.findings,
        "uncounted_mismatches": s.uncounted,
        "first_mismatch": _row_json(s.first) if s.first else None,
        "ranks": {str(k): {"sites": v[0], "elements": v[1]} for k, v in s.ranks.items()},
        "layers": {str(k): {"sites": v[0], "elements": v[1]} for k, v in s.layers.items()},
        "replays": s.replays,
        "extents": s.extents,
        "bits": {str(width): counts for width, counts in s.bits.items()},
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
        "bound": _bound_json(s.bound) if s.bound else None,
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
    return {
        "phase": c.phase,
        "module": c.module,
        "tensor": c.family,
        "sites": c.sites,
        "elements": c.elements,
        "mismatched_sites": c.mismatched_sites,
        "mismatched_elements": c.mismatched_elements,
        "frequency": c.frequency,
        "severity_mean": c.severity_mean,
        "severity_median": c.severity_median,
        "severity_max": c.severity_max,
    }


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


def _bound_json(b: Bound) -> dict[str, Any]:
    return {
        "confidence": b.confidence,
        "steps": b.steps,
        "per_step": b.per_step,
        "device_hours": b.device_hours,
        "per_device_hour": b.per_device_hour,
        "elements": b.elements,
        "per_element": b.per_element,
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
