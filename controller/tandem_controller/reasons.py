"""Named reasons for how a pod ended, infrastructure kept apart from findings. Pure.

A finding is only what the workers' records say. Whatever ends a pod from outside (eviction, a lost node, an image that
cannot be had) says nothing about the node's arithmetic, and is tried again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.vocabulary import POD_EXIT_INCONCLUSIVE, POD_EXIT_MATCH, POD_EXIT_MISMATCH
from tandem_controller.observed import Job, Pod

REGULAR = {POD_EXIT_MATCH: "match", POD_EXIT_MISMATCH: "mismatch", POD_EXIT_INCONCLUSIVE: "inconclusive"}

WAITING = {
    "ImagePullBackOff": "image_pull",
    "ErrImagePull": "image_pull",
    "InvalidImageName": "image_name",
    "ErrImageNeverPull": "image_absent",
    "CreateContainerConfigError": "container_config",
    "CreateContainerError": "container_create",
    "RunContainerError": "container_run",
}
"""Why a container waits -> our reason."""

HOPELESS = ("InvalidImageName", "ErrImageNeverPull")
"""Waits that no time mends."""

ADMISSION = {
    "UnexpectedAdmissionError": "unexpected_admission",
    "OutOfcpu": "node_full",
    "OutOfmemory": "node_full",
    "OutOfpods": "node_full",
    "NodeAffinity": "node_changed",
    "NodeShutdown": "node_shutdown",
    "Terminated": "node_shutdown",
    "Shutdown": "node_shutdown",
    "Evicted": "evicted",
    "NodeLost": "node_lost",
    "DeadlineExceeded": "deadline",
    "Preempting": "preempted",
}
"""Reason in a failed pod's status -> our reason."""

DISRUPTED = {
    "EvictionByEvictionAPI": "evicted",
    "DeletionByTaintManager": "evicted_by_taint",
    "PreemptionByScheduler": "preempted",
    "PreemptionByKubeScheduler": "preempted",
    "DeletionByPodGC": "node_lost",
    "TerminationByKubelet": "evicted",
}
"""Reason of the condition DisruptionTarget -> our reason."""

FINAL = frozenset({
    "parity", "parity_missing", "collective_order", "input", "setup", "protocol", "reference_differs", "image_name",
})  # fmt: skip
"""Reasons that the next attempt would meet again."""

WORKER = re.compile(r"[a-z][a-z0-9_]{0,60}(:[\w.,;\[\] -]{1,120})?")


@dataclass(frozen=True, slots=True)
class PodEnd:
    """How a pod ended."""

    reason: str
    """Stable snake_case name; ``completed`` where the worker reached its end."""
    message: str
    infrastructure: bool
    said: str = ""
    """``match``, ``mismatch`` or ``inconclusive``: the worker itself ended with that exit code."""


def final(reason: str) -> bool:
    """Whether another attempt would end the same way."""
    return reason.split(":", 1)[0] in FINAL


def pod_end(pod: Pod) -> PodEnd | None:
    """How a pod ended; None while it has not."""
    if pod.exit_code in REGULAR:
        return _said(REGULAR[pod.exit_code], pod.exit_message)
    where = f"the {pod.role}'s pod on {pod.node}" if pod.node else f"the {pod.role}'s pod"
    if pod.disrupted in DISRUPTED and not pod.speaks:
        return PodEnd(DISRUPTED[pod.disrupted], f"{where}: {pod.message or pod.disrupted}", infrastructure=True)
    if pod.reason in ADMISSION or (pod.phase == "Failed" and pod.reason.startswith("OutOf")):
        # OutOfnvidia.com/gpu and the like: the device went between scheduling and admission.
        reason = ADMISSION.get(pod.reason, "device_gone")
        return PodEnd(reason, f"{where}: {pod.message or pod.reason}", infrastructure=True)
    if pod.exit_reason == "OOMKilled":
        message = f"{where} needed more memory than its limit: raise resources.memory"
        return PodEnd("oom_killed", message, infrastructure=True)
    if pod.exit_code is not None:
        return _exited(pod, where)
    if pod.phase in ("Failed", "Succeeded"):
        return PodEnd("pod_failed", f"{where}: {pod.message or pod.reason or pod.phase}", infrastructure=True)
    return None


