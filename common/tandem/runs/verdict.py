"""The verdict of a run: a pure function of stored records (design: Trust).

A run may speak only if everything that makes it conclusive is recorded. Whatever is missing makes it
``inconclusive`` with the first reason; its findings are shown all the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.formats import plural
from tandem.records import MismatchRecord, RunRecords
from tandem.runs.attempt import (
    Attempt,
    counted_tensors,
    devices_of_node,
    differs,
    of_attempt,
    parity_of,
    reference_differs,
    suspect_differs,
    unequal_answers,
)
from tandem.runs.conclusive import REQUIRED_PROGRAMS, images, node, why_inconclusive
from tandem.runs.lineage import resumed_at
from tandem.statistics.bounds import CONFIDENCE, zero_bound
from tandem.vocabulary import Arm, Cause, ControlName, ReplayClass, Verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """What the records say."""

    verdict: Verdict
    reason: str
    """``completed``, or the stable name of the first thing that is missing or went wrong."""
    sentence: str
    """For people: the verdict with its evidence or its reason."""
    reference_suspected: bool = False
    """The reference did not repeat its own results: it, not the suspect, needs a test."""


def decide(records: RunRecords) -> Decision:
    """The verdict of a run.

    ``match``: the last attempt is conclusive and no attempt has a finding. ``mismatch``: a finding, and one conclusive
    attempt with the fingerprint of an attempt that has one. Else ``inconclusive``.
    """
    attempts = [of_attempt(records, row) for row in sorted(records.attempts, key=lambda a: a.attempt)]
    if not attempts:
        return _inconclusive("no_attempt", "no attempt was ever started")
    spec = records.run.spec
    programs = REQUIRED_PROGRAMS.get(records.run.workload)
    if programs is None:
        return _inconclusive("workload", f"this version does not know the workload {records.run.workload}")
    tp, repeats = int(spec.get("tp", 1)), int(spec.get("self_replays", 8))
    reasons = [why_inconclusive(a, tp, repeats, programs) for a in attempts]
    suspected = any(reference_differs(a) for a in attempts)
    found = [a for a in attempts if differs(a)]
    conclusive = [a for a, reason in zip(attempts, reasons, strict=True) if reason is None]
    if found and not suspected:
        prints = {fingerprint(parity_of(a.controls)) for a in found}
        if any(fingerprint(parity_of(a.controls)) in prints for a in conclusive):
            return Decision(Verdict.MISMATCH, "completed", _mismatch_sentence(attempts))
    if not found and reasons[-1] is None:
        return Decision(Verdict.MATCH, "completed", _match_sentence(attempts[-1]))
    reason = next((r for r in reversed(reasons) if r is not None), None) or (
        "no_conclusive_attempt",
        "findings lack one",
    )
    decision = _inconclusive(*reason, found=_evidence(found) if found else "")
    return Decision(decision.verdict, decision.reason, decision.sentence, reference_suspected=suspected)


def fingerprint(parity: Mapping[str, str]) -> str:
    """One digest of all parity fields, by which runs of the same executables on the same inputs are found."""
    return hashlib.sha256(json.dumps(dict(parity), sort_keys=True).encode()).hexdigest()


EXECUTABLE_FIELDS = ("jaxlib", "platform", "device_kind", "driver", "flags", "jax_config", "programs")
"""Parity fields that, beside ``program.<name>``, say which code a device ran. Data, seed and model are not among them:
the programs hold the shapes, and a null run with another seed controls the same executables."""


def executables(parity: Mapping[str, str]) -> str:
    """Digest of the executables alone, by which a null run of the same ones is found; empty if none were recorded."""
    chosen = {k: v for k, v in parity.items() if k.startswith("program.") or k in EXECUTABLE_FIELDS}
    return fingerprint(chosen) if any(k.startswith("program.") for k in chosen) else ""


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What the rules about nodes ask of an attempt."""

    attempt: int
    conclusive: bool
    comparable: bool
    """Parity and the known reduction were recorded and hold, and the reference never differed from itself: a difference
    that was found is the suspect's, even if something else keeps the attempt from speaking."""
    reference_differs: bool
    suspect_differs: tuple[str, ...]
    """Programs in which the suspect differed from itself while the reference, as often repeated, did not."""
    rows: int
    """Mismatch rows, those beyond the cap included."""
    unequal_answers: int
    """Answers of the suspect whose scores are not the reference's."""
    executables: str

    @property
    def findings(self) -> int:
        """Everything that differed: rows, programs unlike themselves, answers."""
        return self.rows + len(self.suspect_differs) + self.unequal_answers


