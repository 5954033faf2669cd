"""What makes an attempt conclusive (design: Trust): the first thing that is missing or wrong. Pure."""

from __future__ import annotations

from collections import Counter

from tandem.runs.attempt import LEAST_REPEATS, Attempt, parity_of, suspect_differs
from tandem.runs.lineage import resumed_at
from tandem.vocabulary import REGULAR_ENDS, Arm, Cause, ControlName, Role, Workload

REQUIRED_PARITY = (
    "tandem", "image", "python", "jax", "jaxlib", "platform", "device_kind", "device_count", "driver", "cpu",
    "cpu_affinity", "flags", "jax_config", "model", "training", "seed", "tp", "synthetic", "faults", "weights",
    "data", "sites", "programs",
)  # fmt: skip
"""Parity fields that every conclusive attempt has compared, besides ``program.<name>`` of every executable that the
field ``programs`` lists."""

SCORE = "score"
_REDUCTIONS = ("head.reduce", "reduce", "dw.reduce", "grad_norm")
REQUIRED_PROGRAMS: dict[str, tuple[str, ...]] = {
    Workload.SUBMODULE: (
        "embed.fwd", "attn.fwd", "ffn.fwd", "head.fwd", "head.bwd", "ffn.bwd", "attn.bwd", "embed.bwd",
        "embed.update", "attn.update", "ffn.update", "head.update", *_REDUCTIONS,
    ),
    Workload.GRADIENT: ("step", *_REDUCTIONS),
    Workload.TRAINING: ("step", "sketch", *_REDUCTIONS),
    Workload.FINETUNE: ("step", "sketch", SCORE, *_REDUCTIONS),
}  # fmt: skip
"""Executables of a workload, each of which must be in parity and in both self-replays."""


def why_inconclusive(attempt: Attempt, tp: int, self_replays: int, programs: tuple[str, ...]) -> tuple[str, str] | None:
    """The first thing that keeps an attempt from speaking, as (stable name, sentence); None if it may speak."""
    checks = (
        _ended_early(attempt),
        _parity(attempt, programs),
        images(attempt),
        node(attempt),
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
        _answers(attempt, programs),
    )
    return next((check for check in checks if check is not None), None)


def _ended_early(a: Attempt) -> tuple[str, str] | None:
    if a.row.reason not in ("", *REGULAR_ENDS):
        return a.row.reason, f"the attempt ended early: {a.row.reason}"
    if a.closing is not None and a.closing.reason not in REGULAR_ENDS:
        return a.closing.reason, f"the attempt ended early: {a.closing.reason}"
    return None


def _parity(a: Attempt, programs: tuple[str, ...]) -> tuple[str, str] | None:
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


def images(a: Attempt) -> tuple[str, str] | None:
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


def node(a: Attempt) -> tuple[str, str] | None:
    """What the suspect says of its node, against where the cluster placed it; outside a cluster nobody placed it."""
    if a.row.images is None:
        return None
    for row in a.controls:
        told = str(row.detail.get("suspect_node", "")) if row.name is ControlName.KNOWN_REDUCTION else ""
        if told and told != a.row.suspect_host:
            return "parity:node", f"the suspect says that it runs on {told}, and was placed on {a.row.suspect_host}"
    return None


def _reduction(a: Attempt) -> tuple[str, str] | None:
    rows = [c for c in a.controls if c.name is ControlName.KNOWN_REDUCTION]
    if not rows:
        return "known_reduction_missing", "the known reduction was never recorded"
    if not all(c.ok for c in rows):
        return "collective_order", "the sides reduce known values to different bits"
    return None


def _self_replay(a: Attempt, name: ControlName, repeats: int, required: tuple[str, ...]) -> tuple[str, str] | None:
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
            if role is Role.SUSPECT and not row.ok and row not in suspect_differs(a):
                return (
                    f"{name}_uneven",
                    f"the suspect differed from itself in {program}, repeated more than the reference",
                )
    return None


def _positive(a: Attempt, name: ControlName, tp: int) -> tuple[str, str] | None:
    when = "first" if name is ControlName.POSITIVE_START else "last"
    rows = {c.subject: c for c in a.controls if c.name is name}
    for subject in ("digest", *(f"rank {rank}" for rank in range(tp))):
        row = rows.get(subject)
        if row is None:
            return f"{name}_missing", f"the positive control after the {when} step ({subject}) was never recorded"
        if not row.ok:
            return f"{name}_failed", f"the comparator did not report exactly the planted bit after the {when} step"
    return None


def _replays(a: Attempt) -> tuple[str, str] | None:
    rows = [c for c in a.controls if c.name is ControlName.REPLAY_REFERENCE]
    if not rows:
        return "replay_reference_missing", "whether the reference repeats its own replays was never recorded"
    if not all(c.ok for c in rows):
        return "reference_differs", "the reference did not repeat its own result in a replay"
    replayed = max((m.replays for m in a.mismatches), default=0)
    if replayed and not any(c.repeats >= replayed for c in rows):
        return "replay_reference_short", "the reference replayed less often than the suspect"
    return None


def _transport(a: Attempt) -> tuple[str, str] | None:
    if any(c.name is ControlName.TRANSPORT and not c.ok for c in a.controls):
        return "transport", "a tensor arrived changed and could not be had whole"
    return None


def _received(a: Attempt) -> tuple[str, str] | None:
    if any(m.mismatched is None and m.cause is not Cause.DERIVED for m in a.mismatches):
        return "tensor_missing", "a tensor whose digest differed was never received"
    return None


def _closing(a: Attempt) -> tuple[str, str] | None:
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


def _coverage(a: Attempt) -> tuple[str, str] | None:
    begun = resumed_at(a.controls).get(a.row.attempt, 0)
    if [s.step for s in a.steps] != [0, *range(begun + 1, begun + len(a.steps))][: len(a.steps)]:
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


def _answers(a: Attempt, programs: tuple[str, ...]) -> tuple[str, str] | None:
    """Where questions are asked, both sides must have answered the same ones."""
    if SCORE not in programs:
        return None
    asked = {arm: {(e.step, e.task, e.question) for e in a.evaluations if e.arm == arm} for arm in Arm}
    if not asked[Arm.REFERENCE] or asked[Arm.REFERENCE] != asked[Arm.SUSPECT]:
        return "answers_missing", "one side's answers to the held-out questions were never recorded"
    return None
