"""Profiles of nodes in the database: what each run adds is written with its verdict, and a profile is read from that.

A profile reads one row for each run of the node, and never a step or a mismatch: the runs' rows may be millions, or
long dropped by retention.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import DBAPIError

from tandem.assess import Ended, Wanted, next_run
from tandem.db import queries
from tandem.db.engine import one_line, unreachable
from tandem.errors import DatabaseError, NothingToClearError, UsageError
from tandem.node_profile import NodeProfile
from tandem.node_summary import Summarised, summarise_node
from tandem.node_verdict import (
    NodeDecided,
    NodeDecision,
    NodeRules,
    NullPass,
    RunFacts,
    before_clearance,
    cleared_at,
    decide_node,
)
from tandem.records import RunRecords
from tandem.run_profile import VERSION, Detail, RunProfile, profile_run, two_hosts
from tandem.vocabulary import CLEARED, Kind, NodeVerdict, Verdict

_REAL = (
    "NOT r.synthetic AND r.reference_node <> r.suspect_node "
    "AND EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = r.run_id) "
    "AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = r.run_id "
    "AND (a.reference_host = '' OR a.suspect_host = '' OR a.reference_host = a.suspect_host))"
)
"""Runs that may say something about a node: injected faults say nothing, nor does a pair on one host."""

_FIELDS = tuple(name for name in RunProfile.__struct_fields__ if name != "detail")
_COLUMNS = (*_FIELDS, "passed_null", "detail")

_STORE = text(
    f"INSERT INTO run_profiles (run_id, {', '.join(_COLUMNS)}) "  # noqa: S608 - names of columns
    f"SELECT r.run_id, {', '.join(f'CAST(:{c} AS json)' if c == 'detail' else f':{c}' for c in _COLUMNS)} "
    f"FROM runs r WHERE r.run_id = :run_id AND {_REAL} "
    f"ON CONFLICT (run_id) DO UPDATE SET {', '.join(f'{c} = EXCLUDED.{c}' for c in _COLUMNS)}, updated_at = now()"
)

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
    f"SELECT {_FACTS}, p.detail::text AS detail, p.version, r.records_dropped_at {_JOINS} "
    f"WHERE r.suspect_node = :node AND {_REAL} ORDER BY r.run_id DESC"
)
_OTHERS = text(
    f"SELECT {_FACTS}, NULL AS detail {_JOINS} WHERE r.reference_node = :node AND {_AGAINST} AND {_REAL} "
    "ORDER BY r.run_id DESC"
)
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
    f"SELECT {_FACTS}, NULL AS detail {_JOINS} WHERE r.kind = '{Kind.NULL}' AND r.model = :model "
    f"AND r.state = 'finished' AND :node NOT IN (r.reference_node, r.suspect_node) AND {_REAL} ORDER BY r.run_id"
)
_FLEET = text(f"SELECT {_FACTS}, NULL AS detail {_JOINS} WHERE {_REAL} ORDER BY r.run_id DESC")
_LACKING_ANY = (
    "SELECT r.run_id FROM runs r LEFT JOIN run_profiles p USING (run_id) WHERE r.state = 'finished' "  # noqa: S608
    f"AND (p.run_id IS NULL OR (p.version <> :version AND r.records_dropped_at IS NULL)) AND {_REAL} "
)
_LACKING = text(f"{_LACKING_ANY} ORDER BY r.run_id")
_LACKING_OF_NODE = text(f"{_LACKING_ANY} AND r.suspect_node = :node ORDER BY r.run_id")
_KNOWN = text("SELECT EXISTS (SELECT 1 FROM runs WHERE suspect_node = :node OR reference_node = :node)")
_TOTALS = text(
    "SELECT attempt, steps, sites, elements, mismatched_sites, mismatched_elements, other_findings "
    "FROM attempt_totals WHERE run_id = :run_id"
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Detail)


# -- writing -----------------------------------------------------------------------------------------


def store_profile(conn: Connection, run_id: UUID) -> RunProfile | None:
    """Summarise a finished run and store that, in the caller's transaction.

    Returns:
        None for a run that says nothing about a node (synthetic, or a pair on one host): nothing is stored of it.
    """
    records = queries.load(conn, run_id)
    if records.run.synthetic or not records.attempts or not two_hosts(records):
        return None
    profile = profile_run(records)
    if records.run.records_dropped_at is not None:
        profile = _of_dropped(conn, records, profile)
    values = {name: getattr(profile, name) for name in _FIELDS}
    passed = records.run.kind == Kind.NULL and records.run.verdict == Verdict.MATCH and bool(profile.executables)
    detail = _encoder.encode(profile.detail).decode()
    conn.execute(_STORE, values | {"run_id": run_id, "passed_null": passed, "detail": _no_nul(detail)})
    return profile


def _no_nul(document: str) -> str:
    """PostgreSQL's json takes the escape of NUL, but no operator on it does."""
    return document.replace("\\u0000", "\\ufffd")


