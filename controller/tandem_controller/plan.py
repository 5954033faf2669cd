"""What to do about one PairRun: a pure function of what is observed. Level-triggered: it never asks what just happened.

Order of a life: chosen (status names both nodes) -> children made -> both pods run -> both ended -> attempt closed ->
judged, or another attempt. The status is written first; what it claims is what other runs see.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.pairing.choose import NoPairing, Pairing, choose
from tandem.pairrun import names
from tandem.pairrun.spec import NodeChoice, PairRunSpec
from tandem.pairrun.status import (
    AttemptStatus,
    Chosen,
    Counts,
    FirstMismatch,
    PairRunStatus,
    PassedOver,
    seconds,
    timestamp,
)
from tandem.spec import RunSpec
from tandem.vocabulary import REGULAR_ENDS, Role, Verdict
from tandem_controller import ending, observed
from tandem_controller.draft import Draft
from tandem_controller.manifests import job_deadline
from tandem_controller.marking import keep_marks, said_of_node, tell_refusals
from tandem_controller.observed import Decision, Observed, Pod
from tandem_controller.volumes import forbidden

KEPT_ATTEMPTS = 20
KEPT_PASSED_OVER = 50
MOST_BACKOFF_S = 3600.0


def plan(o: Observed) -> Decision:
    """The new status of a PairRun, and what to do after it is written."""
    draft = Draft(o, o.status)
    if o.deleting:
        _delete(draft)
    elif draft.status.holds(names.FINISHED):
        _finished(draft)
    elif o.spec is None:
        _unusable(draft)
    else:
        _live(draft, o.spec)
    tell_refusals(draft)
    return draft.decision()


# -- the two ends of an object ---------------------------------------------------------------------------


def _delete(d: Draft) -> None:
    """Children go with their owner; only a mark on a node has to be taken off by hand."""
    if names.FINALIZER in (d.o.obj["metadata"].get("finalizers") or []):
        d.do(observed.UnmarkNodes(_nodes(d.status)), observed.Release())


def _finished(d: Draft) -> None:
    o, last = d.o, d.status.attempts[-1] if d.status.attempts else None
    if names.FINALIZER in (o.obj["metadata"].get("finalizers") or []):
        suspect = last.suspect.node if last else ""
        d.do(observed.UnmarkNodes(_nodes(d.status), suspect, said_of_node(o, d.status)), observed.Release())
    for number in sorted({job.attempt for job in o.jobs if not _ended(o, job.attempt)}):
        d.do(observed.RemoveChildren(number))
    ttl = o.spec.ttl_seconds_after_finished if o.spec else None
    ended = seconds(d.status.finished_at)
    if ttl is not None and ended is not None:
        left = ended + ttl - o.now
        if left <= 0:
            d.do(observed.DeleteSelf())
        else:
            d.again(left)


def _ended(o: Observed, attempt: int) -> bool:
    """Whether every Job of an attempt has ended by itself: its pods are left, for their logs."""
    over = {pod.role for pod in o.pods if pod.attempt == attempt and pod.ended}
    return all(job.failed or job.leaving or job.role in over for job in o.jobs if job.attempt == attempt)


def _nodes(status: PairRunStatus) -> tuple[str, ...]:
    found = [chosen.node for a in status.attempts for chosen in (a.suspect, a.reference)]
    return tuple(dict.fromkeys(found))


def _unusable(d: Draft) -> None:
    """The spec cannot be read: before the first attempt that is the end; later it is what ends the attempt."""
    o = d.o
    if o.facts.judgement is not None:
        _judged(d)
    elif not d.status.attempts or (o.facts.reachable and not o.facts.run_stored):
        _end(d, Verdict.INCONCLUSIVE, "InvalidSpec", "invalid_spec", f"inconclusive: {o.spec_error}")
    else:
        if d.current is not None:
            _close(d, d.current, ending.End("invalid_spec", o.spec_error, infrastructure=True))
        _judge(d)
    keep_marks(d)


# -- a live run ------------------------------------------------------------------------------------------


def _live(d: Draft, spec: PairRunSpec) -> None:
    o = d.o
    d.set(steps=spec.run.steps)
    if d.status.condition(names.FINISHED) is None:
        d.condition(names.FINISHED, False, "InProgress", "")
    for number in sorted({job.attempt for job in o.jobs} - ({d.current.number} if d.current else set())):
        if any(a.number == number and a.ended_at is not None for a in d.status.attempts):
            _remove(d, number)
    if o.facts.judgement is not None:
        _judged(d)
        return
    if d.current is not None:
        _running(d, spec, d.current)
    if d.current is None:
        _between(d, spec)
    keep_marks(d)
    _delivery(d)


def _remove(d: Draft, number: int) -> None:
    """What is left of an ended attempt, unless its pods ended by themselves: those keep their logs."""
    if not _ended(d.o, number) or any(p.attempt == number and not p.ended for p in d.o.pods):
        d.do(observed.RemoveChildren(number))


def _between(d: Draft, spec: PairRunSpec) -> None:
    """No attempt runs: judge, wait, or choose the next pair."""
    o, attempts = d.o, d.status.attempts
    if attempts and (ending.settled(attempts[-1]) or len(_spent(attempts)) >= spec.retry.max_attempts):
        _judge(d)
        return
    if spec.suspend:
        d.condition(names.RUNNING, False, "Suspended", "spec.suspend is true")
        return
    if attempts and (left := _backoff(spec, attempts, o.now)) > 0:
        d.condition(names.PAIRED, False, "BackOff", f"the next attempt starts at {timestamp(o.now + left)}")
        d.again(left)
        return
    chosen = _choose(d, spec)
    if isinstance(chosen, NoPairing):
        _unpaired(d, chosen)
    else:
        _start(d, *chosen)


def _choose(d: Draft, spec: PairRunSpec) -> tuple[Pairing, RunSpec] | NoPairing:
    o = d.o
    if (sentence := forbidden(spec, o.settings.worker.allowed_host_paths)) is not None:
        return NoPairing("VolumeForbidden", sentence, final=True)
    if o.missing:
        return NoPairing("InputMissing", o.missing[0])
    if d.status.suspect is not None:  # a further attempt is one more look at the same suspect
        spec = spec.model_copy(update={"suspect": NodeChoice(node_name=d.status.suspect.node)})
    found = choose(spec, o.world, o.policy)
    if isinstance(found, NoPairing):
        return found
    return found, spec.run.model_copy(update={"tp": found.share.tp})


def _unpaired(d: Draft, why: NoPairing) -> None:
    passed = _shown(why.passed_over)
    d.set(passed_over=passed, passed_over_total=len(why.passed_over))
    before = d.status.condition(names.PAIRED)
    if why.final and not d.status.attempts:
        _end(d, Verdict.INCONCLUSIVE, why.reason, _snake(why.reason), f"inconclusive: {why.message}")
        return
    if before is None or (before.reason, before.message) != (why.reason, why.message):
        d.do(observed.Event(why.reason, why.message, warning=True))
    d.condition(names.PAIRED, False, why.reason, why.message)
    d.condition(names.RUNNING, False, "NotPaired", "")
    d.again(d.o.settings.pairing_seconds)
    if d.status.attempts and (why.final or why.exhausted):
        _judge(d)


def _start(d: Draft, pairing: Pairing, run: RunSpec) -> None:
    o = d.o
    number = d.status.attempt + 1
    # A further attempt names its suspect only so that it is the same one: why it was chosen stays.
    reason = d.status.suspect.reason if d.status.suspect is not None else pairing.suspect_reason
    sides = {
        Role.SUSPECT: Chosen(node=pairing.suspect.name, reason=reason, boot_id=pairing.suspect.boot_id),
        Role.REFERENCE: Chosen(
            node=pairing.reference.name, reason=pairing.reference_reason, boot_id=pairing.reference.boot_id
        ),
    }
    attempt = AttemptStatus(
        number=number, suspect=sides[Role.SUSPECT], reference=sides[Role.REFERENCE],
        device=pairing.share.device, devices=pairing.share.devices, tp=pairing.share.tp, node_devices=pairing.share.has,
        started_at=timestamp(o.now),
    )  # fmt: skip
    d.set(
        attempts=[*d.status.attempts, attempt][-KEPT_ATTEMPTS:], attempt=number, step=0, steps=run.steps,
        suspect=attempt.suspect, reference=attempt.reference, passed_over=_shown(pairing.passed_over),
        passed_over_total=len(pairing.passed_over),
    )  # fmt: skip
    shown = ((role, sides[role]) for role in (Role.SUSPECT, Role.REFERENCE))
    message = ", ".join(f"{role} {side.node} ({side.reason})" for role, side in shown)
    d.condition(names.PAIRED, True, "Paired", message)
    d.condition(names.RUNNING, False, "Starting", "the pods are being made")
    d.do(observed.Event("Paired", f"attempt {number}: {message}"))
    d.do(observed.MakeChildren(number))
    if o.facts.reachable:
        d.do(observed.StoreAttempt(number))
    d.again(10.0)


def _running(d: Draft, spec: PairRunSpec, attempt: AttemptStatus) -> None:
    """An attempt goes on: see that everything is there, or that it has ended."""
    o = d.o
    pods = [pod for pod in o.pods if pod.attempt == attempt.number]
    attempt = _with_images(d, attempt, pods)
    _progress(d)
    end = ending.why(o, spec, attempt, pods)
    if end is not None:
        _close(d, attempt, end)
        return
    if o.facts.reachable and attempt.number not in o.facts.attempts:
        d.do(observed.StoreAttempt(attempt.number))
    jobs = [job for job in o.jobs if job.attempt == attempt.number]
    if len(jobs) < len(Role):
        d.do(observed.MakeChildren(attempt.number))
        if failure := o.failures.get("MakeChildren"):
            d.condition(names.RUNNING, False, "ChildrenRefused", failure)
    if any(job.deadline != job_deadline(spec) for job in jobs if not (job.failed or job.leaving)):
        d.do(observed.SetDeadline(attempt.number, job_deadline(spec)))
    running = {pod.role for pod in pods if pod.running}
    if ending.one_sided(o, attempt, pods):
        d.condition(names.RUNNING, False, ending.ONE_SIDED, "one side has ended; the other may yet say why")
        d.again(ending.GRACE_S / 4)
    elif len(running) == len(Role):
        if attempt.running_at is None:
            d.replace_last(attempt.model_copy(update={"running_at": timestamp(o.now)}))
            d.do(observed.Event("Running", f"attempt {attempt.number}: both pods run"))
        d.condition(names.RUNNING, True, "Running", "")
    elif attempt.running_at is not None and (leaving := [str(p.role) for p in pods if p.leaves_at and p.speaks]):
        message = f"the pod of the {' and of the '.join(leaving)} was asked to stop: the pair drains, and closes"
        d.condition(names.RUNNING, True, "Stopping", message)
    elif attempt.running_at is None and len(jobs) == len(Role):
        d.condition(names.RUNNING, False, "Starting", ending.waits_for(pods, jobs))
    if (left := ending.next_deadline(o, spec, attempt)) is not None:
        d.again(max(left, 1.0))


def _with_images(d: Draft, attempt: AttemptStatus, pods: Sequence[Pod]) -> AttemptStatus:
    """The attempt with what the nodes say of its images; kept, since pods may be gone before the verdict."""
    ids = {pod.role: pod.image_id for pod in pods if pod.image_id}
    sides = {Role.SUSPECT: attempt.suspect, Role.REFERENCE: attempt.reference}
    new = {str(role): sides[role].model_copy(update={"image": image}) for role, image in ids.items()}
    if all(sides[role].image == image for role, image in ids.items()):
        return attempt
    attempt = attempt.model_copy(update=new)
    d.replace_last(attempt)
    d.set(suspect=attempt.suspect, reference=attempt.reference)
    if d.o.facts.reachable:
        d.do(observed.StoreImages(attempt.number))
    return attempt


def _close(d: Draft, attempt: AttemptStatus, end: ending.End) -> None:
    o = d.o
    ended = attempt.model_copy(
        update={
            "ended_at": timestamp(o.now), "reason": end.reason, "message": end.message[:1024],
            "infrastructure": end.infrastructure,
        }
    )  # fmt: skip
    d.replace_last(ended)
    d.condition(names.RUNNING, False, "Ended", f"attempt {attempt.number}: {end.reason}: {end.message}"[:1024])
    sentence = f"attempt {attempt.number} ended: {end.reason}" + (f": {end.message}" if end.message else "")
    d.do(observed.Event("AttemptEnded", sentence, warning=end.reason not in REGULAR_ENDS))
    if not end.by_itself:
        d.do(observed.RemoveChildren(attempt.number))
    if o.facts.reachable:
        d.do(observed.CloseAttempt(attempt.number, end.reason))


def _progress(d: Draft) -> None:
    """Step and counts, at most every so often; the first mismatch at once."""
    o, live = d.o, d.o.facts.live
    if not o.facts.reachable or not o.facts.run_stored:
        return
    first = FirstMismatch.model_validate(live.first) if live.first and d.status.first_mismatch is None else None
    due = o.now - (seconds(d.status.progress_at) or 0.0) >= o.settings.progress_seconds
    counts = _counts(o)
    step = live.step if live.attempt == d.status.attempt else d.status.step
    if first is None and (not due or (counts == d.status.counts and step == d.status.step)):
        return
    if first is not None:
        d.do(observed.Event("Mismatch", f"first at step {first.step}, {first.site}, rank {first.rank}", warning=True))
        d.set(first_mismatch=first)
    d.set(counts=counts, step=step, progress_at=timestamp(o.now))


def _counts(o: Observed) -> Counts:
    live = o.facts.live
    return Counts(
        sites=live.sites, elements=live.elements, mismatched_sites=live.mismatched_sites,
        mismatched_elements=live.mismatched_elements, other_findings=live.other_findings,
    )  # fmt: skip


# -- the verdict -----------------------------------------------------------------------------------------


def _judge(d: Draft) -> None:
    o = d.o
    if not o.facts.reachable:
        d.again(o.settings.pairing_seconds)
        return
    attempts = [a for a in d.status.attempts if o.spec is not None or a.number in o.facts.attempts]
    missing = [a.number for a in attempts if a.number not in o.facts.attempts]
    d.do(*(observed.StoreAttempt(number) for number in missing))
    d.do(*(observed.CloseAttempt(a.number, a.reason) for a in attempts if _open(o, a)), observed.Judge())
    d.again(5.0)


def _open(o: Observed, attempt: AttemptStatus) -> bool:
    return o.facts.attempts.get(attempt.number, "running") == "running"


def _judged(d: Draft) -> None:
    o, judgement = d.o, d.o.facts.judgement
    assert judgement is not None
    if (current := d.current) is not None:  # judged by a controller that did not get to write it down
        d.replace_last(current.model_copy(update={"ended_at": timestamp(o.now), "reason": judgement.reason}))
    first = FirstMismatch.model_validate(o.facts.live.first) if o.facts.live.first else d.status.first_mismatch
    step = o.facts.live.step if o.facts.live.attempt == d.status.attempt else d.status.step
    d.set(counts=_counts(o), first_mismatch=first, step=step, progress_at=timestamp(o.now))
    lost = judgement.reason in ("records_missing", "closing_missing", "steps_missing")
    d.condition(
        names.RECORDS_DELIVERED, not lost, "RecordsMissing" if lost else "Delivered",
        judgement.sentence if lost else "",
    )  # fmt: skip
    verdict, sentence = Verdict(judgement.verdict), judgement.sentence
    last = d.status.attempts[-1] if d.status.attempts else None
    if verdict is Verdict.INCONCLUSIVE and last is not None and last.reason == judgement.reason and last.message:
        sentence = f"{sentence}: {last.message}"  # PostgreSQL holds the reason's name alone
    _end(d, verdict, _camel(verdict), judgement.reason, sentence)


def _end(d: Draft, verdict: Verdict, reason: str, name: str, sentence: str) -> None:
    """The terminal conditions and the verdict, in one write."""
    o = d.o
    d.set(verdict=str(verdict), reason=name, message=sentence[:2048], finished_at=timestamp(o.now))
    if d.status.condition(names.PAIRED) is None:
        d.condition(names.PAIRED, False, reason, sentence)
    d.condition(names.RUNNING, False, "Finished", "")
    d.condition(names.FINISHED, True, reason, sentence)
    d.condition(names.SUCCEEDED, verdict is Verdict.MATCH, reason, sentence)
    d.condition(names.FAILED, verdict is not Verdict.MATCH, reason, sentence)
    d.do(observed.Event(reason, sentence, warning=verdict is not Verdict.MATCH))
    d.again(1.0)


def _delivery(d: Draft) -> None:
    """Whether records arrive, as far as it can be told before the verdict."""
    if not d.o.facts.reachable:
        d.condition(names.RECORDS_DELIVERED, None, "DatabaseUnreachable", d.o.facts.error)
    elif d.status.attempts:
        d.condition(names.RECORDS_DELIVERED, False, "InProgress", "")


# -- small things ----------------------------------------------------------------------------------------


def _spent(attempts: Sequence[AttemptStatus]) -> list[AttemptStatus]:
    """Attempts that count towards the limit: a suspension does not."""
    return [a for a in attempts if a.reason != "suspended"]


def _backoff(spec: PairRunSpec, attempts: Sequence[AttemptStatus], now: float) -> float:
    """Seconds until the next attempt may start: doubled for each that was spent."""
    if attempts[-1].reason == "suspended":
        return 0.0
    wait = min(spec.retry.backoff_seconds * 2.0 ** (len(_spent(attempts)) - 1), MOST_BACKOFF_S)
    return (seconds(attempts[-1].ended_at) or 0.0) + wait - now


def _shown(passed: Sequence[PassedOver]) -> list[PassedOver]:
    return list(passed[:KEPT_PASSED_OVER])


def _camel(word: str) -> str:
    return "".join(part.capitalize() for part in word.split("_"))


def _snake(word: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(word))
