"""The opt-in marks on nodes, as merge patches. Pure. Report only by default: no cordon, no taint that is not ours.

Marks are labels and an annotation with Tandem's prefix and a node condition; a single clean session releases nobody.
The annotation names the run and the installation that marked last: nobody takes a mark off that is another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.pairrun import names
from tandem.pairrun.status import timestamp
from tandem.vocabulary import Verdict

WORDS = {Verdict.MISMATCH: "corrupting", Verdict.MATCH: "clean", Verdict.INCONCLUSIVE: "inconclusive"}
"""Value of the verdict label; what one run says, and no more: the node's profile needs several."""


def session_of(meta: Mapping[str, Any]) -> str | None:
    """The run whose pair runs on a node, as its metadata say; empty if they do not say which, None if none does."""
    return _marked_by(meta)[0] if names.LABEL_SESSION in (meta.get("labels") or {}) else None


def session(run_id: str, namespace: str, since: str, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """A pair runs on the node; None if another run's mark is there, which stays until that run is over.

    Args:
        run_id: of the run.
        namespace: of the installation.
        since: when its attempt began, as a timestamp: marking again changes nothing.
        meta: the node's metadata, of the version that is patched.
    """
    if session_of(meta) not in (None, "", run_id):
        return None
    last = f"{run_id} {since} {namespace}"
    labels, annotations = {names.LABEL_SESSION: "running"}, {names.ANNOTATION_LAST_RUN: last}
    return _at(meta, {"labels": labels, "annotations": annotations})


def session_over(run_id: str, verdict: str, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """A run's pair no longer runs on the node; None if there is nothing of that run to change.

    Args:
        run_id: of the run.
        verdict: what it said of the node; empty: nothing.
        meta: the node's metadata, of the version that is patched.
    """
    labels: dict[str, str | None] = {}
    if session_of(meta) in (run_id, ""):
        labels[names.LABEL_SESSION] = None
    if verdict:
        labels[names.LABEL_VERDICT] = WORDS[Verdict(verdict)]
    return _at(meta, {"labels": labels}) if labels else None


def tells(run_id: str, meta: Mapping[str, Any]) -> bool:
    """Whether a run that is over has the last word on a node: no later one has said anything since."""
    return _marked_by(meta)[0] in ("", run_id) or session_of(meta) is not None


def foreign(namespace: str, meta: Mapping[str, Any]) -> bool:
    """Whether a node's marks are those of another installation in the cluster."""
    return _marked_by(meta)[1] not in ("", namespace)


def _marked_by(meta: Mapping[str, Any]) -> tuple[str, str]:
    """Run and installation that marked a node last; empty where it does not say."""
    words = str((meta.get("annotations") or {}).get(names.ANNOTATION_LAST_RUN, "")).split()
    return (words[0] if words else ""), (words[2] if len(words) > 2 else "")


def _at(meta: Mapping[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes that the API server takes only if nobody changed the node meanwhile."""
    return {"metadata": {**changes, "resourceVersion": meta.get("resourceVersion")}}


def condition(value: str, sentence: str, now: float, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The node condition for a verdict, as a JSON patch of the status subresource: the kubelet writes the other ones.

    Args:
        value: the verdict; an inconclusive run leaves the condition Unknown unless it said something before.
        sentence: for people.
        now: UTC seconds.
        before: the node's conditions.
    """
    words = {Verdict.MISMATCH: ("True", "BitsDiffered"), Verdict.MATCH: ("False", "LastRunMatched")}
    status, reason = words.get(Verdict(value), ("Unknown", "Inconclusive"))
    known = next((c for c in before if c.get("type") == names.NODE_CONDITION), {})
    if status == "Unknown" and known.get("status") in ("True", "False"):
        status, reason, sentence = known["status"], known.get("reason", ""), known.get("message", "")
    since = known.get("lastTransitionTime") if known.get("status") == status else timestamp(now)
    new = {
        "type": names.NODE_CONDITION, "status": status, "reason": reason, "message": sentence[:500],
        "lastHeartbeatTime": timestamp(now), "lastTransitionTime": since,
    }  # fmt: skip
    places = [i for i, c in enumerate(before) if c.get("type") == names.NODE_CONDITION]
    if not places:
        return [{"op": "add", "path": "/status/conditions/-", "value": new}]
    place = f"/status/conditions/{places[0]}"
    return [
        {"op": "test", "path": f"{place}/type", "value": names.NODE_CONDITION},
        {"op": "replace", "path": place, "value": new},
    ]


def all_off() -> dict[str, Any]:
    """Nothing of Tandem's is left on the node's labels and annotations."""
    labels = dict.fromkeys((names.LABEL_SESSION, names.LABEL_VERDICT))
    return {"metadata": {"labels": labels, "annotations": {names.ANNOTATION_LAST_RUN: None}}}


def condition_off(before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the node condition, as a JSON patch of the status subresource; empty if it is not there."""
    place = next((i for i, c in enumerate(before) if c.get("type") == names.NODE_CONDITION), None)
    if place is None:
        return []
    path = f"/status/conditions/{place}"
    return [
        {"op": "test", "path": f"{path}/type", "value": names.NODE_CONDITION},
        {"op": "remove", "path": path},
    ]
