"""The verdict of a node: one pure function of what is recorded of its runs (design: Trust).

Only real runs of two different hosts are given to it. The rules, the first that holds:

``corrupting``
    The node differed from the reference in conclusive runs with two *different* references, or differed from itself (a
    self-replay) in one; and the executables of these runs passed a null run between two other nodes (``self_differs``,
    ``reproduced``). A mismatch with a reference that differed from itself does not count.
``suspected``
    Anything less that speaks against it: a mismatch without reproduction or without a null run (``found``), it did not
    repeat its own results as a reference (``reference_differs``), findings in an inconclusive run whose sides were
    alike (``inconclusive_finding``), findings that were delivered after their run had matched (``late_finding``). What
    may as well be the other node's, only until the node is shown clean: a mismatch with a reference that differed from
    itself (``doubtful_reference``), being the reference of a null run that mismatched (``null_mismatch``).
``clean``
    None of that, and enough was compared (`NodeRules`); says which rate it excludes (``covered``).
``unknown``
    Otherwise (``not_covered``, ``no_conclusive_run``, ``cleared``, ``not_tested``).

A later clean run erases nothing. Only a recorded decision does (`NodeDecision`): what was found before it counts no
more, and what was clean before it neither, since the node may have got other parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from uuid import UUID

from tandem import formats
from tandem.statistics.bounds import CONFIDENCE, rate_bound, zero_bound
from tandem.vocabulary import CLEARED, Kind, NodeVerdict, Verdict, Workload


@dataclass(frozen=True, slots=True)
class NodeRules:
    """What `clean` takes."""

    sessions: int = 2
    """Matching runs, each a pair of new processes."""
    workloads: tuple[str, ...] = (Workload.SUBMODULE.value, Workload.GRADIENT.value)
    """Each of which must have matched."""
    device_hours: float = 1.0
    """Compared on each device of the node, over all matching runs."""
    too_small: tuple[str, ...] = ("tiny",)
    """Presets that never suffice: they hardly load a device."""

    def small(self, model: str) -> bool:
        """Whether a run of this model (``RunRow.model``) says too little to clear a node."""
        return any(model == name or model.endswith(f"(shape of {name})") for name in self.too_small)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A real run on two hosts, as far as the verdict of a node asks. Counts are of its conclusive attempts."""

    run_id: UUID
    workload: str
    kind: str
    model: str
    reference: str
    suspect: str
    created_at: float
    finished_at: float | None
    verdict: str | None
    """None while it runs."""
    reason: str
    executables: str = ""
    """Digest of what both sides executed (``verdict.executables``); empty: never recorded."""
    comparable: bool = False
    """Whether what was found is the suspect's, even if the run is inconclusive."""
    reference_differs: bool = False
    suspect_differs: bool = False
    """The suspect differed from itself in a self-replay."""
    findings: int = 0
    """Mismatch rows, differing self-replays and unequal answers, of inconclusive attempts too."""
    steps: int = 0
    affected_steps: int = 0
    elements: int = 0
    mismatched_elements: int = 0
    device_hours: float = 0.0
    devices: tuple[str, ...] = ()
    """The suspect's devices that were compared."""
    device_count: int = 0
    """Devices that the suspect has; 0: never told."""
    evidence: str = ""
    """What was found, in a few words."""

    @property
    def conclusive(self) -> bool:
        return self.verdict in (Verdict.MATCH, Verdict.MISMATCH)


@dataclass(frozen=True, slots=True)
class NullPass:
    """A null run that matched: its executables give the same bits on two nodes."""

    executables: str
    reference: str
    suspect: str
    finished_at: float
    workload: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class NodeDecision:
    """What a person decided about a node, and why."""

    decision: str
    """``cleared``."""
    reason: str
    decided_by: str
    decided_at: float
    run_id: UUID | None = None
    """The run that it rests on, if any."""


@dataclass(frozen=True, slots=True)
class NodeDecided:
    """A node's verdict."""

    verdict: NodeVerdict
    rule: str
    sentence: str
    missing: tuple[str, ...] = ()
    """For the next, firmer verdict, in words, the first step first."""
    since: float | None = None
    references: tuple[str, ...] = ()
    """Against which it was found."""
    behind: frozenset[UUID] = frozenset()
    """Runs that the verdict rests on."""


