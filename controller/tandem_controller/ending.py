"""Whether and why an attempt has ended. Pure.

Both sides always end together: when one pod has ended, the other gets a grace in which it learns of it and says what it
knows. Then the likeliest cause counts: what happened to a pod from outside before what its peer says of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.pairrun import names
from tandem.pairrun.spec import PairRunSpec
from tandem.pairrun.status import AttemptStatus, PairRunStatus, seconds
from tandem.vocabulary import REGULAR_ENDS, Role
from tandem_controller.observed import Job, Observed, Pod
from tandem_controller.reasons import DISRUPTED, PodEnd, final, hopeless, job_end, not_started, pod_end, refused

GRACE_S = 90.0
"""How long the second pod may outlive the first: its watchdog notices. A reference delivers its records besides."""
LATE_S = 15.0
"""How long after its deadline a pod that was asked to stop may still be told as running: its kubelet needs a moment."""
ASK_S = 10.0
"""How often a pair whose pods are not all made is looked at."""
ONE_SIDED = "OneSideEnded"
"""Reason of the condition Running while the second side may yet say how it ended."""
CONSEQUENCES = ("peer_left", "dead_peer", "half_open_link", "slow_peer", "no_peer", "stopped_early", "peer_restarted")
"""What a worker says of itself although the cause lies with its peer."""


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended."""

    reason: str
    message: str
    infrastructure: bool
    by_itself: bool = False
    """Both pods have ended: there is nothing to remove."""


def settled(attempt: AttemptStatus) -> bool:
    """Whether an ended attempt is the last one: it reached its end, or the next would meet the same."""
    return attempt.reason in (*REGULAR_ENDS, "deadline") or final(attempt.reason)


def tried(status: PairRunStatus) -> dict[str, int]:
    """Reference node -> attempts of this run on it that said nothing."""
    silent = (a for a in status.attempts if a.ended_at is not None and a.reason != "suspended" and not settled(a))
    return dict(Counter(a.reference.node for a in silent))


def why(o: Observed, spec: PairRunSpec, attempt: AttemptStatus, pods: Sequence[Pod]) -> End | None:
    """How the attempt ended; None while it goes on."""
    if spec.suspend:
        return End("suspended", "spec.suspend is true", infrastructure=True)
    if (differing := _images(attempt)) is not None:
        return differing
    ends = _ends(o, attempt, pods)
    if not ends:
        return _late(o, spec, attempt, pods)
    if len(ends) < len(Role) and _may_still_speak(ends, pods) and o.now < _patient_until(o, ends, pods):
        return None
    ended = {pod.role for pod in pods if pod.ended}
    return _final_word(o, attempt, _cause(ends), by_itself=len(ended) == len(Role))


def _ends(o: Observed, attempt: AttemptStatus, pods: Sequence[Pod]) -> dict[Role, PodEnd]:
    """How each side ended, of those that have."""
    ends: dict[Role, PodEnd] = {}
    jobs = {job.role: job for job in o.jobs if job.attempt == attempt.number}
    for role in Role:
        mine = [pod for pod in pods if pod.role is role]
        found = next((end for pod in mine if (end := pod_end(pod)) is not None), None)
        if found is None:
            found = next((end for pod in mine if (end := _going(o, pod)) is not None), None)
        if found is None and not mine and role in jobs:
            found = job_end(jobs[role])
        if found is None and attempt.running_at is not None and role not in jobs:
            found = PodEnd("job_deleted", f"somebody removed the {role}'s Job", infrastructure=True)
        if found is not None:
            ends[role] = found
    return ends


def _going(o: Observed, pod: Pod) -> PodEnd | None:
    """A pod that is being deleted, or whose node is gone: it may stay for ever, and nobody waits for it."""
    if pod.node and pod.node not in o.node_ready:
        return PodEnd("node_lost", f"the {pod.role}'s node {pod.node} no longer exists", infrastructure=True)
    if pod.leaves_at is None:
        return None
    if pod.node and not o.node_ready[pod.node]:
        return PodEnd("node_lost", f"the {pod.role}'s node {pod.node} is not Ready", infrastructure=True)
    if pod.speaks and o.now < pod.leaves_at + LATE_S:
        return None  # asked to stop: the pair drains, and its records decide
    return PodEnd(
        DISRUPTED.get(pod.disrupted, "pod_deleted"), f"somebody removed the {pod.role}'s pod {pod.name}",
        infrastructure=True,
    )  # fmt: skip


def one_sided(o: Observed, attempt: AttemptStatus, pods: Sequence[Pod]) -> bool:
    """Whether one side has ended, as far as can be told."""
    return bool(_ends(o, attempt, pods))


def _one_sided_since(o: Observed, ends: dict[Role, PodEnd], pods: Sequence[Pod]) -> float:
    """When the first side ended: as its pod says, or, for a pod that nobody can ask, since when that is known."""
    told = [pod.ended_at for pod in pods if pod.role in ends and pod.ended_at is not None]
    condition = o.status.condition(names.RUNNING)
    noticed = seconds(condition.last_transition_time) if condition and condition.reason == ONE_SIDED else None
    return max(told, default=noticed if noticed is not None else o.now)


