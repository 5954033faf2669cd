"""The verdict of a node, rule by rule."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.nodes.verdict import NodeDecision, NodeRules, NullPass, RunFacts, decide_node
from tandem.vocabulary import NodeVerdict

HOUR = 3600.0
NULL = NullPass("exe", "well-1", "well-2", 10.0)


def run(number: int, verdict: str | None, *, reference: str = "r1", **fields: object) -> RunFacts:
    """A run of the node `n`, an hour after the one before, big enough to clear its two devices."""
    base = RunFacts(
        run_id=UUID(int=number), workload="submodule", kind="suspect", model="small", reference=reference, suspect="n",
        created_at=number * HOUR, finished_at=None if verdict is None else number * HOUR + 60, verdict=verdict,
        reason="completed", executables="exe", comparable=True, findings=int(verdict == "mismatch"), steps=1000,
        affected_steps=int(verdict == "mismatch"), elements=10**9, device_hours=2.0, devices=("cuda:0", "cuda:1"),
        device_count=2,
    )  # fmt: skip
    return replace(base, **fields)  # type: ignore[arg-type]


def cleared(at: float) -> NodeDecision:
    return NodeDecision("cleared", "board replaced", "ana", at)


MATCHES = [run(1, "match"), run(2, "match", workload="gradient")]
LATER = [replace(m, created_at=1e6, finished_at=1e6) for m in MATCHES]
FOUND, AGAIN = run(3, "mismatch"), run(4, "mismatch", reference="r2")
ITSELF = run(3, "mismatch", suspect_differs=True)
OPEN = run(5, "inconclusive", findings=3, reason="positive_end_missing", steps=0, device_hours=0.0, devices=())
UNLIKE = run(6, "inconclusive", reference="n", suspect="x", reference_differs=True, comparable=False)
NULL_MISMATCH = run(7, "mismatch", reference="n", suspect="x", kind="null")


@pytest.mark.parametrize(
    ("runs", "nulls", "verdict", "rule", "missing"),
    [
        ([], [], "unknown", "not_tested", ["workload submodule", "workload gradient", "2 more", "device-hours"]),
        ([run(1, None)], [], "unknown", "not_tested", ["submodule"]),
        (MATCHES, [], "clean", "covered", []),
        (MATCHES[:1], [], "unknown", "not_covered", ["a matching run of workload gradient", "1 more matching run"]),
        ([*MATCHES, OPEN], [NULL], "suspected", "inconclusive_finding", ["a conclusive run"]),
        ([*MATCHES, run(5, "match", findings=1)], [NULL], "suspected", "late_finding", ["the same again"]),
        ([*MATCHES, run(5, "match", findings=1, comparable=False)], [NULL], "clean", "covered", []),
        ([*MATCHES, replace(OPEN, comparable=False)], [], "clean", "covered", []),
        ([*MATCHES, replace(OPEN, findings=0)], [], "clean", "covered", []),
        ([replace(OPEN, findings=0)], [], "unknown", "no_conclusive_run", ["submodule"]),
        # what was found
        ([FOUND], [NULL], "suspected", "found", ["the same again with a reference other than r1"]),
        ([FOUND], [], "suspected", "found", ["null run", "the same again with a reference other than r1"]),
        ([FOUND, run(8, "mismatch")], [NULL], "suspected", "found", ["other than r1"]),
        ([FOUND, AGAIN], [NULL], "corrupting", "reproduced", []),
        ([FOUND, AGAIN], [], "suspected", "found", ["of executables exe"]),
        ([FOUND, replace(AGAIN, executables="other")], [NULL], "suspected", "found", ["of executables other"]),
        ([FOUND, replace(AGAIN, executables="")], [NULL], "suspected", "found", ["whose executables are recorded"]),
        ([FOUND, AGAIN], [replace(NULL, suspect="n")], "suspected", "found", ["between two other nodes"]),
        ([FOUND, AGAIN], [replace(NULL, reference="n")], "suspected", "found", ["between two other nodes"]),
        ([ITSELF], [NULL], "corrupting", "self_differs", []),
        ([ITSELF], [], "suspected", "found", ["null run"]),
        ([replace(ITSELF, verdict="inconclusive")], [NULL], "suspected", "inconclusive_finding", ["conclusive run"]),
        # a later clean run erases nothing
        ([FOUND, *LATER], [NULL], "suspected", "found", ["r1", "a person's decision: 2 runs since then matched"]),
        ([OPEN, *LATER], [NULL], "suspected", "inconclusive_finding", ["conclusive run", "a person's decision"]),
        ([FOUND, AGAIN, run(9, "match", reference="r3")], [NULL], "corrupting", "reproduced", []),
        # it was the reference
        ([*MATCHES, UNLIKE], [], "suspected", "reference_differs", ["the suspect, against a reference other than x"]),
        ([UNLIKE, FOUND, AGAIN], [NULL], "corrupting", "reproduced", []),
        ([NULL_MISMATCH], [], "suspected", "null_mismatch", ["as the suspect", "submodule"]),
        ([*MATCHES, NULL_MISMATCH], [], "clean", "covered", []),
        ([run(7, "mismatch", reference="n", suspect="x")], [], "unknown", "not_tested", ["submodule"]),
    ],
)  # fmt: skip
def test_rules(
    runs: Sequence[RunFacts], nulls: Sequence[NullPass], verdict: str, rule: str, missing: Sequence[str]
) -> None:
    found = decide_node("n", runs, nulls=nulls)
    assert (str(found.verdict), found.rule) == (verdict, rule), found.sentence
    assert found.sentence.startswith(verdict)
    for word in missing:
        assert any(word in item for item in found.missing), found.missing
    assert bool(found.missing) == (verdict in ("suspected", "unknown"))


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"model": "tiny"}, "larger than tiny"),
        ({"model": "135M (shape of tiny)"}, "larger than tiny"),
        ({"workload": "submodule"}, "a matching run of workload gradient"),
        ({"devices": ("cuda:0",)}, "1 of its 2 devices"),
        ({"device_hours": 0.3}, "0.7 more device-hours on cuda:0, cuda:1"),
        ({"device_count": 8}, "6 of its 8 devices"),
        ({"device_count": 0}, "how many devices the node has"),
        ({"verdict": "inconclusive"}, "2 more matching runs"),
        ({"verdict": None, "finished_at": None}, "2 more matching runs"),
    ],
)
def test_each_thing_that_clean_takes(change: dict[str, object], missing: str) -> None:
    runs = [replace(m, **change) for m in MATCHES]  # type: ignore[arg-type]
    found = decide_node("n", runs)
    assert found.verdict is NodeVerdict.UNKNOWN
    assert any(missing in item for item in found.missing), found.missing


def test_a_device_that_was_replaced_covers_nothing() -> None:
    """The new one has another UUID, and needs its own hours."""
    old, new = ("GPU-a", "GPU-b"), ("GPU-a", "GPU-c")
    runs = [replace(MATCHES[0], devices=old), replace(MATCHES[1], devices=new, device_hours=1.0)]
    found = decide_node("n", runs)
    assert found.missing == ("0.5 more device-hours on GPU-c",)
    assert decide_node("n", [*runs, run(3, "match", devices=new)]).verdict is NodeVerdict.CLEAN
    seen = decide_node("n", [*runs, run(3, "match", devices=("GPU-c",), device_count=3)])
    assert seen.missing == (), "three devices, and three names: none was replaced"


def test_clean_states_its_bound_and_follows_the_settings() -> None:
    found = decide_node("n", MATCHES)
    assert "over 2,000 steps and 4 device-hours" in found.sentence
    assert "more than 0.15 % of steps" in found.sentence
    assert "more than 0.75 corrupting events per device-hour" in found.sentence
    strict = NodeRules(device_hours=2.5, sessions=3)
    missing = decide_node("n", MATCHES, rules=strict).missing
    assert missing == ("1 more matching run (3 are needed)", "0.5 more device-hours on cuda:0, cuda:1")


def test_a_reference_that_differs_from_itself_counts_against_nobody() -> None:
    """Neither as the second reference nor as the first; what the suspect's own self-replay shows does not need it."""
    always = {"r2": math.inf}
    assert decide_node("n", [FOUND, AGAIN], nulls=[NULL], unsteady=always).rule == "found"
    alone = decide_node("n", [AGAIN], nulls=[NULL], unsteady=always)
    assert (alone.verdict, alone.rule) == (NodeVerdict.SUSPECTED, "doubtful_reference")
    assert alone.missing[0] == "a run against a reference other than r2"
    assert decide_node("n", [AGAIN, *MATCHES], nulls=[NULL], unsteady=always).verdict is NodeVerdict.CLEAN
    assert decide_node("n", [ITSELF], nulls=[NULL], unsteady={"r1": math.inf}).verdict is NodeVerdict.CORRUPTING
    repaired = {"r2": AGAIN.created_at}  # cleared before that run began
    assert decide_node("n", [FOUND, AGAIN], nulls=[NULL], unsteady=repaired).verdict is NodeVerdict.CORRUPTING


