"""The node condition: each run's word replaces the last one's, and an inconclusive run takes nothing back."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.pairrun import names
from tandem_controller import marks

READY = {"type": "Ready", "status": "True"}


def applied(before: list[dict[str, Any]], patch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A JSON patch of add, test, replace and remove at the places that `marks` uses."""
    after = [dict(c) for c in before]
    for step in patch:
        place = step["path"].removeprefix("/status/conditions/").split("/")
        if step["op"] == "add":
            after.append(step["value"])
        elif step["op"] == "test":
            assert after[int(place[0])][place[1]] == step["value"]
        elif step["op"] == "replace":
            after[int(place[0])] = step["value"]
        else:
            del after[int(place[0])]
    return after


def stand(conditions: list[dict[str, Any]]) -> str:
    return next((str(c["status"]) for c in conditions if c["type"] == names.NODE_CONDITION), "none")


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (["mismatch"], "True"),
        (["match"], "False"),
        (["inconclusive"], "Unknown"),
        (["mismatch", "match"], "False"),
        (["match", "mismatch"], "True"),
        (["mismatch", "inconclusive"], "True"),
        (["match", "inconclusive"], "False"),
        (["inconclusive", "match"], "False"),
    ],
)
def test_situation_29_the_condition_has_a_way_back(verdicts: list[str], status: str) -> None:
    """A later match takes it back, and so does an uninstall; an inconclusive run does not."""
    conditions = [dict(READY)]
    for at, verdict in enumerate(verdicts):
        conditions = applied(conditions, marks.condition(verdict, "as told", 1.8e9 + at, conditions))
    assert stand(conditions) == status
    assert conditions[0] == READY
    assert applied(conditions, marks.condition_off(conditions)) == [READY]


def test_the_condition_keeps_the_time_of_its_last_change() -> None:
    first = applied([READY], marks.condition("mismatch", "one", 1.8e9, [READY]))
    second = applied(first, marks.condition("mismatch", "two", 1.8e9 + 60, first))
    assert second[1]["lastTransitionTime"] == first[1]["lastTransitionTime"]
    assert second[1]["lastHeartbeatTime"] != first[1]["lastHeartbeatTime"]
