"""Nodes as the database's rows tell of them: profiles, the fleet, the next run of an assessment; each in the caller's
transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection

from tandem.db.node_rows import (
    NodeRows,
    controls_of,
    decisions_of,
    facts_of,
    fleet_runs,
    nulls_of,
    profiles_of,
    rows_of_node,
    runs_about,
    unsteady_of,
)
from tandem.nodes.assess import Ended, Wanted, next_run
from tandem.nodes.profile import NodeProfile
from tandem.nodes.summary import Summarised, summarise_node
from tandem.nodes.verdict import (
    NodeDecided,
    NodeDecision,
    NodeRules,
    NullPass,
    RunFacts,
    before_clearance,
    cleared_at,
    decide_node,
)
from tandem.vocabulary import NodeVerdict


@dataclass(frozen=True, slots=True)
class FleetLine:
    """One node of the fleet."""

    node: str
    decided: NodeDecided
    evidence: str
    """What was found, in a few words."""
    last_run: UUID | None
    last_run_at: float | None
    runs: int
    """Real runs on two hosts with it as the suspect."""
    running: int
    """Of them, those without a verdict yet."""
    cleared_at: float | None


def read_node(conn: Connection, node: str, rules: NodeRules = NodeRules()) -> NodeProfile:  # noqa: B008 - frozen
    """The profile of a node; runs that have no summary yet count as such.

    Raises:
        UsageError: no run names it.
    """
    return profile_from(conn, rows_of_node(conn, node), rules)


def profile_from(conn: Connection, rows: NodeRows, rules: NodeRules = NodeRules()) -> NodeProfile:  # noqa: B008
    """The profile that rows of the same transaction tell of."""
    profiles = profiles_of(conn, rows)
    runs = [Summarised(facts_of(row), profiles.get(row.run_id)) for row in rows.mine]
    runs += [Summarised(facts_of(row), None) for row in rows.others]
    return summarise_node(
        rows.node, runs, nulls=rows.nulls, unsteady=rows.unsteady, decisions=rows.decisions,
        as_reference=rows.as_reference, rules=rules,
    )  # fmt: skip


def read_next(conn: Connection, node: str, model: str, rules: NodeRules = NodeRules()) -> Wanted | Ended:  # noqa: B008
    """The next run of a node's assessment with a preset, or why there is none, from the profiles that are there."""
    return next_run(
        node, model, runs_about(conn, node), nulls_of(conn, None), decisions_of(conn, [node])[node], rules=rules,
        others=controls_of(conn, node, model), unsteady=unsteady_of(conn),
    )  # fmt: skip


def read_fleet(conn: Connection, rules: NodeRules = NodeRules()) -> list[FleetLine]:  # noqa: B008 - frozen
    """Every node that a real run names, those that need a person first at the top; runs that have no summary yet count
    as such.
    """
    nulls, unsteady, decisions = nulls_of(conn, None), unsteady_of(conn), decisions_of(conn, None)
    by_node: dict[str, list[RunFacts]] = defaultdict(list)
    for run in fleet_runs(conn):
        by_node[run.suspect].append(run)
        by_node[run.reference].append(run)
    lines = [_fleet_line(node, runs, nulls, unsteady, decisions.get(node, ()), rules) for node, runs in by_node.items()]
    return sorted(lines, key=urgency)


def urgency(line: FleetLine) -> tuple[int, float, str]:
    """Corrupting, suspected, then unknown nodes that were tested, clean, never tested; the newest first."""
    untested = line.decided.verdict is NodeVerdict.UNKNOWN and not line.runs
    rank = {NodeVerdict.CORRUPTING: 0, NodeVerdict.SUSPECTED: 1, NodeVerdict.UNKNOWN: 2, NodeVerdict.CLEAN: 3}
    return (4 if untested else rank[line.decided.verdict], -(line.decided.since or line.last_run_at or 0.0), line.node)


def _fleet_line(
    node: str,
    runs: Sequence[RunFacts],
    nulls: Sequence[NullPass],
    unsteady: Mapping[str, float],
    decisions: Sequence[NodeDecision],
    rules: NodeRules,
) -> FleetLine:
    decided = decide_node(node, runs, nulls=nulls, unsteady=unsteady, decisions=decisions, rules=rules)
    mine = [r for r in runs if r.suspect == node]
    after = cleared_at(decisions)
    told = next((r.evidence for r in mine if r.evidence and not before_clearance(r, after)), "")
    if told and len(decided.references) > 1:
        told += f", {len(decided.references)} references"
    last = max(mine, key=lambda r: r.run_id, default=None)
    return FleetLine(
        node=node, decided=decided, evidence=told, last_run=last.run_id if last else None,
        last_run_at=last.created_at if last else None, runs=len(mine), running=sum(r.verdict is None for r in mine),
        cleared_at=after,
    )  # fmt: skip