def _said(verdict: str, message: str) -> PodEnd:
    """The worker's own end: regular, or with the reason that it named."""
    told = told_by_worker(message)
    if verdict == "inconclusive" and told is not None:
        return PodEnd(told[0], told[1], infrastructure=False, said=verdict)
    return PodEnd("completed", told[1] if told else "", infrastructure=False, said=verdict)


def _exited(pod: Pod, where: str) -> PodEnd:
    told = told_by_worker(pod.exit_message)
    if told is not None:
        return PodEnd(told[0], told[1], infrastructure=False)
    signals = {137: "killed", 143: "terminated", 139: "crashed", 134: "crashed"}
    assert pod.exit_code is not None
    reason = signals.get(pod.exit_code, "crashed")
    tail = " ".join(pod.exit_message.split())[-200:]
    return PodEnd(
        f"{pod.role}_{reason}", f"{where} ended with exit code {pod.exit_code}" + (f": {tail}" if tail else ""),
        infrastructure=reason != "crashed",
    )  # fmt: skip


def told_by_worker(message: str) -> tuple[str, str] | None:
    """Reason and message that a worker left as its termination message; None if it left none that can be read.

    The suspect is untrusted: what is no stable name is not taken.
    """
    try:
        values = json.loads(message)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("reason"), str):
        return None
    if not WORKER.fullmatch(values["reason"]):
        return None
    text = " ".join(str(values.get("message", "")).split())[:500]
    return values["reason"], "".join(c if c.isprintable() else "?" for c in text)


def job_end(job: Job) -> PodEnd | None:
    """How a Job without a pod to look at ended: from its Failed condition."""
    if not job.failed:
        return None
    found = re.search(r"exit code (\d+)", job.failed_message)
    if found and int(found[1]) in REGULAR:
        return _said(REGULAR[int(found[1])], "")
    if job.failed == "DeadlineExceeded":
        return PodEnd("deadline", f"the {job.role}'s Job ran longer than activeDeadlineSeconds", infrastructure=True)
    return PodEnd("pod_failed", f"the {job.role}'s Job: {job.failed_message or job.failed}", infrastructure=True)


def refused(pods: Sequence[Pod], jobs: Sequence[Job]) -> str:
    """Which pod could not be made, and why; empty if none was refused."""
    there = {pod.role for pod in pods}
    return next(
        (f"the {j.role}'s pod was not made: {j.refused}" for j in jobs if j.refused and j.role not in there), ""
    )


def not_started(pods: Sequence[Pod], jobs: Sequence[Job]) -> PodEnd:
    """Why a pair did not run by its start deadline: the first pod that waits, with what it waits for."""
    if sentence := refused(pods, jobs):
        return PodEnd("pod_refused", sentence, True)
    for pod in pods:
        if pod.unschedulable:
            return PodEnd("unschedulable", f"the {pod.role}'s pod found no place: {pod.unschedulable}", True)
        if pod.waiting in WAITING:
            where = f"the {pod.role}'s pod on {pod.node}"
            return PodEnd(WAITING[pod.waiting], f"{where} waits ({pod.waiting}): {pod.waiting_message}", True)
    waiting = [pod for pod in pods if not pod.running]
    for pod in waiting:
        what = pod.waiting or pod.phase
        return PodEnd("not_started", f"the {pod.role}'s pod on {pod.node or 'no node'} did not start ({what})", True)
    return PodEnd("not_started", "the pods were not made", True)


def hopeless(pods: Sequence[Pod]) -> PodEnd | None:
    """A wait that no time mends, found before the deadline."""
    for pod in pods:
        if pod.waiting in HOPELESS:
            where = f"the {pod.role}'s pod on {pod.node}"
            return PodEnd(WAITING[pod.waiting], f"{where}: {pod.waiting}: {pod.waiting_message}", True)
    return None
