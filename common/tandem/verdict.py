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

from tandem.bounds import CONFIDENCE, zero_bound
from tandem.records import AttemptRow, ClosingRecord, ControlRecord, MismatchRecord, RunRecords, StepRecord
from tandem.vocabulary import REGULAR_ENDS, Cause, ControlName, ReplayClass, Role, Verdict, Workload

REQUIRED_PARITY = (
    "tandem", "image", "python", "jax", "jaxlib", "platform", "device_kind", "device_count", "driver", "cpu",
    "cpu_affinity", "flags", "jax_config", "model", "training", "seed", "tp", "synthetic", "faults", "weights",
    "data", "sites", "programs",
)  # fmt: skip
"""Parity fields that every conclusive attempt has compared, besides ``program.<name>`` of every executable that the
field ``programs`` lists."""

_REDUCTIONS = ("head.reduce", "reduce", "dw.reduce", "grad_norm")
REQUIRED_PROGRAMS: dict[str, tuple[str, ...]] = {
    Workload.SUBMODULE: (
        "embed.fwd", "attn.fwd", "ffn.fwd", "head.fwd", "head.bwd", "ffn.bwd", "attn.bwd", "embed.bwd",
        "embed.update", "attn.update", "ffn.update", "head.update", *_REDUCTIONS,
    ),
    Workload.GRADIENT: ("step", *_REDUCTIONS),
    Workload.TRAINING: ("step", *_REDUCTIONS),
    Workload.FINETUNE: ("step", "score", *_REDUCTIONS),
}  # fmt: skip
"""Executables of a workload, each of which must be in parity and in both self-replays."""

LEAST_REPEATS = 2
"""Self-replays below which nothing was repeated."""


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


@dataclass(frozen=True, slots=True)
class _Attempt:
    row: AttemptRow
    steps: list[StepRecord]
    mismatches: list[MismatchRecord]
    controls: list[ControlRecord]
    others: tuple[int, int, int, int]
    """Rows of faults, gradients, drifts, evaluations."""
    closing: ClosingRecord | None


def decide(records: RunRecords) -> Decision:
    """The verdict of a run.

    ``match``: the last attempt is conclusive and no attempt has a finding. ``mismatch``: a finding, and one conclusive
    attempt with the fingerprint of an attempt that has one. Else ``inconclusive``.
    """
    attempts = [_of_attempt(records, row) for row in sorted(records.attempts, key=lambda a: a.attempt)]
    if not attempts:
        return _inconclusive("no_attempt", "no attempt was ever started")
    spec = records.run.spec
    programs = REQUIRED_PROGRAMS.get(records.run.workload)
    if programs is None:
        return _inconclusive("workload", f"this version does not know the workload {records.run.workload}")
    tp, repeats = int(spec.get("tp", 1)), int(spec.get("self_replays", 8))
    reasons = [why_inconclusive(a, tp, repeats, programs) for a in attempts]
    suspected = any(_reference_differs(a) for a in attempts)
    found = [a for a in attempts if a.mismatches or _suspect_differs(a)]
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


def why_inconclusive(
    attempt: _Attempt, tp: int, self_replays: int, programs: tuple[str, ...]
) -> tuple[str, str] | None:
    """The first thing that keeps an attempt from speaking, as (stable name, sentence); None if it may speak."""
    checks = (
        _ended_early(attempt),
        _parity(attempt, programs),
        _images(attempt),
        _node(attempt),
        _reduction(attempt),
        _self_replay(attempt, ControlName.SELF_REPLAY_START, self_replays, programs),
        _positive(attempt, ControlName.POSITIVE_START, tp),
        _replays(attempt),
        _transport(attempt),
        _received(attempt),
        _positive(attempt, ControlName.POSITIVE_END, tp),
        _self_replay(attempt, ControlName.SELF_REPLAY_END, self_replays, programs),
        _closing(attempt),
        _coverage(attempt),
    )
    return next((check for check in checks if check is not None), None)


def parity_of(controls: list[ControlRecord]) -> dict[str, str]:
    """The reference's parity fields, as an attempt's control rows hold them."""
    return {c.subject: str(c.detail.get("reference", "")) for c in controls if c.name is ControlName.PARITY}


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
    executables: str