def _of_dropped(conn: Connection, records: RunRecords, profile: RunProfile) -> RunProfile:
    """Of a run whose rows retention dropped before it was summarised: what its totals and closing records tell.

    A match had no mismatch, so nothing is lost but the split into site classes; of a mismatch the statistics are gone,
    and none is made up: it counts for the verdict only.
    """
    totals = {row.attempt: row for row in conn.execute(_TOTALS, {"run_id": records.run.run_id})}
    found = sum(t.mismatched_sites + t.other_findings for t in totals.values())
    profile = msgspec.structs.replace(profile, findings=max(profile.findings, found))
    if records.run.verdict != Verdict.MATCH:
        return msgspec.structs.replace(profile, attempts=[], device_seconds=0.0, devices=[], detail=Detail())
    counted = [totals[a] for a in profile.attempts if a in totals]
    return msgspec.structs.replace(
        profile,
        steps=sum(max(t.steps - 1, 0) for t in counted),
        sites=sum(t.sites for t in counted),
        elements=sum(t.elements for t in counted),
    )


def catch_up(engine: Engine, node: str | None = None) -> int:
    """Summarise the finished runs that have no summary yet, or an old one: runs of an earlier version.

    Args:
        engine: the database; where this role may only read, nothing is changed.
        node: only runs with this node as the suspect.

    Returns:
        How many were summarised.

    Raises:
        DatabaseError: the database failed.
    """
    with engine.connect() as conn:
        query = (_LACKING, {}) if node is None else (_LACKING_OF_NODE, {"node": node})
        lacking = list(conn.scalars(query[0], query[1] | {"version": VERSION}))
    for number, run_id in enumerate(lacking):
        try:
            with engine.begin() as conn:
                store_profile(conn, run_id)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in ("42501", "25006"):  # may not write; read-only
                raise unreachable(engine.url.render_as_string(hide_password=False), error) from None
            return number
    return len(lacking)


def clear(engine: Engine, node: str, reason: str, by: str, rules: NodeRules = NodeRules()) -> NodeDecided:  # noqa: B008
    """Record the decision that what was found on a node counts no more.

    Args:
        engine: the database.
        node: with a finding that counts.
        reason: why.
        by: who decided.
        rules: of the verdict.

    Returns:
        The verdict before.

    Raises:
        UsageError: the reason or the name is empty, or there is nothing to clear.
        DatabaseError: the database failed.
    """
    if not reason.strip() or not by.strip():
        raise UsageError("a decision needs a reason and a name: give --reason TEXT, and --by NAME where needed")
    try:
        catch_up(engine, node)
        with engine.begin() as conn:
            return record_clear(conn, node, reason, by, rules)
    except DBAPIError as error:
        message = one_line(error, engine.url.render_as_string(hide_password=False))
        raise DatabaseError(f"the decision could not be stored ({message}): nothing was changed") from None


def record_clear(conn: Connection, node: str, reason: str, by: str, rules: NodeRules = NodeRules()) -> NodeDecided:  # noqa: B008
    """As ``clear``, in the caller's transaction; two at once do not both find something to clear.

    Raises:
        NothingToClearError: the node is neither corrupting nor suspected.
        UsageError: no run names it.
    """
    conn.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:lock, 0))"), {"lock": f"tandem node {node}"})
    before = read_node(conn, node, rules)
    if before.verdict not in (NodeVerdict.CORRUPTING, NodeVerdict.SUSPECTED):
        raise NothingToClearError(f"there is nothing to clear: node {node} is {before.verdict}")
    conn.execute(
        text("INSERT INTO node_decisions (node, decision, reason, decided_by) VALUES (:n, :d, :r, :b)"),
        {"n": node, "d": CLEARED, "r": reason.replace("\x00", " "), "b": by.replace("\x00", " ")},
    )
    return NodeDecided(before.verdict, before.rule, before.sentence)


# -- reading -----------------------------------------------------------------------------------------


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


def load_node(engine: Engine, node: str, rules: NodeRules = NodeRules()) -> NodeProfile:  # noqa: B008 - frozen
    """The profile of a node.

    Raises:
        UsageError: no run names it.
        DatabaseError: the database failed.
    """
    found = _load_node(engine, node, rules)
    if found is None:
        catch_up(engine, node)
        found = _load_node(engine, node, rules, lacking_ok=True)
    assert found is not None
    return found


def read_node(conn: Connection, node: str, rules: NodeRules = NodeRules()) -> NodeProfile:  # noqa: B008 - frozen
    """As ``load_node``, in the caller's transaction; runs that have no summary yet count as such.

    Raises:
        UsageError: no run names it.
    """
    found = _read_node(conn, node, rules, lacking_ok=True)
    assert found is not None
    return found


def _load_node(engine: Engine, node: str, rules: NodeRules, *, lacking_ok: bool = False) -> NodeProfile | None:
    try:
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
            return _read_node(conn, node, rules, lacking_ok=lacking_ok)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