def cleared_at(decisions: Iterable[NodeDecision]) -> float | None:
    """When the node was last cleared; None if never."""
    return max((d.decided_at for d in decisions if d.decision == CLEARED), default=None)


def before_clearance(run: RunFacts, after: float | None) -> bool:
    """Whether a run no longer counts.

    What was found counts unless the run had ended before the decision; what was clean counts only if the run began
    after it.
    """
    if after is None:
        return False
    if run.verdict == Verdict.MATCH:
        return run.created_at < after
    return run.finished_at is not None and run.finished_at < after


def decide_node(
    node: str,
    runs: Iterable[RunFacts],
    *,
    nulls: Iterable[NullPass] = (),
    unsteady: Mapping[str, float] = MappingProxyType({}),
    decisions: Sequence[NodeDecision] = (),
    rules: NodeRules = NodeRules(),
) -> NodeDecided:
    """The verdict of a node.

    Args:
        node: its name.
        runs: real runs on two hosts with the node on either side, in any order.
        nulls: null runs that matched.
        unsteady: nodes that differed from themselves -> until when (UTC seconds; infinite unless they were cleared
            since): that another node mismatched with one of them in a run before then does not count against it.
        decisions: of people, about this node.
        rules: what `clean` takes.
    """
    after = cleared_at(decisions)
    finished = sorted(
        (r for r in runs if r.verdict is not None and not before_clearance(r, after)),
        key=lambda r: (_when(r), r.run_id),
    )
    if not finished:
        return _clean_or_unknown((), rules, decisions, after)
    mine = [r for r in finished if r.suspect == node]
    doubtful = [
        r
        for r in mine
        if (r.findings or r.verdict == Verdict.MISMATCH)
        and not r.suspect_differs
        and r.created_at < unsteady.get(r.reference, 0.0)
    ]
    passed: dict[str, float] = {}
    for null in sorted(nulls, key=lambda n: n.finished_at, reverse=True):
        if node not in (null.reference, null.suspect) and null.executables:
            passed[null.executables] = null.finished_at
    found = [r for r in mine if r.verdict == Verdict.MISMATCH and r not in doubtful]
    if decided := _corrupting(found, passed):
        return decided
    if decided := _suspected(node, [r for r in finished if r not in doubtful], found, passed):
        return decided
    decided = _clean_or_unknown(mine, rules, decisions, after)
    if decided.verdict is NodeVerdict.CLEAN:
        return decided
    return _weakly_suspected(node, finished, doubtful, decided.missing) or decided


def _when(run: RunFacts) -> float:
    return run.created_at if run.finished_at is None else run.finished_at


def _corrupting(found: Sequence[RunFacts], passed: Mapping[str, float]) -> NodeDecided | None:
    controlled = sorted(
        (r for r in found if r.executables in passed), key=lambda r: max(_when(r), passed[r.executables])
    )
    references: list[str] = []
    behind: list[UUID] = []
    for run in controlled:
        ready = max(_when(run), passed[run.executables])
        behind.append(run.run_id)
        if run.reference not in references:
            references.append(run.reference)
        if run.suspect_differs or len(references) > 1:
            rule = "self_differs" if run.suspect_differs else "reproduced"
            every = tuple(dict.fromkeys(r.reference for r in controlled))
            how = (
                f"it differed from itself while reference {formats.clean(run.reference, 60)} did not"
                if run.suspect_differs
                else f"reproduced with {len(every)} references ({', '.join(formats.clean(e, 60) for e in every)})"
            )
            return NodeDecided(
                NodeVerdict.CORRUPTING, rule, f"corrupting: {how}; a null run of the same executables passed",
                since=ready, references=every, behind=frozenset(behind),
            )  # fmt: skip
    return None