def test_the_way_back_is_a_decision() -> None:
    bad = [FOUND, AGAIN]
    after = [cleared(10 * HOUR)]
    found = decide_node("n", bad, nulls=[NULL], decisions=after)
    assert (found.verdict, found.rule) == (NodeVerdict.UNKNOWN, "cleared")
    assert "cleared by ana" in found.sentence
    # what was clean before it does not count either: the node may have other parts
    assert decide_node("n", [*MATCHES, *bad], nulls=[NULL], decisions=after).verdict is NodeVerdict.UNKNOWN
    fresh = [
        replace(m, run_id=UUID(int=90 + i), created_at=11 * HOUR, finished_at=12 * HOUR) for i, m in enumerate(MATCHES)
    ]
    assert decide_node("n", [*bad, *fresh], nulls=[NULL], decisions=after).verdict is NodeVerdict.CLEAN
    # one finding after it is one finding
    late = replace(FOUND, run_id=UUID(int=99), created_at=20 * HOUR, finished_at=21 * HOUR)
    assert decide_node("n", [*bad, late], nulls=[NULL], decisions=after).rule == "found"
    # a run that was going on meanwhile: its finding counts, its match does not
    across = replace(FOUND, created_at=9 * HOUR, finished_at=11 * HOUR)
    assert decide_node("n", [across], nulls=[NULL], decisions=after).rule == "found"
    halves = [replace(m, created_at=9 * HOUR, finished_at=11 * HOUR) for m in MATCHES]
    assert decide_node("n", halves, decisions=after).verdict is NodeVerdict.UNKNOWN
    # another word is no clearance
    kept = decide_node("n", bad, nulls=[NULL], decisions=[replace(after[0], decision="watch")])
    assert kept.verdict is NodeVerdict.CORRUPTING