def attempt_facts(records: RunRecords) -> list[AttemptFacts]:
    """Facts of every attempt, in order; pure, as the verdict is."""
    spec = records.run.spec
    tp, repeats = int(spec.get("tp", 1)), int(spec.get("self_replays", 8))
    found = []
    for row in sorted(records.attempts, key=lambda a: a.attempt):
        a = _of_attempt(records, row)
        parity = [c for c in a.controls if c.name is ControlName.PARITY]
        reduction = [c for c in a.controls if c.name is ControlName.KNOWN_REDUCTION]
        alike = bool(parity) and bool(reduction) and all(c.ok for c in (*parity, *reduction))
        found.append(
            AttemptFacts(
                attempt=row.attempt,
                conclusive=why_inconclusive(a, tp, repeats) is None,
                comparable=alike and _images(a) is None and _node(a) is None and not _reference_differs(a),
                reference_differs=_reference_differs(a),
                suspect_differs=tuple(sorted({c.subject for c in _suspect_differs(a)})),
                rows=max(sum(s.rows for s in a.steps), len(a.mismatches)),
                executables=executables(parity_of(a.controls)),
            )
        )
    return found


def _of_attempt(records: RunRecords, row: AttemptRow) -> _Attempt:
    mine = row.attempt
    closings = [c for c in records.closings if c.attempt == mine]
    return _Attempt(
        row=row,
        steps=sorted((s for s in records.steps if s.attempt == mine), key=lambda s: s.step),
        mismatches=[m for m in records.mismatches if m.attempt == mine],
        controls=[c for c in records.controls if c.attempt == mine],
        others=(
            sum(x.attempt == mine for x in records.faults),
            sum(x.attempt == mine for x in records.gradients),
            sum(x.attempt == mine for x in records.drifts),
            sum(x.attempt == mine for x in records.evaluations),
        ),
        closing=closings[0] if closings else None,
    )


# -- what a conclusive attempt has -------------------------------------------------------------------


def _ended_early(a: _Attempt) -> tuple[str, str] | None:
    if a.row.reason not in ("", *REGULAR_ENDS):
        return a.row.reason, f"the attempt ended early: {a.row.reason}"
    if a.closing is not None and a.closing.reason not in REGULAR_ENDS:
        return a.closing.reason, f"the attempt ended early: {a.closing.reason}"
    return None


def _parity(a: _Attempt, programs: tuple[str, ...]) -> tuple[str, str] | None:
    rows = {c.subject: c for c in a.controls if c.name is ControlName.PARITY}
    listed = parity_of(a.controls).get("programs", "").split(";")
    required = (*REQUIRED_PARITY, *(f"program.{name}" for name in (*programs, *listed)))
    for field, row in rows.items():
        if not row.ok:
            return f"parity:{field}", f"the sides differ in {field}"
    for field in required:
        if field not in rows:
            return f"parity_missing:{field}", f"parity of {field} was never recorded"
    return None


def _images(a: _Attempt) -> tuple[str, str] | None:
    """In a cluster the nodes say which image each pod ran: one tag may mean another image on each of them."""
    if a.row.images is None:
        return None
    digests = [a.row.images.get(role) for role in Role]
    for role, digest in zip(Role, digests, strict=True):
        if not digest:
            return "parity_missing:image_digest", f"which image the {role}'s pod ran was never recorded"
    if len(set(digests)) > 1:
        return "parity:image_digest", "the nodes ran different images under one name"
    return None


def _node(a: _Attempt) -> tuple[str, str] | None:
    """What the suspect says of its node, against where the cluster placed it; outside a cluster nobody placed it."""
    if a.row.images is None:
        return None
    for row in a.controls:
        told = str(row.detail.get("suspect_node", "")) if row.name is ControlName.KNOWN_REDUCTION else ""
        if told and told != a.row.suspect_host:
            return "parity:node", f"the suspect says that it runs on {told}, and was placed on {a.row.suspect_host}"
    return None


