"""Which steps a rate may count: what follows from a difference in a training says nothing new, wherever it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_runs import BEGAN, HOUR, node_run
from tandem.cli.verdict import _lines
from tandem.nodes.as_json import to_json
from tandem.nodes.run_profile import profile_run
from tandem.nodes.summary import Summarised, summarise_node
from tandem.nodes.tables import lines
from tandem.nodes.verdict import RunFacts
from tandem.records import ClassCounts, ControlRecord, RunRecords, StepRecord
from tandem.report import node_page
from tandem.runs.as_json import to_json as run_json
from tandem.runs.independent import affected, independent
from tandem.runs.summary import summarise
from tandem.statistics.frequency import per_step
from tandem.vocabulary import UNSYNCHRONISED, Cause, ControlName, Role, Workload

FIRST, STEPS = 3, 1000
NAMES = ("update/attn/param", "update/attn/moment", "update/optimizer/grad_norm", "fwd/head/reduced")


def with_counts(step: StepRecord, unequal: Mapping[str, int], rows: int = 0) -> StepRecord:
    """A step in which so many of eight tensors of each class differ; elements are known of those that have rows."""
    classes = {
        name: ClassCounts(8, 8000, unequal.get(name, 0), unequal.get(name, 0) if rows else 0)
        for name in NAMES
        if step.step or name.endswith("param")
    }
    return msgspec.structs.replace(step, classes=classes, rows=rows)


def diverged(workload: str = "training") -> RunRecords:
    """One fault in step 3 of 1000; from then on every tensor differs, by digest, and has no row."""
    records = node_run(workload=workload, steps=STEPS, hits={FIRST: 5})
    names = dict.fromkeys(NAMES, 8)
    records.steps = [with_counts(s, names if s.step >= FIRST else {}, rows=int(s.step == FIRST)) for s in records.steps]
    records.run = msgspec.structs.replace(records.run, verdict="mismatch")  # also without a fine-tuning's answers
    return records


def node_of(*runs: RunRecords) -> list[Summarised]:
    found = []
    for r in runs:
        run, p = r.run, profile_run(r)
        facts = RunFacts(
            run_id=run.run_id, workload=run.workload, kind=run.kind, model=run.model, reference=run.reference_node,
            suspect=run.suspect_node, created_at=run.created_at, finished_at=run.finished_at, verdict=run.verdict,
            reason=run.reason, executables=p.executables, comparable=p.comparable, findings=p.findings, steps=p.steps,
            affected_steps=p.affected_steps, elements=p.elements, mismatched_elements=p.mismatched_elements,
            device_hours=p.device_seconds / 3600, devices=tuple(p.devices), device_count=p.device_count,
        )  # fmt: skip
        found.append(Summarised(facts, p))
    return found


@pytest.mark.parametrize("workload", UNSYNCHRONISED)
def test_one_fault_is_one_affected_step_wherever_it_is_told(workload: str) -> None:
    """Of three steps that say something, not of a thousand of which 998 follow from it, and 997 are no right ones."""
    records = diverged(workload)
    s, p = summarise(records), profile_run(records)
    n = summarise_node("sick", node_of(records))
    rate = per_step(p.detail.classes[NAMES[0]].sums)
    assert rate is not None
    for timing in (s.timing, p.detail.timing, n.timing):
        assert (timing.steps, timing.affected, timing.onset, timing.bursts) == (3, 1, 3, 1)
    for found in (s.overall.per_step, n.per_step):
        assert found is not None
        assert (found.value, found.effective) == (1 / 3, 3)
    assert (p.affected_steps, n.affected_steps, p.steps, n.steps, s.steps) == (1, 1, STEPS, STEPS, STEPS)
    for stats in p.detail.classes.values():
        assert (stats.sums.affected, stats.mismatched_sites) == (1, 8)
        assert stats.sums.elements <= 8000 * (FIRST + 1)
    assert {c.mismatched_sites for c in s.others} == {c.mismatched_sites for c in n.classes} == {8}
    assert [c.elements for c in s.others] == [c.elements for c in n.classes]
    assert s.mismatched_sites == n.mismatched_sites == p.mismatched_sites == 8 * len(NAMES)
    assert sum(b.affected for b in p.detail.timeline) == 1
    assert any("step 3" in line and "enters no rate" in line for line in s.not_checked)
    # ... and in what is printed
    assert "affected steps  1 of 3," in "\n".join(_lines(p))
    assert "1 of 3 steps (those of a training after its first difference" in "\n".join(lines(n))
    assert run_json(s)["timing"]["affected"] == to_json(n)["timing"]["affected"] == 1
    assert to_json(n)["steps_affected"] == 1
    assert "1 affected" in re.sub(r"<[^>]*>", " ", node_page.render(n))


def test_in_a_workload_that_keeps_the_sides_equal_every_step_counts() -> None:
    records = diverged("gradient")
    s, p = summarise(records), profile_run(records)
    assert s.timing == p.detail.timing
    assert (s.timing.steps, s.timing.affected, s.timing.longest_burst) == (STEPS, STEPS - 2, STEPS - 2)


@pytest.mark.parametrize("workload", list(Workload))
def test_a_step_with_findings_outside_the_frequency_alone_is_affected_nowhere(workload: str) -> None:
    """A kept input that had changed is told of as such; it is no mismatch of the step's arithmetic."""
    records = node_run(workload=workload, steps=10, hits={4: 1})
    records.mismatches = [msgspec.structs.replace(m, cause=Cause.STATE, tensor="input.w") for m in records.mismatches]
    records.steps = [with_counts(s, {}, rows=int(s.step == 4)) for s in records.steps]
    records.run = msgspec.structs.replace(records.run, verdict="mismatch")
    s, p = summarise(records), profile_run(records)
    n = summarise_node("sick", node_of(records))
    assert (s.timing.affected, p.detail.timing.affected, p.affected_steps, n.affected_steps) == (0, 0, 0, 0)
    assert s.findings == p.detail.findings == n.findings == {"state": 1}