def _suspected(
    node: str,
    finished: Sequence[RunFacts],
    found: Sequence[RunFacts],
    passed: Mapping[str, float],
) -> NodeDecided | None:
    unsure = [
        r
        for r in finished
        if r.suspect == node and r.findings and r.comparable and r.verdict == Verdict.INCONCLUSIVE
    ]  # fmt: skip
    late = [r for r in finished if r.suspect == node and r.findings and r.comparable and r.verdict == Verdict.MATCH]
    unlike = [r for r in finished if r.reference == node and r.reference_differs]
    causes = (
        ("found", found, "a mismatch, not yet reproduced under control"),
        ("reference_differs", unlike, "as a reference it did not repeat its own results"),
        ("inconclusive_finding", unsure, "something differed in a run that was inconclusive"),
        ("late_finding", late, "something that had differed was delivered after its run had matched"),
    )
    held = [cause for cause in causes if cause[1]]
    if not held:
        return None
    references = tuple(dict.fromkeys(r.reference for r in found))
    missing: list[str] = []
    if found:
        missing += _for_corrupting(found, passed, references)
    elif unsure:
        last = unsure[-1]
        missing.append(f"a conclusive run: {last.run_id} was inconclusive ({formats.clean(last.reason, 80)})")
    elif late:
        missing.append(f"the same again: {late[-1].run_id} matched before all was stored (`tandem verdict` tells)")
    since = _when((found or unsure or late or unlike)[-1])
    if later := [r for r in finished if r.suspect == node and r.verdict == Verdict.MATCH and r.created_at >= since]:
        missing.append(
            f"or a person's decision: {formats.plural(len(later), 'run')} since then matched, which erases nothing "
            f"(`tandem node {formats.clean(node, 60)} clear --reason TEXT`)"
        )
    if not found and unlike:
        others = sorted({r.suspect for r in unlike})
        missing.append(f"a run with it as the suspect, against a reference other than {_names(others)}")
    said = held[0][2] + (f", against {_names(references)}" if held[0][0] == "found" else "")
    return NodeDecided(
        NodeVerdict.SUSPECTED, held[0][0], f"suspected: {said}", missing=tuple(missing),
        since=min(_when(r) for _, runs, _ in held for r in runs), references=references,
        behind=frozenset(r.run_id for _, runs, _ in held for r in runs),
    )  # fmt: skip


def _weakly_suspected(
    node: str, finished: Sequence[RunFacts], doubtful: Sequence[RunFacts], missing: Sequence[str]
) -> NodeDecided | None:
    """What may as well be the other node's: it counts until the node is shown clean."""
    nulls = [r for r in finished if r.reference == node and r.kind == Kind.NULL and r.verdict == Verdict.MISMATCH]
    if doubtful:
        others = tuple(dict.fromkeys(r.reference for r in doubtful))
        rule, why = "doubtful_reference", f"it mismatched only with {_names(others)}, which also differed from itself"
        need = f"a run against a reference other than {_names(others)}"
    elif nulls:
        others = tuple(dict.fromkeys(r.suspect for r in nulls))
        rule, why = "null_mismatch", f"it was the reference of a null run that mismatched, against {_names(others)}"
        need = f"a run with it as the suspect, against a reference other than {_names(others)}"
    else:
        return None
    behind = doubtful or nulls
    return NodeDecided(
        NodeVerdict.SUSPECTED, rule, f"suspected: {why}", missing=(need, *missing), since=min(_when(r) for r in behind),
        references=others if doubtful else (), behind=frozenset(r.run_id for r in behind),
    )  # fmt: skip


def _for_corrupting(found: Sequence[RunFacts], passed: Mapping[str, float], references: Sequence[str]) -> list[str]:
    """The shortest way to a controlled reproduction."""
    out = []
    itself = [r for r in found if r.suspect_differs]
    wanted = itself or found
    need = [r for r in wanted if r.executables not in passed]
    uncontrolled = list(dict.fromkeys(r.executables for r in need))
    if itself:
        uncontrolled = uncontrolled[:1]  # one run in which it differed from itself is enough
    for digest in uncontrolled:
        run = next(r for r in need if r.executables == digest)
        out.append(
            f"a passed null run, between two other nodes, of executables {digest[:12]} (those of run {run.run_id})"
            if digest
            else f"a run whose executables are recorded: those of run {run.run_id} are not"
        )
    if not itself and len(set(references)) < 2:
        out.append(f"the same again with a reference other than {_names(references)}")
    return out


