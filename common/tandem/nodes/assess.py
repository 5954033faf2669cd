"""What a node still needs for a verdict: the next run of its assessment. Pure.

The procedure: for each workload that `clean` asks for, a null run where none has passed with the same executables, then
the node against a reference; after a finding the same again with another reference; without one more of the same until
the node is covered. It is level-triggered: each step follows from what is stored, so that an interrupted assessment
goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tandem import formats
from tandem.nodes.verdict import (
    NodeDecision,
    NodeRules,
    NullPass,
    RunFacts,
    before_clearance,
    cleared_at,
    decide_node,
    present,
)
from tandem.vocabulary import Kind, NodeVerdict, Verdict, Workload

PATIENCE = 2
"""Inconclusive runs of one kind and workload in a row after which only a person can help."""
REPETITIONS = 2
"""Runs with another reference that may fail to reproduce a finding before it stays unreproduced."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run to make."""

    kind: Kind
    workload: Workload
    why: str
    """For people, a few words."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more is to be run."""

    why: str
    """For people: the verdict's own sentence, or what keeps the assessment from going on."""


def next_run(
    node: str,
    model: str,
    runs: Sequence[RunFacts],
    nulls: Sequence[NullPass] = (),
    decisions: Sequence[NodeDecision] = (),
    *,
    rules: NodeRules = NodeRules(),  # noqa: B008 - frozen
    others: Sequence[RunFacts] = (),
    unsteady: Mapping[str, float] = MappingProxyType({}),
) -> Wanted | Ended:
    """The next run, or why there is none.

    Args:
        node: under assessment.
        model: preset that the assessment's runs use; runs of other models count in the node's verdict, and only there.
        runs: real runs on two hosts with the node on either side.
        nulls: null runs that matched.
        decisions: of people, about this node.
        rules: what `clean` takes.
        others: finished null runs of this model between other nodes, the newest last, for what is inconclusive.
        unsteady: as of `decide_node`: the verdict here and in the node's profile is one.
    """
    decided = decide_node(node, runs, nulls=nulls, unsteady=unsteady, decisions=decisions, rules=rules)
    if decided.verdict in (NodeVerdict.CORRUPTING, NodeVerdict.CLEAN):
        return Ended(decided.sentence)
    after = cleared_at(decisions)
    mine = sorted(
        (
            r for r in runs
            if r.suspect == node and r.model == model and r.verdict is not None and not before_clearance(r, after)
        ),
        key=lambda r: (r.created_at, r.run_id),
    )  # fmt: skip
    nulls = [n for n in nulls if node not in (n.reference, n.suspect)]
    passed = {n.executables for n in nulls}
    for workload in (Workload(w) for w in rules.workloads):
        own = [r for r in mine if r.workload == workload]
        told = [r for r in own if r.conclusive]
        if not told and not any((n.workload, n.model) == (workload, model) for n in nulls):
            return _unless_stuck([r for r in others if r.workload == workload], Kind.NULL, workload, "the null control")
        if not told:
            return _unless_stuck(own, Kind.SUSPECT, workload, "the node against a reference")
        found = [r for r in told if r.verdict == Verdict.MISMATCH]
        if not any(r.executables in passed for r in found or told):
            return _unless_stuck(
                [r for r in others if r.workload == workload], Kind.NULL, workload,
                "a null run of the same executables",
            )  # fmt: skip
        again = [r for r in told if r.kind == Kind.SWAP]
        if found and len({r.reference for r in found}) < 2 and len(again) < REPETITIONS:
            swaps = [r for r in own if r.kind == Kind.SWAP]
            return _unless_stuck(swaps, Kind.SWAP, workload, "the finding again, with another reference")
    if any(r.verdict == Verdict.MISMATCH for r in mine):
        return Ended(f"{decided.sentence}; {REPETITIONS} runs with another reference did not reproduce it")
    if rules.small(model):
        return Ended(f"{decided.sentence}; model {model} is too small to clear a node: give a larger --model")
    matches = [
        r for r in runs
        if r.suspect == node and r.verdict == Verdict.MATCH and not rules.small(r.model)
        and not before_clearance(r, after)
    ]  # fmt: skip
    if len(decided.missing) == 1 and (why := _out_of_reach(matches)):  # all else is there
        return Ended(f"{decided.sentence}; {why}")
    hours = {w: sum(r.device_hours for r in mine if r.workload == w and r.conclusive) for w in rules.workloads}
    least = Workload(min(rules.workloads, key=lambda w: hours[w]))
    own = [r for r in mine if r.workload == least]
    return _unless_stuck(own, Kind.SUSPECT, least, decided.missing[0] if decided.missing else "more of the same")


def _out_of_reach(matches: Sequence[RunFacts]) -> str:
    """Why more of the same covers no further device; empty if it may, or all are covered."""
    newest = sorted(matches, key=lambda r: r.run_id, reverse=True)
    count = max((r.device_count for r in matches), default=0)
    covered = present((r.devices for r in newest), count)
    last = newest[:PATIENCE]
    if len(covered) >= count or len(last) < PATIENCE or len({frozenset(r.devices) for r in last}) > 1:
        return ""
    names = ", ".join(formats.clean(d, 60) for d in sorted(last[0].devices))
    return (
        f"its last {PATIENCE} matching runs covered {names}, and another would cover no other, so that "
        f"{count - len(covered)} of its {count} devices stay untested: give a --tp that takes them, or free them"
    )


def _unless_stuck(before: Sequence[RunFacts], kind: Kind, workload: Workload, why: str) -> Wanted | Ended:
    """The run, unless the last ones of its kind said nothing."""
    last = [r for r in before if r.kind == kind][-PATIENCE:]
    if len(last) == PATIENCE and not any(r.conclusive for r in last):
        return Ended(
            f"{PATIENCE} runs of workload {workload}, kind {kind}, in a row were inconclusive "
            f"({last[-1].reason or 'no reason'}): mend that first"
        )
    return Wanted(kind, workload, why)