def attempt_facts(records: RunRecords) -> list[AttemptFacts]:
    """Facts of every attempt, in order; pure, as the verdict is."""
    spec = records.run.spec
    tp, repeats = int(spec.get("tp", 1)), int(spec.get("self_replays", 8))
    programs = REQUIRED_PROGRAMS.get(records.run.workload, ())
    found = []
    for row in sorted(records.attempts, key=lambda a: a.attempt):
        a = of_attempt(records, row)
        parity = [c for c in a.controls if c.name is ControlName.PARITY]
        reduction = [c for c in a.controls if c.name is ControlName.KNOWN_REDUCTION]
        alike = bool(parity) and bool(reduction) and all(c.ok for c in (*parity, *reduction))
        found.append(
            AttemptFacts(
                attempt=row.attempt,
                conclusive=bool(programs) and why_inconclusive(a, tp, repeats, programs) is None,
                comparable=alike and images(a) is None and node(a) is None and not reference_differs(a),
                reference_differs=reference_differs(a),
                suspect_differs=tuple(sorted({c.subject for c in suspect_differs(a)})),
                rows=max(sum(s.rows for s in a.steps), len(a.mismatches)),
                unequal_answers=len(unequal_answers(a)),
                executables=executables(parity_of(a.controls)),
            )
        )
    return found


# -- sentences ---------------------------------------------------------------------------------------


def _inconclusive(reason: str, why: str, found: str = "") -> Decision:
    tail = f"; what was found all the same: {found}" if found else ""
    return Decision(Verdict.INCONCLUSIVE, reason, f"inconclusive: {why}{tail}")


def _match_sentence(a: Attempt) -> str:
    elements = sum(c.elements for s in a.steps for c in s.classes.values())
    steps = sum(s.step > 0 for s in a.steps)
    hours = a.closing.device_seconds / 3600 if a.closing else 0.0
    share = zero_bound(steps, CONFIDENCE)
    return (
        f"match: 0 of {elements:.3g} elements over {steps:,} steps and {hours:.2g} device-hours{_some(a)}; "
        f"corruption in more than {100 * share:.2g} % of steps excluded at {100 * CONFIDENCE:.0f} %{_resumed(a)}"
    )


def _some(a: Attempt) -> str:
    """That a match says nothing of the node's other devices."""
    covered, has = len(a.closing.devices) if a.closing else 0, devices_of_node(a.controls)
    return f" on {covered} of the node's {has} devices" if covered < has else ""


def _mismatch_sentence(attempts: list[Attempt]) -> str:
    found = [a for a in attempts if differs(a)]
    return f"mismatch: {_evidence(found)}{_resumed(attempts[-1])}"


def _resumed(a: Attempt) -> str:
    step = resumed_at(a.controls).get(a.row.attempt)
    return f"; resumed from step {step}" if step else ""


def _evidence(attempts: list[Attempt]) -> str:
    rows = [m for a in attempts for m in a.mismatches]
    computed = [m for m in rows if m.cause is Cause.COMPUTE]
    selves = [c for a in attempts for c in suspect_differs(a)]
    parts = []
    if computed:
        compared = sum(c.elements for a in attempts for s in a.steps for c in s.classes.values())
        elements = sum(m.mismatched or 0 for m in computed)
        parts.append(f"{elements:,} of {compared:.3g} elements in {plural(len(computed), 'site')}, {_ranks(computed)}")
        replayed = Counter(m.replay for m in computed if m.replay is not ReplayClass.NOT_REPLAYED)
        if replayed:
            total = plural(sum(replayed.values()), "replay")
            parts.append(", ".join(f"{kind} in {n} of {total}" for kind, n in replayed.most_common()))
    for cause, what in ((Cause.STATE, "kept inputs had changed"), (Cause.DIGEST, "digests of equal tensors differed")):
        if others := [m for m in rows if m.cause is cause]:
            parts.append(f"{len(others):,} {what}, {_ranks(others)}")
    if loaded := sum(m.cause is Cause.DERIVED and not m.step for m in rows):
        parts.append(f"{plural(loaded, 'tensor')} already differed in the checkpoints")
    if derived := sum(m.cause is Cause.DERIVED and m.step > 0 for m in rows):
        parts.append(f"{plural(derived, 'tensor')} differed as a consequence")
    if (counted := sum(counted_tensors(a) for a in attempts)) > len(computed):
        parts.append(f"{plural(counted, 'tensor')} differed by their digests in all")
    answers = [e for a in attempts for e in unequal_answers(a)]
    if answers:
        asked = sum(e.arm == Arm.SUSPECT for a in attempts for e in a.evaluations)
        parts.append(f"the scores of {len(answers):,} of {asked:,} answers differed")
    if unknown := sum(m.mismatched is None and m.cause is not Cause.DERIVED for m in rows):
        parts.append(f"{plural(unknown, 'tensor')} never received")
    if selves:
        programs = sorted({c.subject for c in selves})
        parts.append(f"the suspect differed from itself in {', '.join(programs)}")
    return "; ".join(parts)


def _ranks(rows: list[MismatchRecord]) -> str:
    ranks = sorted({m.rank for m in rows})
    return f"all on rank {ranks[0]}" if len(ranks) == 1 else f"on ranks {', '.join(map(str, ranks))}"