def _names(nodes: Sequence[str]) -> str:
    shown = [formats.clean(n, 60) for n in nodes[:4]]
    return ", ".join(shown) + (" ..." if len(nodes) > 4 else "")


def _clean_or_unknown(
    mine: Sequence[RunFacts], rules: NodeRules, decisions: Sequence[NodeDecision], after: float | None
) -> NodeDecided:
    matches = [r for r in mine if r.verdict == Verdict.MATCH]
    large = [r for r in matches if not rules.small(r.model)]
    missing = _for_clean(large, rules)
    behind = frozenset(r.run_id for r in large)
    if not missing:
        steps, hours = sum(r.steps for r in large), sum(r.device_hours for r in large)
        return NodeDecided(
            NodeVerdict.CLEAN, "covered",
            f"clean: nothing differed in {len(large)} runs over {formats.count(steps)} steps and "
            f"{formats.device_hours(hours)} device-hours; at {formats.percent(CONFIDENCE)}, corruption in more than "
            f"{formats.percent(zero_bound(steps))} of steps, or more than {rate_bound(hours):.2g} corrupting events "
            "per device-hour, is excluded",
            since=max(_when(r) for r in large), behind=behind,
        )  # fmt: skip
    if matches:
        rule, why = "not_covered", f"nothing differed in {formats.plural(len(matches), 'run')}, too little to clear it"
        if not large:
            why += f": the model {_names(sorted({r.model for r in matches}))} is too small"
    elif mine:
        rule, why = "no_conclusive_run", f"no conclusive run among {formats.plural(len(mine), 'finished run')}"
    else:
        rule, why = "not_tested", "no run on two hosts has tested it"
    if after is not None and not matches:
        last = max((d for d in decisions if d.decision == CLEARED), key=lambda d: d.decided_at)
        rule = "cleared"
        why = f"cleared by {formats.clean(last.decided_by, 60)} on {formats.when(after)}, and not tested enough since"
    return NodeDecided(NodeVerdict.UNKNOWN, rule, f"unknown: {why}", missing=tuple(missing), behind=behind)


def present(devices: Iterable[Sequence[str]], count: int) -> list[str]:
    """Names of the devices that a node has now.

    A device that was replaced has another UUID: of more names than the node has devices, those seen last count.

    Args:
        devices: those of each run, the newest run first.
        count: devices of the node; 0: unknown, all are taken.
    """
    named = list(dict.fromkeys(name for names in devices for name in names))
    return named[:count] if count else named


def _for_clean(large: Sequence[RunFacts], rules: NodeRules) -> Sequence[str]:
    return _lacks(large, rules) if large else _lacks_everything(rules)


@lru_cache(maxsize=8)
def _lacks_everything(rules: NodeRules) -> Sequence[str]:
    """What most nodes of a fleet lack: made once."""
    return tuple(_lacks((), rules))


def _lacks(large: Sequence[RunFacts], rules: NodeRules) -> list[str]:
    done = {r.workload for r in large}
    out = [
        f"a matching run of workload {workload} with a model larger than {_names(rules.too_small)}"
        for workload in rules.workloads
        if workload not in done
    ]
    if len(large) < rules.sessions:
        more = rules.sessions - len(large)
        out.append(f"{formats.plural(more, 'more matching run')} ({rules.sessions} are needed)")
    have = max((r.device_count for r in large), default=0)
    newest = sorted(large, key=lambda r: r.run_id, reverse=True)
    hours = dict.fromkeys(present((r.devices for r in newest), have), 0.0)
    for run in large:
        for device in run.devices:
            if device in hours:
                hours[device] += run.device_hours / len(run.devices)
    if large and not have:
        out.append("how many devices the node has: its runs did not record it")
    elif len(hours) < have:
        out.append(f"{have - len(hours)} of its {have} devices, which no matching run covered")
    short = {device: rules.device_hours - h for device, h in hours.items() if h < rules.device_hours * (1 - 1e-9)}
    if short:
        worst = max(short.values())
        named = _names(sorted(short)) if len(short) <= 4 else f"each of {len(short)} devices"
        out.append(f"{formats.device_hours(worst)} more device-hours on {named}")
    elif not hours:
        out.append(f"{formats.device_hours(rules.device_hours)} device-hours on each of its devices")
    return out