@pytest.mark.parametrize("workload", UNSYNCHRONISED)
def test_what_follows_from_a_changed_state_enters_no_rate(workload: str) -> None:
    """The step that began with it has rows of the state and of its consequences, and counts none of them; those behind
    it count every tensor, by digest, although nothing but the state was ever wrong.
    """
    records = node_run(workload=workload, steps=10, hits={4: 1})
    records.mismatches = [msgspec.structs.replace(m, cause=Cause.STATE, tensor="input.w") for m in records.mismatches]
    after = dict.fromkeys(NAMES, 8)
    records.steps = [with_counts(s, after if s.step > 4 else {}, rows=33 * (s.step == 4)) for s in records.steps]
    records.run = msgspec.structs.replace(records.run, verdict="mismatch")
    s, p = summarise(records), profile_run(records)
    for timing in (s.timing, p.detail.timing):
        assert (timing.steps, timing.affected) == (4, 0)
    assert (s.mismatched_sites, p.mismatched_sites, p.affected_steps) == (0, 0, 0)


@pytest.mark.parametrize(("rows", "apart", "steps"), [(0, 2, [0, 1, 2]), (2, 1, [0])])
def test_a_resumed_attempt_counts_as_long_as_what_it_loaded_was_equal(rows: int, apart: int, steps: list[int]) -> None:
    records = node_run(workload="training", steps=4)
    made = [
        with_counts(s, {NAMES[0]: 1} if s.step >= apart else {}, rows=0 if s.step else rows) for s in records.steps
    ]  # fmt: skip
    again = ControlRecord(
        run_id=records.run.run_id, attempt=1, name=ControlName.RESUMED, role=Role.REFERENCE, step=20, subject="",
        ok=True,
    )  # fmt: skip
    assert [s.step for s in independent(made, "training", {1})] == steps
    assert 1 not in [s.step for s in independent(made[1:], "training", {1})]  # nothing is known of what it loaded
    records.steps, records.controls = made, [*records.controls, again]
    assert summarise(records).timing.steps == len(steps) - 1


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 12), st.sets(st.sampled_from(NAMES))),
        unique_by=lambda s: s[:2], max_size=30,
    ),
    st.randoms(),
)  # fmt: skip
def test_against_the_rule_step_by_step(drawn: list[tuple[int, int, set[str]]], rng: object) -> None:
    """A step counts unless the one before it in its attempt left a parameter or moment unequal; order is no matter."""
    base = node_run(workload="training", steps=1).steps[1]
    steps = [
        with_counts(msgspec.structs.replace(base, attempt=a, step=n), dict.fromkeys(names, 1)) for a, n, names in drawn
    ]
    expected = []
    for attempt, number, _ in sorted(drawn, key=lambda s: s[:2]):
        before = [names for a, n, names in sorted(drawn, key=lambda s: s[:2]) if a == attempt and n < number]
        if not before or not before[-1] & {NAMES[0], NAMES[1]}:
            expected.append((attempt, number))
    rng.shuffle(steps)  # type: ignore[attr-defined]
    assert [(s.attempt, s.step) for s in independent(steps, "training")] == expected
    assert all(affected(s) == bool(names) for a, n, names in drawn for s in steps if (s.attempt, s.step) == (a, n))
    everything = independent(steps, "submodule")
    assert [(s.attempt, s.step) for s in everything] == sorted((a, n) for a, n, _ in drawn)


def test_a_profile_of_several_runs_adds_what_counts() -> None:
    other = node_run(steps=10, hits={2: 3}, seed=1, began=BEGAN + HOUR)
    n = summarise_node("sick", node_of(diverged(), other))
    assert (n.timing.steps, n.affected_steps, n.steps) == (13, 2, STEPS + 10)
    assert n.per_step is not None
    assert (n.per_step.value, n.per_step.effective) == (2 / 13, 13)
