"""The opt-in marks on nodes, as merge patches. Pure. Report only by default: no cordon, no taint that is not ours.

Marks are labels and an annotation with Tandem's prefix and a node condition; a single clean session releases nobody.
"""

from __future__ import annotations

from typing import Any

from tandem.pairrun import names
from tandem.pairrun.status import timestamp
from tandem.vocabulary import Verdict

WORDS = {Verdict.MISMATCH: "corrupting", Verdict.MATCH: "clean", Verdict.INCONCLUSIVE: "inconclusive"}
"""Value of the verdict label; what one run says, and no more: the node's profile needs several."""


def session(run_id: str, now: float) -> dict[str, Any]:
    """A pair runs on the node."""
    last = f"{run_id} {timestamp(now)}"
    return {"metadata": {"labels": {names.LABEL_SESSION: "running"}, "annotations": {names.ANNOTATION_LAST_RUN: last}}}


def session_over() -> dict[str, Any]:
    """It no longer does: null removes a label, whoever set it."""
    return {"metadata": {"labels": {names.LABEL_SESSION: None}}}


def verdict(value: str) -> dict[str, Any]:
    """What the last run said of the suspect."""
    return {"metadata": {"labels": {names.LABEL_SESSION: None, names.LABEL_VERDICT: WORDS[Verdict(value)]}}}


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
