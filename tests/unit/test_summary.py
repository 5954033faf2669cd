"""The summary of a run: counts add up, and "first" is the least."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_runs import sample_run
from tandem.paper.published import COLUMNS, NODES
from tandem.records import ControlRecord, FaultRecord
from tandem.runs.as_json import to_json
from tandem.runs.parts import with_severity
from tandem.runs.summary import summarise
from tandem.runs.tables import bound_lines, fault_lines, phase_module_table
from tandem.sites import in_frequency
from tandem.statistics.bounds import rate_bound, zero_bound
from tandem.statistics.mismatch import compare
from tandem.vocabulary import Cause, ControlName, Role

RUNS = st.builds(
    sample_run,
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 15),
    layers=st.integers(1, 5),
    tp=st.integers(1, 4),
    rows=st.integers(0, 40),
    synthetic=st.booleans(),
    closed=st.booleans(),
)


@given(RUNS)
def test_the_lines_add_up_to_the_totals(records):
    s = summarise(records)
    lines = [*s.table, *s.others]
    assert s.sites == sum(c.sites for c in lines) == sum(c.sites for r in records.steps for c in r.classes.values())
    assert s.elements == sum(c.elements for c in lines)
    assert s.mismatched_sites == sum(c.mismatched_sites for c in lines)
    assert s.mismatched_elements == sum(c.mismatched_elements for c in lines)
    assert s.mismatched_elements == sum(p.mismatched_elements for p in s.over_steps)
    compute = [m for m in records.mismatches if m.cause is Cause.COMPUTE]
    assert s.mismatched_sites == len(compute) == sum(s.replays.values()) == sum(s.extents.values())
    assert sum(s.findings.values()) == len(records.mismatches) - len(compute)
    assert sum(n for n, _ in s.ranks.values()) == sum(n for n, _ in s.layers.values()) == len(records.mismatches)
    assert sum(n for row in s.site_map for n, _ in row.cells.values()) == len(records.mismatches)
    assert sum(map(sum, s.bits.values())) == sum(sum(m.bits) for m in compute)
    assert sum(s.severities.values()) + s.no_severity == len(compute)


@given(RUNS)
def test_only_per_rank_partials_are_in_the_table(records):
    s = summarise(records)
    assert all(in_frequency(c.family) for c in s.table)
    assert not any(in_frequency(c.family) for c in s.others)
    partial = sum(p.partial_mismatched for p in s.over_steps)
    assert partial == sum(c.mismatched_elements for c in s.table)


@given(RUNS, st.randoms(use_true_random=False))
def test_the_first_is_the_least_and_order_of_records_does_not_matter(records, rng: random.Random):
    s = summarise(records)
    if records.mismatches:
        assert (s.first.step, s.first.site, s.first.rank) == min((m.step, m.site, m.rank) for m in records.mismatches)
        assert s.first_rows[0] == s.first
    else:
        assert s.first is None
    shuffled = msgspec.structs.replace(records)
    for name in ("steps", "mismatches", "controls", "faults", "closings"):
        rows = list(getattr(records, name))
        rng.shuffle(rows)
        setattr(shuffled, name, rows)
    again, before = asdict(summarise(shuffled)), asdict(s)
    again.pop("extents"), before.pop("extents")  # equally frequent ones may change places
    assert again == before


@given(RUNS)
def test_severity_lies_between_its_rows(records):
    s = summarise(records)
    for c in s.table:
        rows = [
            m
            for m in records.mismatches
            if (m.phase, m.module, m.tensor, m.cause) == (c.phase, c.module, c.family, Cause.COMPUTE)
        ]
        if not rows:
            assert c.severity_mean is c.severity_max is None
            continue
        means = [m.severity_mean for m in rows]
        assert min(means) * (1 - 1e-9) <= c.severity_mean <= max(means) * (1 + 1e-9)
        assert c.severity_max == max(m.severity_max for m in rows)


@given(st.integers(0, 2**32), st.booleans())
def test_a_row_weighs_as_many_elements_as_have_a_relative_difference(seed: int, overlap: bool):
    """Exactly, unless an element is not finite where the reference is zero; then less, but never nothing."""
    draw = np.random.default_rng(seed)
    reference = draw.choice([0.0, 1.0, -2.0, 3.5], 40).astype(np.float32)
    suspect = np.where(draw.random(40) < 0.5, draw.choice([0.0, 1.5, np.nan, np.inf], 40), reference).astype(np.float32)
    if not overlap:
        suspect = np.where((reference == 0) & ~np.isfinite(suspect), np.float32(7), suspect)
    difference = compare(suspect, reference)
    if difference is None or difference.severity_mean is None:
        return
    row = msgspec.structs.replace(sample_run(rows=1).mismatches[0], **difference.fields())
    exact = int(((reference != 0) & np.isfinite(suspect) & (suspect != reference)).sum())
    assert with_severity(row) == exact if not overlap else 1 <= with_severity(row) <= exact


def test_a_match_states_its_bound_and_nothing_else_does():
    s = summarise(sample_run(steps=2000))
    assert s.bound.per_step == pytest.approx(zero_bound(2000)) == pytest.approx(0.0014967, rel=1e-3)
    assert s.bound.per_device_hour == pytest.approx(rate_bound(s.device_hours))
    assert s.bound.per_element == pytest.approx(zero_bound(s.elements))
    assert "0.15 % of steps" in bound_lines(s)[0]
    assert summarise(sample_run(rows=5)).bound is None
    assert summarise(sample_run(verdict="inconclusive", closed=False)).bound is None


def test_device_hours_without_a_closing_record_are_those_of_the_steps():
    assert summarise(sample_run(steps=9, tp=2, closed=False)).device_hours == pytest.approx(10 * 2.0 * 2 / 3600)


def test_missing_controls_are_named():
    s = summarise(sample_run(closed=False, verdict="inconclusive"))
    missing = {(c.name, c.role) for c in s.controls if c.status == "missing"}
    assert ("self_replay_end", "suspect") in missing
    assert ("closing", "pair") in missing
    assert "positive end" in s.not_checked[0]
    assert not [c for c in summarise(sample_run()).controls if c.status != "ok"]


def test_a_suspect_that_differs_from_itself_is_a_finding_only_beside_a_steady_reference():
    def with_self_replay(reference_ok: bool) -> dict[str, int]:
        records = sample_run()
        records.controls = [
            msgspec.structs.replace(c, ok=c.ok and (c.role is Role.SUSPECT or reference_ok))
            if c.name is ControlName.SELF_REPLAY_END
            else c
            for c in records.controls
        ]
        records.controls = [
            msgspec.structs.replace(c, ok=False)
            if (c.name, c.role, c.subject) == (ControlName.SELF_REPLAY_END, Role.SUSPECT, "attn.fwd")
            else c
            for c in records.controls
        ]
        return summarise(records).findings

    assert with_self_replay(True) == {"self_replay": 1}
    assert with_self_replay(False) == {}


def test_a_failed_control_says_what_failed():
    records = sample_run()
    records.controls.append(
        ControlRecord(
            run_id=records.run.run_id,
            attempt=1,
            name=ControlName.PARITY,
            role=Role.SUSPECT,
            step=0,
            subject="driver",
            ok=False,
            detail={"reference": "570", "suspect": "580"},
        )
    )
    parity = next(c for c in summarise(records).controls if c.name == "parity")
    assert (parity.status, parity.failed) == ("failed", 1)
    assert parity.failures == ("step 0 driver reference=570 suspect=580",)


def test_truth_beside_counts():
    records = sample_run(rows=30, synthetic=True)
    truth = summarise(records).faults
    assert truth.exact
    assert truth.found_elements == truth.output_changed == summarise(records).mismatched_elements
    assert truth.unexplained_sites == 0
    missed = records.mismatches.index(next(m for m in records.mismatches if m.cause is Cause.COMPUTE))
    del records.mismatches[missed]
    truth = summarise(records).faults
    assert not truth.exact
    assert truth.unequal == 1
    assert "differ from the injector" in fault_lines(summarise(records))[1]


def test_a_fault_that_changed_nothing_need_not_be_found():
    records = sample_run(synthetic=True)
    records.faults.append(
        FaultRecord(run_id=records.run.run_id, attempt=1, step=1, site=1, rank=0, level="output", changed=0)
    )
    assert summarise(records).faults.exact


def test_a_capped_run_says_so_and_keeps_exact_totals():
    records = sample_run(rows=30)
    total = summarise(records).mismatched_elements
    del records.mismatches[10:]
    s = summarise(records)
    assert s.capped
    assert s.mismatched_elements == total
    assert any("cap of rows" in line for line in s.not_checked)


def test_an_empty_run_has_a_summary():
    records = sample_run()
    for name in ("attempts", "steps", "controls", "closings"):
        getattr(records, name).clear()
    s = summarise(records)
    assert (s.sites, s.elements, s.steps, s.device_hours) == (0, 0, 0, 0.0)
    assert phase_module_table(s) == ["no site was compared"]
    json.dumps(to_json(s), allow_nan=False)


@given(RUNS)
def test_json_is_json(records):
    value = to_json(summarise(records))
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value["mismatched_elements"] == sum(
        c["mismatched_elements"] for c in value["table"] + value["other_tensors"]
    )
    assert (value["fault_log"] is not None) == records.run.synthetic


def test_published_values_are_the_papers():
    by_name = {n.name: n for n in NODES}
    assert by_name["node 11"].frequency[COLUMNS[0]] == 2.89e-2
    assert by_name["node 10"].frequency[COLUMNS[3]] == 7.98e-5
    assert by_name["node 11"].wcnts == 0.051
    assert set(by_name["node 2"].frequency.values()) == {0.0}


def test_a_pair_on_one_machine_says_so() -> None:
    """A fault that meets both workers alike is not seen there; over two nodes the line would be wrong."""
    records = sample_run()
    here = msgspec.structs.replace(records.run, reference_node="one", suspect_node="one")
    one = summarise(msgspec.structs.replace(records, run=here))
    assert any("Another machine" in line for line in one.not_checked)
    assert not any("Another machine" in line for line in summarise(records).not_checked)