def test_since_is_when_the_last_piece_was_there() -> None:
    assert decide_node("n", [FOUND, AGAIN], nulls=[NULL]).since == AGAIN.finished_at
    assert decide_node("n", [FOUND, AGAIN], nulls=[replace(NULL, finished_at=1e9)]).since == 1e9
    assert decide_node("n", [FOUND, run(9, "mismatch")], nulls=[NULL]).since == FOUND.finished_at
    assert decide_node("n", MATCHES).since == MATCHES[1].finished_at


POOL = [
    *MATCHES, FOUND, AGAIN, replace(ITSELF, run_id=UUID(int=33)), OPEN, UNLIKE, NULL_MISMATCH, run(20, None),
    replace(FOUND, run_id=UUID(int=21), executables="other"), run(22, "match", model="tiny"),
]  # fmt: skip
_RANK = {"clean": 0, "unknown": 0, "suspected": 1, "corrupting": 2}


@given(st.lists(st.sampled_from(POOL), unique=True), st.booleans(), st.randoms())
def test_neither_order_nor_more_clean_runs_change_a_finding(
    runs: list[RunFacts], controlled: bool, rng: random.Random
) -> None:
    nulls = [NULL] if controlled else []
    found = decide_node("n", runs, nulls=nulls)
    shuffled = [*runs]
    rng.shuffle(shuffled)
    assert decide_node("n", shuffled, nulls=nulls) == found
    more = decide_node("n", [*runs, run(200, "match"), run(201, "match", workload="gradient")], nulls=nulls)
    if found.rule != "null_mismatch":
        assert _RANK[more.verdict] >= _RANK[found.verdict]
    if any(r.verdict == "mismatch" and r.suspect == "n" for r in runs):
        assert more.verdict in (NodeVerdict.SUSPECTED, NodeVerdict.CORRUPTING)
    if not controlled:
        assert found.verdict is not NodeVerdict.CORRUPTING


def test_hostile_names_are_written_harmlessly() -> None:
    evil = "r\u202e\x1b[31m\n"
    for runs in ([run(3, "mismatch", reference=evil)], [run(5, "inconclusive", findings=1, reason=evil)]):
        found = decide_node("n", runs)
        for line in (found.sentence, *found.missing):
            assert "\x1b" not in line
            assert "\n" not in line
            assert "\u202e" not in line