def _read_node(conn: Connection, node: str, rules: NodeRules, *, lacking_ok: bool) -> NodeProfile | None:
    """None if a run has no summary yet, unless ``lacking_ok``."""
    mine = conn.execute(_MINE, {"node": node}).all()
    if not lacking_ok and any(_lacks(row) for row in mine):
        return None
    others = conn.execute(_OTHERS, {"node": node}).all()
    as_reference = int(conn.scalar(_AS_REFERENCE, {"node": node}) or 0)
    decisions = _decisions(conn, [node])[node]
    if not (mine or others or as_reference or decisions) and not conn.scalar(_KNOWN, {"node": node}):
        raise UsageError(f"no run names a node {node}: list the nodes with `tandem nodes`")
    executables = sorted({row.executables for row in mine if row.executables})
    nulls = _nulls(conn, executables)
    unsteady = _unsteady(conn)
    runs = [Summarised(_facts(row), _profile(row)) for row in (*mine, *others)]
    return summarise_node(
        node, runs, nulls=nulls, unsteady=unsteady, decisions=decisions, as_reference=as_reference, rules=rules
    )


def next_of_node(engine: Engine, node: str, model: str, rules: NodeRules = NodeRules()) -> Wanted | Ended:  # noqa: B008
    """The next run of a node's assessment with a preset, or why there is none.

    Raises:
        DatabaseError: the database failed.
    """
    try:
        catch_up(engine, node)
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
            return read_next(conn, node, model, rules)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


def read_next(conn: Connection, node: str, model: str, rules: NodeRules = NodeRules()) -> Wanted | Ended:  # noqa: B008
    """As `next_of_node`, in the caller's transaction and from the profiles that are there."""
    rows = [*conn.execute(_MINE, {"node": node}), *conn.execute(_OTHERS, {"node": node})]
    nulls = _nulls(conn, None)
    decisions = _decisions(conn, [node])[node]
    unsteady = _unsteady(conn)
    controls = [_facts(row) for row in conn.execute(_CONTROLS, {"model": model, "node": node})]
    runs = [_facts(row) for row in rows]
    return next_run(node, model, runs, nulls, decisions, rules=rules, others=controls, unsteady=unsteady)


def load_fleet(engine: Engine, rules: NodeRules = NodeRules()) -> list[FleetLine]:  # noqa: B008 - frozen
    """Every node that a real run names, those that need a person first at the top.

    Raises:
        DatabaseError: the database failed.
    """
    try:
        catch_up(engine)
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
            return read_fleet(conn, rules)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


def read_fleet(conn: Connection, rules: NodeRules = NodeRules()) -> list[FleetLine]:  # noqa: B008 - frozen
    """As ``load_fleet``, in the caller's transaction; runs that have no summary yet count as such."""
    facts = [_facts(row) for row in conn.execute(_FLEET)]
    nulls = _nulls(conn, None)
    unsteady = _unsteady(conn)
    decisions = _decisions(conn, None)
    by_node: dict[str, list[RunFacts]] = defaultdict(list)
    for run in facts:
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


def _lacks(row: Row[Any]) -> bool:
    """Whether a run's summary is still to be made."""
    if row.verdict is None or row.version == VERSION:
        return False
    return row.version is None or row.records_dropped_at is None


def _facts(row: Row[Any]) -> RunFacts:
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


def _profile(row: Row[Any]) -> RunProfile | None:
    """The statistics of a counted run; None for all others."""
    if row.detail is None or not row.attempts:
        return None
    return RunProfile(
        attempts=list(row.attempts), steps=row.steps, affected_steps=row.affected_steps, sites=row.sites,
        elements=row.elements, mismatched_sites=row.mismatched_sites, mismatched_elements=row.mismatched_elements,
        device_seconds=row.device_seconds, devices=list(row.devices), device_count=row.device_count,
        detail=_decoder.decode(row.detail),
    )  # fmt: skip


def _nulls(conn: Connection, executables: Iterable[str] | None) -> list[NullPass]:
    """Passed null runs; of many with the same executables and nodes all are given."""
    if executables is not None and not (executables := list(executables)):
        return []
    found = conn.execute(_NULLS, {"all": executables is None, "executables": executables or []})
    return [
        NullPass(r.executables, r.reference_node, r.suspect_node, r.finished_at.timestamp(), r.workload, r.model)
        for r in found
    ]


def _unsteady(conn: Connection) -> dict[str, float]:
    """Nodes that differed from themselves -> until when: for ever, or until they were cleared after it."""
    last: dict[str, float] = {}
    for row in conn.execute(_UNSTEADY):
        last[row.node] = max(last.get(row.node, 0.0), row.finished_at.timestamp())
    decisions = _decisions(conn, list(last)) if last else {}
    out = {}
    for node, when in last.items():
        after = cleared_at(decisions.get(node, ()))
        out[node] = after if after is not None and after > when else math.inf
    return out


def _decisions(conn: Connection, nodes: list[str] | None) -> dict[str, list[NodeDecision]]:
    out: dict[str, list[NodeDecision]] = defaultdict(list)
    for row in conn.execute(_DECISIONS, {"all": nodes is None, "nodes": nodes or []}):
        out[row.node].append(
            NodeDecision(row.decision, row.reason, row.decided_by, row.decided_at.timestamp(), row.run_id)
        )
    return out