def _may_still_speak(ends: dict[Role, PodEnd], pods: Sequence[Pod]) -> bool:
    """Whether the other side has a pod that runs, and so may yet say how it ended."""
    return any(pod.speaks for pod in pods if pod.role not in ends)


def _patient_until(o: Observed, ends: dict[Role, PodEnd], pods: Sequence[Pod]) -> float:
    """Until when the side that has not ended may say how. A reference waits for PostgreSQL, delivers, and then ends."""
    since = _one_sided_since(o, ends, pods)
    if Role.REFERENCE in ends:
        return since + GRACE_S
    if not o.facts.reachable:
        return since + o.settings.worker.records_timeout_seconds + GRACE_S
    delivery = o.status.condition(names.RECORDS_DELIVERED)
    if delivery is not None:  # it left Unknown when PostgreSQL came back
        back = o.now if delivery.status == "Unknown" else seconds(delivery.last_transition_time) or since
        since = max(since, back)
    return since + GRACE_S


def _final_word(o: Observed, attempt: AttemptStatus, cause: PodEnd, by_itself: bool) -> End:
    """The records decide: an attempt whose regular end is stored has ended so, whatever became of its pods."""
    live = o.facts.live
    stored = live.closing if o.facts.reachable and live.attempt == attempt.number else None
    if stored in REGULAR_ENDS and cause.reason not in REGULAR_ENDS:
        return End(stored, f"its end is stored; afterwards: {cause.message or cause.reason}", False, by_itself)
    return End(cause.reason, cause.message, cause.infrastructure, by_itself)


def _cause(ends: dict[Role, PodEnd]) -> PodEnd:
    """The end that explains the attempt's."""
    reference = ends.get(Role.REFERENCE)
    if reference is not None and reference.said in ("match", "mismatch"):
        return reference
    found = [ends[role] for role in (Role.REFERENCE, Role.SUSPECT) if role in ends]
    outside = [end for end in found if end.infrastructure]
    own = [end for end in found if not end.infrastructure and end.reason not in (*CONSEQUENCES, "completed")]
    return (outside or own or found)[0]


def _images(attempt: AttemptStatus) -> End | None:
    """The same tag may mean another image on each node; what the workers claim is checked with what the nodes say."""
    suspect, reference = attempt.suspect.image, attempt.reference.image
    if not suspect or not reference or suspect == reference:
        return None
    shown = ", ".join(f"{side} {i.rsplit('@', 1)[-1][:19]}" for side, i in zip(Role, (reference, suspect), strict=True))
    return End("parity:image_digest", f"the nodes run different images under one name: {shown}", infrastructure=False)


def _late(o: Observed, spec: PairRunSpec, attempt: AttemptStatus, pods: Sequence[Pod]) -> End | None:
    if attempt.running_at is None:
        cause = hopeless(pods)
        if cause is None and o.now - _since(attempt) >= spec.start_deadline_seconds:
            unmade = o.failures.get("MakeChildren")
            jobs = [job for job in o.jobs if job.attempt == attempt.number]
            cause = PodEnd("not_started", unmade, True) if unmade and not pods else not_started(pods, jobs)
        if cause is not None:
            return End(cause.reason, f"{cause.message}; both sides are removed", infrastructure=True)
        return None
    limit = spec.active_deadline_seconds
    if limit is not None and o.now - (seconds(attempt.running_at) or o.now) >= limit:
        return End("deadline", f"it ran longer than {limit} s", infrastructure=True)
    return None


def _since(attempt: AttemptStatus) -> float:
    return seconds(attempt.started_at) or 0.0


def next_deadline(o: Observed, spec: PairRunSpec, attempt: AttemptStatus) -> float | None:
    """Seconds until one of the attempt's deadlines passes; None if it has none."""
    mine = [pod for pod in o.pods if pod.attempt == attempt.number]
    if any(pod.ended for pod in mine):
        return GRACE_S / 4
    if leaving := [pod.leaves_at for pod in mine if pod.leaves_at is not None and pod.speaks]:
        return min(leaving) + LATE_S - o.now
    if attempt.running_at is None:
        left = _since(attempt) + spec.start_deadline_seconds - o.now
        # Why a pod is not made is in no object that is followed: it is asked for.
        return left if {pod.role for pod in mine} == set(Role) else min(left, ASK_S)
    if spec.active_deadline_seconds is not None:
        return (seconds(attempt.running_at) or 0.0) + spec.active_deadline_seconds - o.now
    return None


def waits_for(pods: Sequence[Pod], jobs: Sequence[Job]) -> str:
    """What a pair that does not run yet waits for, for its condition."""
    if sentence := refused(pods, jobs):
        return sentence
    for pod in pods:
        if pod.unschedulable:
            return f"the {pod.role}'s pod found no place yet: {pod.unschedulable}"
        if pod.waiting and pod.waiting not in ("ContainerCreating", "PodInitializing"):
            return f"the {pod.role}'s pod waits ({pod.waiting}): {pod.waiting_message}"
    late = [str(pod.role) for pod in pods if not pod.running]
    return f"waiting for the pods of {', '.join(late)}" if late else "waiting for the pods"
