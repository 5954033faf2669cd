"""What a run adds to its node's profile, and the profile of merged runs, against independent paths."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from node_runs import BEGAN, CLASSES, HOUR, answer, drift, gradient, node_run
from pages import cells
from tandem.nodes.as_json import to_json
from tandem.nodes.profile import SHOWN
from tandem.nodes.run_profile import BINS, Detail, evidence_words, profile_run, timeline, two_hosts
from tandem.nodes.summary import Summarised, summarise_node
from tandem.nodes.tables import lines
from tandem.nodes.verdict import NodeDecision, NullPass, RunFacts
from tandem.records import RunRecords
from tandem.report import node_page
from tandem.runs.summary import summarise
from tandem.statistics.sketch import RELATIVE_ERROR
from tandem.vocabulary import Cause, ControlName, NodeVerdict, Role

HITS = st.dictionaries(st.integers(1, 30), st.integers(1, 1000), max_size=12)


def facts(records: RunRecords) -> RunFacts:
    """As the database reads them."""
    run, p = records.run, profile_run(records)
    return RunFacts(
        run_id=run.run_id, workload=run.workload, kind=run.kind, model=run.model, reference=run.reference_node,
        suspect=run.suspect_node, created_at=run.created_at, finished_at=run.finished_at, verdict=run.verdict,
        reason=run.reason, executables=p.executables, comparable=p.comparable, reference_differs=p.reference_differs,
        suspect_differs=p.suspect_differs, findings=p.findings, steps=p.steps, affected_steps=p.affected_steps,
        elements=p.elements, mismatched_elements=p.mismatched_elements, device_hours=p.device_seconds / 3600,
        devices=tuple(p.devices), device_count=p.device_count, evidence=p.evidence,
    )  # fmt: skip


def summarised(*runs: RunRecords) -> list[Summarised]:
    out = []
    for r in runs:
        profile = profile_run(r)
        out.append(Summarised(facts(r), profile if profile.attempts else None))
    return out


@given(HITS, st.randoms())
def test_a_summary_survives_its_way_through_json_and_has_no_order(hits: dict[int, int], rng: random.Random) -> None:
    records = node_run(steps=30, hits=hits)
    found = profile_run(records)
    assert msgspec.json.decode(msgspec.json.encode(found.detail), type=Detail) == found.detail
    for rows in (records.steps, records.mismatches, records.controls, records.closings):
        rng.shuffle(rows)  # type: ignore[arg-type]
    assert profile_run(records) == found
    assert found.evidence == ("" if not hits else found.evidence)
    assert (found.affected_steps, found.mismatched_elements) == (len(hits), sum(hits.values()))


def test_a_replaced_device_is_told_apart() -> None:
    old, new = ("GPU-a", "GPU-b"), ("GPU-a", "GPU-c")
    runs = [node_run(hits={3: 5}, devices=old), node_run(devices=new, seed=1, began=BEGAN + HOUR)]
    p = summarise_node("sick", summarised(*runs))
    assert {d.name: (d.rank, d.hours, d.mismatched_elements, d.present) for d in p.devices} == {
        "GPU-a": (0, 1.0, 0, True), "GPU-b": (1, 0.5, 5, False), "GPU-c": (1, 0.5, 0, True),
    }  # fmt: skip
    assert (p.covered, p.device_count) == (2, 2)


@given(HITS, HITS)
def test_a_profile_is_recomputed_from_the_rows_by_numpy(one: dict[int, int], other: dict[int, int]) -> None:
    runs = [node_run(steps=30, hits=one), node_run(steps=30, hits=other, reference="r2", seed=1, hours=3.0)]
    p = summarise_node("sick", summarised(*runs))
    rows = [m for r in runs for m in r.mismatches]
    assert (p.steps, p.affected_steps, p.device_hours) == (60, len(one) + len(other), 4.0)
    assert p.elements == sum(c.elements for r in runs for s in r.steps for c in s.classes.values())
    assert p.mismatched_elements == int(np.sum([m.mismatched for m in rows], dtype=np.int64))
    (out,) = [c for c in p.classes if c.family == "out"]
    assert out.elements == 60 * CLASSES["fwd/attn/out"][1]
    assert out.per_element is not None
    assert out.per_element.value == pytest.approx(sum(m.mismatched or 0 for m in rows) / out.elements)
    assert p.bits == ({16: [sum(m.mismatched or 0 for m in rows)] + [0] * 15} if rows else {})
    assert p.ranks == ({1: (len(rows), p.mismatched_elements)} if rows else {})
    damaged = {d.name: d.mismatched_sites for d in p.devices}
    assert damaged == {"cuda:0": 0, "cuda:1": len(rows)}
    assert [(d.rank, d.hours) for d in p.devices] == [(0, 2.0), (1, 2.0)]
    if rows:
        weights = [max(1, (m.mismatched or 0) - 0) for m in rows]
        assert out.severity_mean == pytest.approx(np.average([m.severity_mean or 0 for m in rows], weights=weights))
        assert out.severity_median == pytest.approx(0.25, rel=RELATIVE_ERROR * 1.001)
        assert out.severity_max == 4.0
        assert p.replays == {"transient": len(rows)}
        (row,) = p.layer_map
        assert (row.phase, row.module, row.tensor, row.cells) == (
            "fwd",
            "attn",
            "out",
            {2: (len(rows), p.mismatched_elements)},
        )
        assert p.bound is None
    else:
        assert p.bound is not None
        assert (p.bound.steps, p.bound.device_hours) == (60, 4.0)


@pytest.mark.parametrize(
    "change",
    [
        {"missing": [ControlName.POSITIVE_END]},
        {"differs": [Role.REFERENCE]},
        {"reason": "dead_peer"},
    ],
)
def test_an_inconclusive_run_enters_no_statistic_and_stays_listed(change: dict[str, object]) -> None:
    clean, broken = node_run(steps=20), node_run(steps=20, hits={3: 900}, seed=1, began=BEGAN + 99, **change)  # type: ignore[arg-type]
    assert broken.run.verdict == "inconclusive"
    assert profile_run(broken).detail == Detail()
    p = summarise_node("sick", summarised(clean, broken))
    assert (p.counted_runs, p.steps, p.affected_steps, p.mismatched_elements, p.device_hours) == (1, 20, 0, 0, 1.0)
    assert [line.counted for line in p.runs] == [False, True]
    assert "inconclusive" in p.runs[0].note


def test_an_answer_that_differs_in_an_inconclusive_run_keeps_its_node_from_being_clean() -> None:
    """Scores are compared bit by bit: no tensor has to differ for them to speak against a node."""
    scores = [("q1", [0.5, 0.25]), ("q2", [0.125, 1.0])]
    answers = [answer(q, arm, s) for q, s in scores for arm in ("reference", "suspect")]
    answers[-1] = replace(answers[-1], scores=[0.125, math.nextafter(1.0, 2.0)])
    finetune = lambda **more: node_run(workload="finetune", evaluations=answers, seed=1, began=BEGAN + 99, **more)
    matches = [node_run(workload=w, hours=4.0) for w in ("submodule", "gradient")]
    cut_off = finetune(missing=[ControlName.POSITIVE_END])
    assert cut_off.run.verdict == "inconclusive"
    found = profile_run(cut_off)
    assert (found.findings, found.evidence) == (1, "1 finding in an inconclusive run")
    p = summarise_node("sick", summarised(*matches, cut_off))
    assert (p.verdict, p.rule) == (NodeVerdict.SUSPECTED, "inconclusive_finding")
    assert summarise(cut_off).findings == {"unequal_answers": 1}
    whole = profile_run(finetune())
    assert (whole.findings, whole.evidence) == (1, "1 unequal answers")
    assert summarise_node("sick", summarised(*matches)).verdict is NodeVerdict.CLEAN


def test_only_the_conclusive_attempt_of_a_run_is_counted() -> None:
    """The first one was cut off after its finding: it makes the verdict, and enters no frequency."""
    first, second = (
        node_run(steps=6, hits={2: 7}, missing=[ControlName.POSITIVE_END], reason="dead_peer"),
        node_run(steps=8),
    )
    later = lambda rows: [replace(r, run_id=first.run.run_id, attempt=2) for r in rows]
    both = RunRecords(
        run=replace(first.run, verdict="mismatch", reason="completed"),
        attempts=[first.attempts[0], *later(second.attempts)],
        steps=[*first.steps, *later(second.steps)], mismatches=first.mismatches,
        controls=[*first.controls, *later(second.controls)], faults=[],
        closings=[*first.closings, *later(second.closings)],
    )  # fmt: skip
    found = profile_run(both)
    assert (found.attempts, found.steps, found.affected_steps, found.mismatched_elements) == ([2], 8, 0, 0)
    assert found.findings == 1


def test_the_time_of_mismatches_in_bins_of_bounded_number() -> None:
    records = node_run(steps=1000, hits={450: 5, 451: 6, 999: 1})
    bins = profile_run(records).detail.timeline
    assert len(bins) <= BINS
    assert sum(b.steps for b in bins) == 1000
    assert sum(b.mismatched for b in bins) == 12
    assert [b.first for b in bins if b.affected] == [
        next(b.first for b in bins if b.first <= s < b.first + b.steps) for s in (450, 451, 999)
    ]
    assert timeline([], "submodule") == []
    when = profile_run(records).detail.timing
    assert (when.onset, when.bursts, when.longest_burst) == (450, 2, 2)


def test_noise_and_drift_reach_the_node() -> None:
    noisy = node_run(
        workload="gradient", gradients=[gradient(2, 0.5, 10.0), gradient(2, 0.5, 10.0, "attn.0.wq", 40)], steps=10
    )
    quiet = node_run(workload="gradient", steps=10, seed=2)
    drifting = node_run(workload="training", drifts=[drift(s, 1e-3 * math.exp(0.1 * s)) for s in range(1, 11)], seed=3)
    p = summarise_node("sick", summarised(noisy, quiet, drifting))
    assert (p.wcnts, p.wcnts_run) == (0.05, noisy.run.run_id)
    assert p.leaves == {"attn.0.wq": 40 / (100 * 20)}  # the quiet run compared that leaf as well
    assert p.drift_rate == pytest.approx(0.1)
    infinite = node_run(workload="gradient", gradients=[gradient(2, math.nan, 10.0)], seed=4)
    p = summarise_node("sick", summarised(noisy, infinite))
    assert p.wcnts == math.inf
    assert to_json(p)["wcnts_unbounded"] is True
    assert any("unbounded" in line for line in lines(p))


@pytest.mark.parametrize("other", [{"model": "tiny"}, {"devices": ("cuda:0",)}])
def test_a_leaf_has_one_width_in_one_model_split_one_way(other: dict[str, object]) -> None:
    """What another model, or another share of it, compared of a leaf of that name is not known where it never differed:
    it adds nothing, in place of a width that is not its own.
    """
    noisy = node_run(workload="gradient", gradients=[gradient(2, 0.5, 10.0, "attn.0.wq", 40)], steps=10)
    quiet = node_run(workload="gradient", steps=10, seed=2)
    small = node_run(workload="gradient", steps=1000, seed=3, **other)  # type: ignore[arg-type]
    p = summarise_node("sick", summarised(noisy, quiet, small))
    assert p.leaves == {"attn.0.wq": 40 / (100 * 20)}


def test_nothing_that_is_not_finite_reaches_the_stored_document() -> None:
    records = node_run(hits={3: 5, 4: 1}, workload="gradient", gradients=[gradient(3, math.inf, math.nan)],
        drifts=[drift(1, math.nan), drift(2, 1e308), drift(3, math.inf)])  # fmt: skip
    records.mismatches = [
        replace(m, severity_mean=1.7e308, severity_max=math.inf, severity_median=math.nan) for m in records.mismatches
    ]
    found = profile_run(records).detail
    assert msgspec.json.decode(msgspec.json.encode(found), type=Detail) == found
    p = summarise_node("sick", summarised(records))
    (out,) = [c for c in p.classes if c.family == "out"]
    assert out.severity_mean is not None
    assert math.isfinite(out.severity_mean)


def test_findings_outside_the_frequency_are_told_apart() -> None:
    records = node_run(hits={3: 5})
    state = replace(records.mismatches[0], cause=Cause.STATE, tensor="input.x", site=9, mismatched=None)
    derived = replace(records.mismatches[0], cause=Cause.DERIVED, site=11)
    records.mismatches += [state, derived]
    records.steps = [replace(s, rows=s.rows * 3) for s in records.steps]
    found = profile_run(records)
    assert found.detail.findings == {"state": 1}
    assert found.detail.uncounted == 1
    assert found.detail.by_rank == {1: (2, 5)}  # derived rows count nowhere
    assert evidence_words({}, {}, {}, {}) == ""
    assert evidence_words(dict.fromkeys(range(5), (1, 1)), {"bwd/attn/dw": (1, 10)}, {}, {"state": 2}) == (
        "5 ranks, bwd/attn/dw, 1.0e-1, 2 state"
    )


def test_what_was_before_a_clearance_is_shown_and_not_counted() -> None:
    bad, fresh = node_run(hits={3: 5}), node_run(seed=1, began=BEGAN + 1000)
    decision = NodeDecision("cleared", "new board", "ana", BEGAN + 500)
    p = summarise_node("sick", summarised(bad, fresh), decisions=[decision])
    assert (p.counted_runs, p.mismatched_elements, len(p.runs)) == (1, 0, 2)
    assert "before the node was cleared" in p.runs[1].note
    assert p.runs[1].facts.evidence
    assert p.verdict is NodeVerdict.UNKNOWN
    assert any("new board" in line for line in lines(p))


def test_the_page_says_what_is_missing_and_json_has_it_all() -> None:
    runs = summarised(node_run(hits={3: 5}), node_run(hits={4: 5}, reference="r2", seed=2))
    nulls = [NullPass(runs[0].facts.executables, "a", "b", BEGAN)]
    p = summarise_node("sick", runs, nulls=nulls, as_reference=4)
    assert p.verdict is NodeVerdict.CORRUPTING
    assert p.evidence == "rank 1, fwd/attn, 6.3e-5, transient, 2 references"
    text = "\n".join(lines(p))
    assert "corrupting: reproduced with 2 references" in text
    assert "fwd/attn out" in text
    assert set(asdict(p)) - set(to_json(p)) <= {
        "counted_runs",
        "matches",
        "as_reference",
        "steps",
        "affected_steps",
        "sites",
        "elements",
        "nonfinite",
        "nullified",
        "zero_reference",
        "uncounted",
    }  # fmt: skip - these have the longer names of docs/json.md


def test_pages_list_the_newest_runs_of_many_and_say_so() -> None:
    """Numbers are of all runs all the same, and the JSON object has each."""
    p = summarise_node("sick", summarised(*(node_run(hits={3: 5}, began=BEGAN + n) for n in range(SHOWN + 7))))
    newest = [str(line.facts.run_id) for line in p.runs]
    assert (len(newest), p.mismatched_elements) == (SHOWN + 7, 5 * (SHOWN + 7))
    text, page = "\n".join(lines(p)), node_page.render(p)
    assert [row.split()[0] for row in text.partition("runs, newest first")[2].splitlines()[2 : SHOWN + 2]] == newest[
        :SHOWN
    ]
    assert [row[1][:36] for row in cells(page, "Runs")] == newest[:SHOWN]
    assert "and 7 older: tandem node sick --json" in text
    assert f"The newest {SHOWN} of {SHOWN + 7} are shown one by one" in page
    assert f"of {SHOWN + 7} listed" in page
    assert [r["run"] for r in to_json(p)["runs"]] == newest


def test_pairs_on_one_host_are_recognised() -> None:
    assert two_hosts(node_run())
    assert not two_hosts(node_run(hosts=("a", "a")))
    assert not two_hosts(node_run(hosts=("", "a")))
    assert not two_hosts(node_run(reference="sick", hosts=("a", "b")))
