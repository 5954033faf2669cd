"""Profiles of nodes in the database: what each run adds is written with its verdict, and a profile is read from that
(`tandem.db.nodes`).
"""

from __future__ import annotations

from uuid import UUID

import msgspec
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from tandem.db import queries
from tandem.db.engine import one_line, unreachable
from tandem.db.node_rows import REAL, rows_of_node
from tandem.db.nodes import FleetLine, profile_from, read_fleet, read_next, read_node
from tandem.errors import DatabaseError, NothingToClearError, UsageError
from tandem.nodes.assess import Ended, Wanted
from tandem.nodes.profile import NodeProfile
from tandem.nodes.run_profile import VERSION, Detail, RunProfile, profile_run, two_hosts
from tandem.nodes.verdict import NodeDecided, NodeRules
from tandem.records import RunRecords
from tandem.statistics.timing import Timing
from tandem.vocabulary import CLEARED, Kind, NodeVerdict, Verdict

_FIELDS = tuple(name for name in RunProfile.__struct_fields__ if name != "detail")
_COLUMNS = (*_FIELDS, "passed_null", "detail")

_STORE = text(
    f"INSERT INTO run_profiles (run_id, {', '.join(_COLUMNS)}) "  # noqa: S608 - names of columns
    f"SELECT r.run_id, {', '.join(f'CAST(:{c} AS json)' if c == 'detail' else f':{c}' for c in _COLUMNS)} "
    f"FROM runs r WHERE r.run_id = :run_id AND {REAL} "
    f"ON CONFLICT (run_id) DO UPDATE SET {', '.join(f'{c} = EXCLUDED.{c}' for c in _COLUMNS)}, updated_at = now()"
)

_LACKING_ANY = (
    "SELECT r.run_id FROM runs r LEFT JOIN run_profiles p USING (run_id) WHERE r.state = 'finished' "  # noqa: S608
    f"AND (p.run_id IS NULL OR (p.version <> :version AND r.records_dropped_at IS NULL)) AND {REAL} "
)
_LACKING = text(f"{_LACKING_ANY} ORDER BY r.run_id")
_LACKING_OF_NODE = text(f"{_LACKING_ANY} AND r.suspect_node = :node ORDER BY r.run_id")
_TOTALS = text(
    "SELECT attempt, steps, sites, elements, mismatched_sites, mismatched_elements, other_findings "
    "FROM attempt_totals WHERE run_id = :run_id"
)

_encoder = msgspec.json.Encoder()


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
    matched = records.run.verdict == Verdict.MATCH and not profile.findings  # which may have come after the verdict
    passed = records.run.kind == Kind.NULL and matched and bool(profile.executables)
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
    steps = sum(max(t.steps - 1, 0) for t in counted)
    return msgspec.structs.replace(
        profile,
        steps=steps,
        detail=msgspec.structs.replace(profile.detail, timing=Timing(steps=steps)),
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


def load_node(engine: Engine, node: str, rules: NodeRules = NodeRules()) -> NodeProfile:  # noqa: B008 - frozen
    """The profile of a node, after the summaries that its runs lack were made.

    Raises:
        UsageError: no run names it.
        DatabaseError: the database failed.
    """
    found = _load_node(engine, node, rules, lacking_ok=False)
    if found is None:
        catch_up(engine, node)
        found = _load_node(engine, node, rules, lacking_ok=True)
    assert found is not None
    return found


def _load_node(engine: Engine, node: str, rules: NodeRules, *, lacking_ok: bool) -> NodeProfile | None:
    """None if a run has no summary yet, unless ``lacking_ok``."""
    try:
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as conn:
            rows = rows_of_node(conn, node)
            return None if rows.lack and not lacking_ok else profile_from(conn, rows, rules)
    except DBAPIError as error:
        raise unreachable(engine.url.render_as_string(hide_password=False), error) from None


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