def _reduction(a: _Attempt) -> tuple[str, str] | None:
    rows = [c for c in a.controls if c.name is ControlName.KNOWN_REDUCTION]
    if not rows:
        return "known_reduction_missing", "the known reduction was never recorded"
    if not all(c.ok for c in rows):
        return "collective_order", "the sides reduce known values to different bits"
    return None


def _self_replay(a: _Attempt, name: ControlName, repeats: int, required: tuple[str, ...]) -> tuple[str, str] | None:
    """Recorded on both sides for every executable, often enough, and equal on the reference."""
    when = "start" if name is ControlName.SELF_REPLAY_START else "end"
    programs = {s.removeprefix("program.") for s in parity_of(a.controls) if s.startswith("program.")}
    for role in (Role.REFERENCE, Role.SUSPECT):
        rows = {c.subject: c for c in a.controls if c.name is name and c.role is role}
        for program in sorted(programs | set(required)):
            row = rows.get(program)
            if row is None:
                return f"{name}_missing", f"the {role}'s self-replay of {program} at the {when} was never recorded"
            if row.repeats < max(repeats, LEAST_REPEATS):
                return f"{name}_short", f"the {role} repeated {program} only {row.repeats} times at the {when}"
            if role is Role.REFERENCE and not row.ok:
                return "reference_differs", f"the reference did not repeat its own result in {program} at the {when}"
            if role is Role.SUSPECT and not row.ok and row not in _suspect_differs(a):
                return (
                    f"{name}_uneven",
                    f"the suspect differed from itself in {program}, repeated more than the reference",
                )
    return None


def _positive(a: _Attempt, name: ControlName, tp: int) -> tuple[str, str] | None:
    when = "first" if name is ControlName.POSITIVE_START else "last"
    rows = {c.subject: c for c in a.controls if c.name is name}
    for subject in ("digest", *(f"rank {rank}" for rank in range(tp))):
        row = rows.get(subject)
        if row is None:
            return f"{name}_missing", f"the positive control after the {when} step ({subject}) was never recorded"
        if not row.ok:
            return f"{name}_failed", f"the comparator did not report exactly the planted bit after the {when} step"
    return None


def _replays(a: _Attempt) -> tuple[str, str] | None:
    rows = [c for c in a.controls if c.name is ControlName.REPLAY_REFERENCE]
    if not rows:
        return "replay_reference_missing", "whether the reference repeats its own replays was never recorded"
    if not all(c.ok for c in rows):
        return "reference_differs", "the reference did not repeat its own result in a replay"
    replayed = max((m.replays for m in a.mismatches), default=0)
    if replayed and not any(c.repeats >= replayed for c in rows):
        return "replay_reference_short", "the reference replayed less often than the suspect"
    return None


def _transport(a: _Attempt) -> tuple[str, str] | None:
    if any(c.name is ControlName.TRANSPORT and not c.ok for c in a.controls):
        return "transport", "a tensor arrived changed and could not be had whole"
    return None


def _received(a: _Attempt) -> tuple[str, str] | None:
    if any(m.mismatched is None and m.cause is not Cause.DERIVED for m in a.mismatches):
        return "tensor_missing", "a tensor whose digest differed was never received"
    return None


def _closing(a: _Attempt) -> tuple[str, str] | None:
    c = a.closing
    if c is None:
        return "closing_missing", "the closing record was never stored"
    stored = (len(a.steps), len(a.mismatches), len(a.controls), *a.others)
    written = (c.steps, c.mismatches, c.controls, c.faults, c.gradients, c.drifts, c.evaluations)
    if stored != written:
        names = "steps, mismatches, controls, faults, gradients, drifts, evaluations"
        return "records_missing", f"rows stored ({names}) {stored} are not the rows written {written}"
    if not c.capped:
        per_step = Counter(m.step for m in a.mismatches)
        if any(per_step[s.step] != s.rows for s in a.steps):
            return "records_missing", "a step's mismatch rows are not as many as the step says"
    return None


