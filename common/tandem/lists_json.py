"""The lists of runs and of nodes as the JSON objects of ``--json`` and of the API; see ``docs/json.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.nodes.as_json import fleet_json
from tandem.vocabulary import NodeVerdict

if TYPE_CHECKING:
    from tandem.db.nodes import FleetLine
    from tandem.db.queries import RunSummaryRow


def run_json(listed: RunSummaryRow) -> dict[str, Any]:
    """One run of ``tandem runs --json``."""
    run = listed.run
    return {
        "run": str(run.run_id),
        "verdict": run.verdict,
        "reason": run.reason,
        "state": run.state,
        "created_at": run.created_at,
        "finished_at": run.finished_at,
        "workload": run.workload,
        "kind": run.kind,
        "model": run.model,
        "synthetic": run.synthetic,
        "reference_node": run.reference_node,
        "suspect_node": run.suspect_node,
        "attempts": listed.attempts,
        "step_rows": listed.steps,
        "sites_compared": listed.sites,
        "elements_compared": listed.elements,
        "mismatched_sites": listed.mismatched_sites,
        "mismatched_elements": listed.mismatched_elements,
    }


def fleet_counts(found: Iterable[FleetLine]) -> dict[str, int]:
    """Nodes by verdict, and how many are in test."""
    lines = list(found)
    counts = {str(v): sum(line.decided.verdict is v for line in lines) for v in NodeVerdict}
    return counts | {"in_test": sum(line.running > 0 for line in lines)}


def line_json(line: FleetLine) -> dict[str, Any]:
    """One node of ``tandem nodes --json``."""
    return fleet_json(
        line.node, line.decided, evidence=line.evidence,
        last_run=None if line.last_run is None else str(line.last_run), last_run_at=line.last_run_at,
        runs=line.runs, running=line.running, cleared_at=line.cleared_at,
    )  # fmt: skip


def nodes_json(found: Sequence[FleetLine]) -> dict[str, Any]:
    """The object of ``tandem nodes --json``."""
    return {"counts": fleet_counts(found), "nodes": [line_json(line) for line in found]}
