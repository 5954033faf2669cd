"""What the database says of nodes, row by row: one row for each run, and never a step or a mismatch: the runs' rows may
be millions, or long dropped by retention.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Row, text

from tandem.errors import UsageError
from tandem.nodes.run_profile import VERSION, Detail, RunProfile
from tandem.nodes.verdict import NodeDecision, NullPass, RunFacts, cleared_at
from tandem.vocabulary import Kind, Verdict

REAL = (
    "NOT r.synthetic AND r.reference_node <> r.suspect_node "
    "AND EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = r.run_id) "
    "AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = r.run_id "
    "AND (a.reference_host = '' OR a.suspect_host = '' OR a.reference_host = a.suspect_host))"
)
"""Runs that may say something about a node: injected faults say nothing, nor does a pair on one host."""

_FACTS = (
    "r.run_id, r.workload, r.kind, r.model, r.reference_node, r.suspect_node, r.created_at, r.finished_at, r.verdict, "
    "r.reason, p.executables, p.comparable, p.reference_differs, p.suspect_differs, p.findings, p.steps, "
    "p.affected_steps, p.elements, p.mismatched_elements, p.device_seconds, p.devices, p.device_count, p.evidence, "
    "p.attempts, p.sites, p.mismatched_sites, t.found"
)
_JOINS = (
    "FROM runs r LEFT JOIN run_profiles p USING (run_id) "
    "LEFT JOIN LATERAL (SELECT sum(mismatched_sites + other_findings)::bigint AS found FROM attempt_totals t "
    "WHERE t.run_id = r.run_id) t ON true"
)
_AGAINST = f"(p.reference_differs OR (r.kind = '{Kind.NULL}' AND r.verdict = '{Verdict.MISMATCH}'))"
"""Runs that say something against their reference."""

_MINE = text(
    f"SELECT {_FACTS}, p.version, p.updated_at, r.records_dropped_at {_JOINS} "
    f"WHERE r.suspect_node = :node AND {REAL} ORDER BY r.run_id DESC"
)
_OTHERS = text(
    f"SELECT {_FACTS} {_JOINS} WHERE r.reference_node = :node AND {_AGAINST} AND {REAL} ORDER BY r.run_id DESC"
)
_DETAILS = text("SELECT run_id, detail::text AS detail FROM run_profiles WHERE run_id = ANY(:runs)")
_AS_REFERENCE = text(
    "SELECT count(*) FROM runs r JOIN run_profiles p USING (run_id) "
    "WHERE r.reference_node = :node AND r.state = 'finished' AND NOT r.synthetic"
)
_NULLS = text(
    "SELECT p.executables, r.reference_node, r.suspect_node, r.finished_at, r.workload, r.model "
    "FROM run_profiles p JOIN runs r USING (run_id) "
    "WHERE p.passed_null AND (CAST(:all AS boolean) OR p.executables = ANY(:executables)) AND NOT r.synthetic"
)
_UNSTEADY = text(
    "SELECT s.node, r.finished_at FROM run_profiles p JOIN runs r USING (run_id) CROSS JOIN LATERAL "
    "(VALUES (p.reference_differs, r.reference_node), (p.suspect_differs, r.suspect_node)) AS s(differs, node) "
    "WHERE (p.reference_differs OR p.suspect_differs) AND s.differs AND NOT r.synthetic"
)
_DECISIONS = text(
    "SELECT node, decision, reason, decided_by, decided_at, run_id FROM node_decisions "
    "WHERE CAST(:all AS boolean) OR node = ANY(:nodes) ORDER BY decided_at DESC, decision_id DESC"
)
_CONTROLS = text(
    f"SELECT {_FACTS} {_JOINS} WHERE r.kind = '{Kind.NULL}' AND r.model = :model "
    f"AND r.state = 'finished' AND :node NOT IN (r.reference_node, r.suspect_node) AND {REAL} ORDER BY r.run_id"
)
_FLEET = text(f"SELECT {_FACTS} {_JOINS} WHERE {REAL} ORDER BY r.run_id DESC")
_KNOWN = text("SELECT EXISTS (SELECT 1 FROM runs WHERE suspect_node = :node OR reference_node = :node)")

_decoder = msgspec.json.Decoder(Detail)


@dataclass(frozen=True, slots=True)
class NodeRows:
    """Everything that a node's profile is made of but the statistics of each run, which are the same as long as these
    rows are: each tells when its statistics were written.
    """

    node: str
    mine: Sequence[Row[Any]]
    """Runs with the node as suspect."""
    others: Sequence[Row[Any]]
    """Runs that say something against it as their reference."""
    as_reference: int
    """Finished runs in which it was the reference."""
    decisions: Sequence[NodeDecision]
    nulls: Sequence[NullPass]
    """Passed null runs with executables of its runs."""
    unsteady: Mapping[str, float]

    @property
    def lack(self) -> bool:
        """Whether the summary of a run is still to be made."""
        return any(_lacks(row) for row in self.mine)


def rows_of_node(conn: Connection, node: str) -> NodeRows:
    """The rows about a node.

    Raises:
        UsageError: no run names it.
    """
    mine = conn.execute(_MINE, {"node": node}).all()
    others = conn.execute(_OTHERS, {"node": node}).all()
    as_reference = int(conn.scalar(_AS_REFERENCE, {"node": node}) or 0)
    decisions = decisions_of(conn, [node])[node]
    if not (mine or others or as_reference or decisions) and not conn.scalar(_KNOWN, {"node": node}):
        raise UsageError(f"no run names a node {node}: list the nodes with `tandem nodes`")
    nulls = nulls_of(conn, sorted({row.executables for row in mine if row.executables}))
    return NodeRows(node, mine, others, as_reference, decisions, nulls, unsteady_of(conn))


def runs_about(conn: Connection, node: str) -> list[RunFacts]:
    """Runs with a node as suspect, and those that say something against it as their reference."""
    return [facts_of(row) for query in (_MINE, _OTHERS) for row in conn.execute(query, {"node": node})]


def controls_of(conn: Connection, node: str, model: str) -> list[RunFacts]:
    """Finished null runs with a preset in which a node took no part."""
    return [facts_of(row) for row in conn.execute(_CONTROLS, {"model": model, "node": node})]


def fleet_runs(conn: Connection) -> list[RunFacts]:
    """Every real run."""
    return [facts_of(row) for row in conn.execute(_FLEET)]


def _lacks(row: Row[Any]) -> bool:
    if row.verdict is None or row.version == VERSION:
        return False
    return row.version is None or row.records_dropped_at is None


def facts_of(row: Row[Any]) -> RunFacts:
    # By position, in the order of _FACTS: by name it takes four times as long, and a fleet has thousands.
    (
        run_id, workload, kind, model, reference, suspect, created_at, finished_at, verdict, reason, executables,
        comparable, reference_differs, suspect_differs, findings, steps, affected_steps, elements, mismatched_elements,
        device_seconds, devices, device_count, evidence, _, _, _, found,
    ) = tuple(row)[:27]  # fmt: skip
    findings = findings or 0
    if comparable:  # rows that came after the verdict count as findings too
        findings = max(findings, found or 0)
    return RunFacts(
        run_id=run_id, workload=workload, kind=kind, model=model, reference=reference, suspect=suspect,
        created_at=created_at.timestamp(), finished_at=finished_at.timestamp() if finished_at else None,
        verdict=verdict, reason=reason, executables=executables or "", comparable=bool(comparable),
        reference_differs=bool(reference_differs), suspect_differs=bool(suspect_differs), findings=findings,
        steps=steps or 0, affected_steps=affected_steps or 0, elements=elements or 0,
        mismatched_elements=mismatched_elements or 0, device_hours=(device_seconds or 0.0) / 3600,
        devices=tuple(devices or ()), device_count=device_count or 0, evidence=evidence or "",
    )  # fmt: skip


def profiles_of(conn: Connection, rows: NodeRows) -> dict[UUID, RunProfile]:
    """The statistics of the runs that may be counted."""
    counted = {row.run_id: row for row in rows.mine if row.attempts}
    if not counted:
        return {}
    details = conn.execute(_DETAILS, {"runs": list(counted)})
    return {run_id: _profile(counted[run_id], detail) for run_id, detail in details}


def _profile(row: Row[Any], detail: str) -> RunProfile:
    return RunProfile(
        attempts=list(row.attempts), steps=row.steps, affected_steps=row.affected_steps, sites=row.sites,
        elements=row.elements, mismatched_sites=row.mismatched_sites, mismatched_elements=row.mismatched_elements,
        device_seconds=row.device_seconds, devices=list(row.devices), device_count=row.device_count,
        detail=_decoder.decode(detail),
    )  # fmt: skip


def nulls_of(conn: Connection, executables: Iterable[str] | None) -> list[NullPass]:
    """Passed null runs; of many with the same executables and nodes all are given."""
    if executables is not None and not (executables := list(executables)):
        return []
    found = conn.execute(_NULLS, {"all": executables is None, "executables": executables or []})
    return [
        NullPass(r.executables, r.reference_node, r.suspect_node, r.finished_at.timestamp(), r.workload, r.model)
        for r in found
    ]


def unsteady_of(conn: Connection) -> dict[str, float]:
    """Nodes that differed from themselves -> until when: for ever, or until they were cleared after it."""
    last: dict[str, float] = {}
    for row in conn.execute(_UNSTEADY):
        last[row.node] = max(last.get(row.node, 0.0), row.finished_at.timestamp())
    decisions = decisions_of(conn, list(last)) if last else {}
    out = {}
    for node, when in last.items():
        after = cleared_at(decisions.get(node, ()))
        out[node] = after if after is not None and after > when else math.inf
    return out


def decisions_of(conn: Connection, nodes: list[str] | None) -> dict[str, list[NodeDecision]]:
    out: dict[str, list[NodeDecision]] = defaultdict(list)
    for row in conn.execute(_DECISIONS, {"all": nodes is None, "nodes": nodes or []}):
        out[row.node].append(
            NodeDecision(row.decision, row.reason, row.decided_by, row.decided_at.timestamp(), row.run_id)
        )
    return out