def _coverage(a: _Attempt) -> tuple[str, str] | None:
    if [s.step for s in a.steps] != list(range(len(a.steps))):
        return "steps_missing", "the stored steps have gaps"
    compared = [s for s in a.steps if s.step > 0]
    if not compared:
        return "nothing_compared", "no step was compared"
    for step in compared:
        if not step.classes or any(c.sites == 0 or c.elements == 0 for c in step.classes.values()):
            return "nothing_compared", f"nothing was compared in step {step.step}"
    if a.closing is None or not a.closing.devices or a.closing.device_seconds <= 0:
        return "coverage_missing", "which devices were covered, and for how long, was never recorded"
    return None


# -- findings ----------------------------------------------------------------------------------------


def _reference_differs(a: _Attempt) -> bool:
    names = (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END, ControlName.REPLAY_REFERENCE)
    return any(c.name in names and c.role is Role.REFERENCE and not c.ok for c in a.controls)


def _suspect_differs(a: _Attempt) -> list[ControlRecord]:
    """Self-replays in which the suspect differs from itself while the reference, as often repeated, does not."""
    names = (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END)
    steady = {
        (c.name, c.subject): c.repeats for c in a.controls if c.name in names and c.role is Role.REFERENCE and c.ok
    }
    return [
        c
        for c in a.controls
        if c.name in names and c.role is Role.SUSPECT and not c.ok
        and steady.get((c.name, c.subject), 0) >= c.repeats >= LEAST_REPEATS
    ]  # fmt: skip


# -- sentences ---------------------------------------------------------------------------------------


def _inconclusive(reason: str, why: str, found: str = "") -> Decision:
    tail = f"; what was found all the same: {found}" if found else ""
    return Decision(Verdict.INCONCLUSIVE, reason, f"inconclusive: {why}{tail}")


def _match_sentence(a: _Attempt) -> str:
    elements = sum(c.elements for s in a.steps for c in s.classes.values())
    steps = sum(s.step > 0 for s in a.steps)
    hours = a.closing.device_seconds / 3600 if a.closing else 0.0
    share = zero_bound(steps, CONFIDENCE)
    return (
        f"match: 0 of {elements:.3g} elements over {steps:,} steps and {hours:.2g} device-hours; "
        f"corruption in more than {100 * share:.2g} % of steps excluded at {100 * CONFIDENCE:.0f} %"
    )


def _mismatch_sentence(attempts: list[_Attempt]) -> str:
    return f"mismatch: {_evidence([a for a in attempts if a.mismatches or _suspect_differs(a)])}"


def _evidence(attempts: list[_Attempt]) -> str:
    rows = [m for a in attempts for m in a.mismatches]
    computed = [m for m in rows if m.cause is Cause.COMPUTE]
    selves = [c for a in attempts for c in _suspect_differs(a)]
    parts = []
    if computed:
        compared = sum(c.elements for a in attempts for s in a.steps for c in s.classes.values())
        elements = sum(m.mismatched or 0 for m in computed)
        parts.append(f"{elements:,} of {compared:.3g} elements in {len(computed):,} sites, {_ranks(computed)}")
        replayed = Counter(m.replay for m in computed if m.replay is not ReplayClass.NOT_REPLAYED)
        if replayed:
            total = sum(replayed.values())
            parts.append(", ".join(f"{kind} in {n} of {total} replays" for kind, n in replayed.most_common()))
    for cause, what in ((Cause.STATE, "kept inputs had changed"), (Cause.DIGEST, "digests of equal tensors differed")):
        if others := [m for m in rows if m.cause is cause]:
            parts.append(f"{len(others):,} {what}, {_ranks(others)}")
    if derived := sum(m.cause is Cause.DERIVED for m in rows):
        parts.append(f"{derived:,} updated tensors differed as a consequence")
    if unknown := sum(m.mismatched is None and m.cause is not Cause.DERIVED for m in rows):
        parts.append(f"{unknown} tensors never received")
    if selves:
        programs = sorted({c.subject for c in selves})
        parts.append(f"the suspect differed from itself in {', '.join(programs)}")
    return "; ".join(parts)


def _ranks(rows: list[MismatchRecord]) -> str:
    ranks = sorted({m.rank for m in rows})
    return f"all on rank {ranks[0]}" if len(ranks) == 1 else f"on ranks {', '.join(map(str, ranks))}"
