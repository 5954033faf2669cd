"""Profiles of nodes from a real database: what enters them, when, and that nothing else does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from db_samples import make_run, scalar, some_records
from node_runs import BEGAN, HOUR, answer, gradient, node_run, store_run, write
from tandem.db import migrate, queries, store
from tandem.db.partitions import Month, drop_partitions_older_than
from tandem.db.profiles import catch_up, clear, load_fleet, load_node
from tandem.db.sink import Sink
from tandem.errors import UsageError
from tandem.nodes.run_profile import profile_run
from tandem.records import RunRecords
from tandem.runs.attempt import of_attempt, unequal_answers
from tandem.vocabulary import ControlName, NodeVerdict, Role


def corrupting(engine: Engine) -> list[RunRecords]:
    """A null run, and two mismatches with two references."""
    runs = [
        node_run(kind="null", suspect="well-1", reference="well-2"),
        node_run(hits={3: 5}, began=BEGAN + HOUR),
        node_run(hits={4: 6, 7: 1}, reference="other", kind="swap", began=BEGAN + 2 * HOUR),
    ]
    for records in runs:
        store_run(engine, records)
    return runs


def dump(engine: Engine, node: str) -> Mapping[str, object]:
    from tandem.nodes.as_json import to_json

    return to_json(load_node(engine, node))


def test_a_profile_is_that_of_the_records(engine: Engine) -> None:
    runs = corrupting(engine)
    p = load_node(engine, "sick")
    assert (p.verdict, p.rule, p.references) == (NodeVerdict.CORRUPTING, "reproduced", ("healthy", "other"))
    assert (p.steps, p.affected_steps, p.mismatched_elements, p.device_hours) == (20, 3, 12, 2.0)
    assert p.evidence == "rank 1, fwd/attn, 7.5e-5, transient, 2 references"
    assert [line.facts.run_id for line in p.runs] == [runs[2].run.run_id, runs[1].run.run_id]
    for line, records in zip(p.runs, runs[:0:-1], strict=True):
        summary = profile_run(records)
        assert line.counted
        assert list(line.timeline) == summary.detail.timeline
        assert line.facts.executables == summary.executables
    assert load_node(engine, "healthy").as_reference == 1
    assert load_node(engine, "well-1").matches == 1


@pytest.mark.parametrize(
    "change",
    [
        {"synthetic": True},
        {"hosts": ("one", "one")},
        {"hosts": ("", "one")},
        {"reference": "sick", "hosts": ("one", "two")},
        {"missing": [ControlName.POSITIVE_START]},
        {"reason": "dead_peer"},
        {"differs": [Role.REFERENCE], "reference": "third"},
    ],
    ids=str,
)
@pytest.mark.parametrize("hits", [{}, {2: 900}], ids=["clean", "found"])
def test_what_may_not_enter_a_statistic_changes_none(
    engine: Engine, change: dict[str, object], hits: dict[int, int]
) -> None:
    """Synthetic runs, pairs on one host and inconclusive runs: the numbers are those without them."""
    corrupting(engine)
    before = dump(engine, "sick")
    store_run(engine, node_run(hits=hits, began=BEGAN + 3 * HOUR, **change))  # type: ignore[arg-type]
    after = dump(engine, "sick")
    inconclusive = not change.keys().isdisjoint({"missing", "reason", "differs"})
    assert len(after["runs"]) == len(before["runs"]) + inconclusive  # type: ignore[arg-type]
    for name in set(before) - {"runs"}:
        assert after[name] == before[name], name
    stored = scalar(engine, "SELECT count(*) FROM run_profiles")
    assert stored == 3 + inconclusive


def test_neither_synthetic_runs_nor_pairs_on_one_host_make_a_node(engine: Engine) -> None:
    for number, change in enumerate(({"synthetic": True}, {"hosts": ("a", "a")}, {"reference": "sick"})):
        store_run(engine, node_run(hits={1: 5}, seed=number, **change))  # type: ignore[arg-type]
    assert load_fleet(engine) == []
    assert scalar(engine, "SELECT count(*) FROM run_profiles") == 0
    p = load_node(engine, "sick")
    assert (p.verdict, p.rule, p.runs) == (NodeVerdict.UNKNOWN, "not_tested", ())


def test_not_even_by_hand_does_a_synthetic_run_get_a_profile(engine: Engine) -> None:
    """The statement itself refuses it, not only the code in front of it."""
    from tandem.db import profiles

    run_id = store_run(engine, node_run(synthetic=True, hits={1: 5}))
    empty = profile_run(node_run(hits={1: 5}))
    values = {name: getattr(empty, name) for name in profiles._FIELDS}
    with engine.begin() as conn:
        done = conn.execute(profiles._STORE, values | {"run_id": run_id, "passed_null": False, "detail": "{}"})
    assert done.rowcount == 0


def test_a_running_run_is_listed_and_not_counted(engine: Engine, database_url: str, tmp_path: Path) -> None:
    run_id = make_run(engine)
    with Sink(database_url, tmp_path, run_id, 1) as sink:
        for record in some_records(run_id, 5):
            sink.put(record)
        assert sink.flush(20)
    p = load_node(engine, "sick")
    assert (p.counted_runs, p.steps, [line.note for line in p.runs]) == (0, 0, ["not finished"])
    (line,) = [x for x in load_fleet(engine) if x.node == "sick"]
    assert (line.running, line.decided.verdict) == (1, NodeVerdict.UNKNOWN)


@pytest.mark.parametrize("nothing_came", [False, True], ids=["controls before", "all late"])
def test_a_finding_that_arrives_after_the_verdict_is_seen(engine: Engine, nothing_came: bool) -> None:
    """The spool of an attempt may be delivered late: no statistic, but it holds the node back."""
    records = node_run(hits={3: 5}, missing=[ControlName.POSITIVE_END])
    bare = RunRecords(
        run=records.run, attempts=records.attempts, steps=[], mismatches=[],
        controls=[] if nothing_came else records.controls, faults=[], closings=[],
    )  # fmt: skip
    store_run(engine, bare)
    for number, workload in enumerate(("submodule", "gradient")):
        store_run(engine, node_run(workload=workload, seed=number + 1, began=BEGAN + HOUR, hours=4))
    assert load_node(engine, "sick").verdict is NodeVerdict.CLEAN
    write(engine, records)
    assert load_node(engine, "sick").rule == "inconclusive_finding"
    (line,) = [x for x in load_fleet(engine) if x.node == "sick"]
    assert line.decided.rule == "inconclusive_finding"


@pytest.mark.parametrize("kind", ["suspect", "null"])
def test_a_match_does_not_outlive_what_arrives_after_it(engine: Engine, kind: str) -> None:
    """Of an attempt before the one that matched: a run keeps its verdict, its node does not, nor does it control
    anything.
    """
    matches = [node_run(workload=w, seed=n, hours=4) for n, w in enumerate(("submodule", "gradient"))]
    run_ids = [store_run(engine, replace(r, run=replace(r.run, kind=kind))) for r in matches]
    passed = "SELECT count(*) FROM run_profiles WHERE passed_null"
    assert load_node(engine, "sick").verdict is NodeVerdict.CLEAN
    assert scalar(engine, passed) == (2 if kind == "null" else 0)
    found = node_run(hits={3: 5}, seed=9)
    store.start_attempt(engine, replace(found.attempts[0], run_id=run_ids[0], attempt=2))
    of_first = lambda rows: [replace(row, run_id=run_ids[0], attempt=2) for row in rows]
    write(engine, replace(found, steps=of_first(found.steps), mismatches=of_first(found.mismatches),
                          controls=of_first(found.controls), closings=[]))  # fmt: skip
    node = load_node(engine, "sick")
    assert (node.verdict, node.rule) == (NodeVerdict.SUSPECTED, "late_finding")
    assert scalar(engine, passed) == (1 if kind == "null" else 0)


@pytest.mark.parametrize("batches", [1, 2, 4], ids=lambda n: f"{n} batches")
@pytest.mark.parametrize(
    ("scores", "unequal"),
    [
        (([0.5, 1.0], [0.5, 1.0]), 0),
        (([0.5, 1.0], [0.5, math.nextafter(1.0, 2.0)]), 1),
        (([0.5, 0.0], [0.5, -0.0]), 1),
        (([0.5, math.nan], [0.5, math.nan]), 0),
    ],
    ids=str,
)
def test_answers_that_arrive_after_the_verdict_are_seen(
    engine: Engine, scores: tuple[list[float], list[float]], unequal: int, batches: int
) -> None:
    """Whichever of the two comes first, and once, however often they are delivered."""
    answers = [
        answer(q, arm, told)
        for arm, last in zip(("suspect", "reference"), scores, strict=True)
        for q, told in (("q1", [0.25, 0.5]), ("q2", last))
    ]
    records = node_run(workload="finetune", missing=[ControlName.POSITIVE_END], evaluations=answers)
    store_run(engine, replace(records, evaluations=[], closings=[]))
    for number, workload in enumerate(("submodule", "gradient")):
        store_run(engine, node_run(workload=workload, seed=number + 1, began=BEGAN + HOUR, hours=4))
    bare = replace(records, steps=[], mismatches=[], controls=[], closings=[])
    size = len(answers) // batches
    for _ in range(2):
        for begin in range(0, len(answers), size):
            write(engine, replace(bare, evaluations=records.evaluations[begin : begin + size]))
    assert unequal == sum(len(unequal_answers(of_attempt(records, a))) for a in records.attempts)
    assert scalar(engine, "SELECT sum(other_findings) FROM attempt_totals") == unequal
    assert scalar(engine, "SELECT count(*) FROM evaluations") == len(answers)
    node = load_node(engine, "sick")
    assert (node.verdict, node.rule) == (
        (NodeVerdict.SUSPECTED, "inconclusive_finding") if unequal else (NodeVerdict.CLEAN, "covered")
    )


def test_retention_takes_nothing_from_a_profile(engine: Engine) -> None:
    corrupting(engine)
    store_run(engine, node_run(suspect="fine", steps=7, began=BEGAN + HOUR))
    before = dump(engine, "sick"), dump(engine, "fine")
    month = Month.of(datetime.fromtimestamp(BEGAN, UTC))
    drop_partitions_older_than(engine, month.following.following.start)
    assert scalar(engine, "SELECT count(*) FROM steps") == 0
    assert (dump(engine, "sick"), dump(engine, "fine")) == before


def test_runs_of_an_earlier_version_are_summarised_by_the_upgrade(engine: Engine, database_url: str) -> None:
    corrupting(engine)
    before = dump(engine, "sick")
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM run_profiles"))
    migrate.upgrade(database_url)
    assert scalar(engine, "SELECT count(*) FROM run_profiles") == 3
    assert dump(engine, "sick") == before
    with engine.begin() as conn:
        conn.execute(text("UPDATE run_profiles SET version = 0, steps = 1"))
    assert catch_up(engine) == 3
    assert catch_up(engine) == 0
    assert dump(engine, "sick") == before


def test_of_rows_that_were_dropped_before_nothing_is_made_up(engine: Engine) -> None:
    """A match keeps its totals; a mismatch counts for the verdict and enters no frequency."""
    store_run(engine, node_run(hits={3: 5}))
    store_run(engine, node_run(steps=9, began=BEGAN + HOUR, hours=2.0))
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM run_profiles"))
    month = Month.of(datetime.fromtimestamp(BEGAN, UTC))
    drop_partitions_older_than(engine, month.following.following.start)
    p = load_node(engine, "sick")
    assert (p.verdict, p.rule) == (NodeVerdict.SUSPECTED, "found")
    assert (p.steps, p.device_hours, p.affected_steps, p.classes) == (9, 2.0, 0, ())
    assert [line.counted for line in p.runs] == [True, False]
    assert "dropped" in p.runs[1].note


def test_totals_of_attempts_from_before_they_were_kept_are_made_by_the_migration(
    engine: Engine, database_url: str
) -> None:
    for number, hits in enumerate(({}, {3: 5, 9: 1})):
        store_run(engine, node_run(seed=number, hits=hits))
    columns = "run_id, attempt, last_step, steps, sites, elements, mismatched_sites, mismatched_elements, "
    columns += "other_findings, first_step, first_site, first_rank, first_place, first_mismatched"
    query = f"SELECT {columns} FROM attempt_totals ORDER BY 1, 2"
    with engine.connect() as conn:
        before = conn.execute(text(query)).all()
    listed = queries.list_runs(engine)
    migrate.downgrade(database_url, "0004")
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM attempt_totals WHERE first_step IS NULL"))
        conn.execute(text("UPDATE attempt_totals SET steps = 2, elements = 7, first_step = NULL"))
    migrate.upgrade(database_url)
    with engine.connect() as conn:
        assert conn.execute(text(query)).all() == before
    assert queries.list_runs(engine) == listed
    assert listed[0].steps == 11


def test_the_verdict_and_the_summary_are_one_transaction(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    records = node_run(hits={3: 5})

    def fails(*_: object) -> None:
        raise DBAPIError("INSERT", {}, Exception("away"))

    monkeypatch.setattr(store.profiles, "store_profile", fails)
    with pytest.raises(Exception, match="could not be finished"):
        store_run(engine, records)
    assert scalar(engine, "SELECT state FROM runs") == "running"


def test_the_fleet_is_sorted_by_what_needs_a_person(engine: Engine) -> None:
    corrupting(engine)
    store_run(engine, node_run(suspect="odd", hits={2: 1}, began=BEGAN + HOUR))
    for number, workload in enumerate(("submodule", "gradient")):
        store_run(engine, node_run(suspect="fine", workload=workload, seed=number, began=BEGAN + HOUR, hours=4))
    store_run(engine, node_run(suspect="new", began=BEGAN + HOUR))
    fleet = load_fleet(engine)
    assert [(line.node, str(line.decided.verdict)) for line in fleet] == [
        ("sick", "corrupting"), ("odd", "suspected"), ("new", "unknown"), ("well-1", "unknown"), ("fine", "clean"),
        ("healthy", "unknown"), ("other", "unknown"), ("well-2", "unknown"),
    ]  # fmt: skip
    assert fleet[0].evidence.endswith("transient, 2 references")
    for line in fleet:
        p = load_node(engine, line.node)
        assert (p.verdict, p.rule, p.sentence, p.missing, p.since) == (
            line.decided.verdict, line.decided.rule, line.decided.sentence, line.decided.missing, line.decided.since,
        )  # fmt: skip


def test_clearing_is_recorded_and_begins_anew(engine: Engine) -> None:
    corrupting(engine)
    for wrong in ("", "  "):
        with pytest.raises(UsageError, match="needs a reason"):
            clear(engine, "sick", wrong, "ana")
    before = clear(engine, "sick", "board replaced", "ana")
    assert before.verdict is NodeVerdict.CORRUPTING
    p = load_node(engine, "sick")
    assert (p.verdict, p.rule, p.steps, len(p.runs)) == (NodeVerdict.UNKNOWN, "cleared", 0, 2)
    assert (p.decisions[0].decided_by, p.decisions[0].reason) == ("ana", "board replaced")
    with pytest.raises(UsageError, match="nothing to clear"):
        clear(engine, "sick", "again", "ana")
    with pytest.raises(UsageError, match="no run names a node nobody"):
        clear(engine, "nobody", "why", "ana")
    assert scalar(engine, "SELECT count(*) FROM node_decisions") == 1


def test_a_node_that_differed_from_itself_is_no_witness(engine: Engine) -> None:
    """`other` is shown unsteady: its mismatch with the node no longer reproduces anything, until it is cleared."""
    corrupting(engine)
    store_run(engine, node_run(suspect="x", reference="other", differs=[Role.REFERENCE], began=BEGAN + 3 * HOUR))
    assert load_node(engine, "other").rule == "reference_differs"
    p = load_node(engine, "sick")
    assert (p.verdict, p.rule, p.references) == (NodeVerdict.SUSPECTED, "found", ("healthy", "other"))
    assert "a reference other than healthy" in p.missing[0]
    clear(engine, "other", "memory replaced", "ana")
    assert load_node(engine, "sick").rule == "found"  # that run was before the repair


def test_a_profile_reads_no_row_of_steps_or_mismatches(engine: Engine) -> None:
    corrupting(engine)
    read = (
        "SELECT sum(seq_scan + coalesce(idx_scan, 0)) FROM pg_stat_user_tables "
        "WHERE relname ~ '^(steps|mismatches|gradients|drifts)'"
    )

    def scans() -> int:
        with engine.connect() as conn:
            conn.execute(text("SELECT pg_stat_force_next_flush()"))
            conn.execute(text("SELECT pg_stat_clear_snapshot()"))
            return int(conn.scalar(text(read)) or 0)

    scans()
    before = scans()
    load_node(engine, "sick")
    load_fleet(engine)
    queries.list_runs(engine)
    engine.dispose()  # their statistics are flushed when they end
    assert scans() == before


def test_a_profile_scans_no_table_of_all_runs(engine: Engine) -> None:
    """With runs of many nodes, each of its questions goes by an index: it reads that node's rows only."""
    from tandem.db import node_rows

    run = node_run(hits={3: 5})
    store_run(engine, run)
    copies = "FROM generate_series(1, 4000) i, {} t"
    key = "md5(i::text)::uuid"
    given = {"run_id": key, "suspect_node": "'node-' || i % 200", "reference_node": "'well-' || i % 40"}
    with engine.begin() as conn:
        for table in ("runs", "attempts", "run_profiles", "attempt_totals"):
            names = list(conn.scalars(text(
                "SELECT column_name FROM information_schema.columns WHERE table_name = :t ORDER BY ordinal_position"
            ), {"t": table}))  # fmt: skip
            values = ", ".join(given.get(name, f"t.{name}") for name in names)
            conn.execute(text(f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} {copies.format(table)}"))
        for table in ("runs", "attempts", "run_profiles", "attempt_totals"):
            conn.execute(text(f"ANALYZE {table}"))
    asked: dict[str, dict[str, object]] = {
        "_MINE": {"node": "node-7"}, "_OTHERS": {"node": "well-7"}, "_AS_REFERENCE": {"node": "well-7"},
        "_NULLS": {"all": False, "executables": ["one"]}, "_UNSTEADY": {}, "_KNOWN": {"node": "node-7"},
        "_DETAILS": {"runs": [run.run.run_id]},
    }  # fmt: skip
    with engine.connect() as conn:
        for name, values in asked.items():
            plan = [str(line) for line in conn.scalars(text(f"EXPLAIN {getattr(node_rows, name)}"), values)]
            assert not [line for line in plan if "Seq Scan" in line], f"{name}: {plan}"


def test_noise_reaches_the_database(engine: Engine) -> None:
    store_run(engine, node_run(workload="gradient", hits={2: 1}, gradients=[gradient(2, 0.5, 10.0)]))
    p = load_node(engine, "sick")
    assert p.wcnts == 0.05
    assert p.runs[0].noise is not None
    assert p.runs[0].noise.worst_step == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_runs_does_not_matter(engine: Engine, order: tuple[int, ...]) -> None:
    runs = [
        node_run(kind="null", suspect="well-1", reference="well-2"),
        node_run(hits={3: 5}),
        node_run(hits={4: 6}, reference="other"),
    ]
    for number in order:
        store_run(engine, runs[number])
    assert load_node(engine, "sick").verdict is NodeVerdict.CORRUPTING
