"""Pods and Jobs of a pair from their API objects. Pure; what is missing or malformed counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.pairrun import names
from tandem.pairrun.status import seconds
from tandem.vocabulary import Role
from tandem_controller.manifests import CONTAINER
from tandem_controller.observed import Job, Pod

Object = Mapping[str, Any]


def owner_uid(obj: Object) -> str | None:
    """UID of the PairRun that controls an object; None if none does."""
    for owner in (obj.get("metadata") or {}).get("ownerReferences") or []:
        if owner.get("kind") == names.KIND and str(owner.get("apiVersion", "")).startswith(f"{names.GROUP}/"):
            return str(owner.get("uid"))
    return None


def pair_uid(obj: Object) -> str | None:
    """UID of the PairRun that a pod of a pair belongs to: its owner is a Job, so its label says so."""
    label = _labels(obj).get(names.LABEL_PAIR, "")
    uid, _, attempt = label.rpartition("-")
    return uid if uid and attempt.isdigit() else None


def attempt_of(obj: Object) -> int | None:
    """Number of the attempt that an object belongs to."""
    text = _labels(obj).get(names.LABEL_ATTEMPT, "")
    return int(text) if text.isdigit() else None


def role_of(obj: Object) -> Role | None:
    try:
        return Role(_labels(obj).get(names.LABEL_ROLE, ""))
    except ValueError:
        return None


def pod_from(obj: Object) -> Pod | None:
    """A pod of a pair; None for any other."""
    role, attempt = role_of(obj), attempt_of(obj)
    if role is None or attempt is None:
        return None
    meta, spec, status = (obj.get(part) or {} for part in ("metadata", "spec", "status"))
    container: Object = next((c for c in status.get("containerStatuses") or [] if c.get("name") == CONTAINER), {})
    state = container.get("state") or {}
    waiting, ended, running = (state.get(kind) or {} for kind in ("waiting", "terminated", "running"))
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled") or {}
    disrupted = conditions.get("DisruptionTarget") or {}
    return Pod(
        name=str(meta.get("name", "")), role=role, attempt=attempt, node=str(spec.get("nodeName") or ""),
        phase=str(status.get("phase") or "Pending"), reason=str(status.get("reason") or ""),
        message=_line(status.get("message")),
        waiting=str(waiting.get("reason") or ""), waiting_message=_line(waiting.get("message")),
        exit_code=ended.get("exitCode"), exit_reason=str(ended.get("reason") or ""),
        exit_message=str(ended.get("message") or ""),
        started_at=seconds(running.get("startedAt") or ended.get("startedAt")),
        ended_at=seconds(ended.get("finishedAt")),
        image_id=str(container.get("imageID") or ""), leaves_at=seconds(meta.get("deletionTimestamp")),
        unschedulable=_line(scheduled.get("message")) if scheduled.get("reason") == "Unschedulable" else "",
        disrupted=str(disrupted.get("reason") or "") if disrupted.get("status") == "True" else "",
    )  # fmt: skip


def job_from(obj: Object) -> Job | None:
    """A Job of a pair; None for any other."""
    role, attempt = role_of(obj), attempt_of(obj)
    if role is None or attempt is None:
        return None
    meta, spec, status = (obj.get(part) or {} for part in ("metadata", "spec", "status"))
    deadline = spec.get("activeDeadlineSeconds")
    failed: Object = next(
        (c for c in status.get("conditions") or [] if c.get("type") == "Failed" and c.get("status") == "True"), {}
    )
    return Job(
        name=str(meta.get("name", "")), role=role, attempt=attempt, failed=str(failed.get("reason") or ""),
        failed_message=_line(failed.get("message")), leaving=bool(meta.get("deletionTimestamp")),
        deadline=deadline if isinstance(deadline, int) else None,
    )  # fmt: skip


def _labels(obj: Object) -> dict[str, str]:
    return (obj.get("metadata") or {}).get("labels") or {}


def _line(text: Any) -> str:
    return " ".join(str(text or "").split())[:500]
