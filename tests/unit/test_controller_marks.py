"""Marks on nodes: each run's word replaces the last one's, an inconclusive run takes nothing back, and no run touches
another's session."""

from __future__ import annotations

from typing import Any

import pytest

from clusters import SETTINGS, Run, condition, kinds, node, started, told, world
from tandem.pairrun import names
from tandem.vocabulary import Role
from tandem_controller import marks
from tandem_controller import observed as do

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


# -- sessions ----------------------------------------------------------------------------------------------

MARKING = SETTINGS.model_copy(update={"mark_nodes": True})
MINE, OTHER = "run-1", "run-2"


def carrying(run: str, **labels: str) -> dict[str, Any]:
    """Metadata of a node that a run marked last."""
    last = {names.ANNOTATION_LAST_RUN: f"{run} 2027-01-15T08:00:00Z tandem"}
    return {"resourceVersion": "7", "labels": labels, "annotations": last}


RUNNING = {names.LABEL_SESSION: "running"}


def test_a_session_is_marked_once_and_never_over_another_runs() -> None:
    """Looking again writes what is there already; a node that two runs share keeps the first one's mark."""
    at = "2027-01-15T08:00:00Z"
    first = marks.session(MINE, "tandem", at, {"resourceVersion": "7"})
    assert first == {"metadata": {**carrying(MINE, **RUNNING)}}
    assert marks.session(MINE, "tandem", at, carrying(MINE, **RUNNING)) == first
    assert marks.session(MINE, "tandem", at, carrying(OTHER)) == first
    assert marks.session(MINE, "tandem", at, carrying(OTHER, **RUNNING)) is None


@pytest.mark.parametrize(
    ("meta", "verdict", "labels"),
    [
        (carrying(MINE, **RUNNING), "", {names.LABEL_SESSION: None}),
        (carrying(MINE, **RUNNING), "match", {names.LABEL_SESSION: None, names.LABEL_VERDICT: "clean"}),
        (carrying(OTHER, **RUNNING), "", None),
        (carrying(OTHER, **RUNNING), "mismatch", {names.LABEL_VERDICT: "corrupting"}),
        (carrying(MINE), "", None),
        ({"labels": RUNNING}, "", {names.LABEL_SESSION: None}),
        ({}, "match", {names.LABEL_VERDICT: "clean"}),
    ],
)
def test_a_run_takes_off_its_own_mark_and_no_other(meta: dict[str, Any], verdict: str, labels: Any) -> None:
    patch = marks.session_over(MINE, verdict, meta)
    assert (patch and patch["metadata"]["labels"]) == labels
    assert patch is None or patch["metadata"]["resourceVersion"] == meta.get("resourceVersion")


def test_a_later_runs_verdict_is_not_replaced_by_an_earlier_ones() -> None:
    """The earlier run's marks could not be written for a while."""
    assert not marks.tells(MINE, carrying(OTHER, **{names.LABEL_VERDICT: "clean"}))
    assert marks.tells(MINE, carrying(OTHER, **RUNNING))
    assert marks.tells(MINE, carrying(MINE))


def marked(run: Run, *nodes: str, by: str = "") -> None:
    """What the next look sees on the nodes."""
    run.observed["sessions"] = dict.fromkeys(nodes, by or str(run.look().run_id))


def test_nodes_are_marked_while_an_attempt_goes_on_and_again_if_the_mark_is_lost() -> None:
    run = started(settings=MARKING)
    assert do.MarkNodes(("sick", "well")) in run.plan(after=1).actions
    marked(run, "sick", "well")
    assert run.plan(after=1).actions == ()
    marked(run, "sick")
    assert run.plan(after=1).actions == (do.MarkNodes(("well",)),)
    run.observed["settings"] = SETTINGS
    assert run.plan(after=1).actions == ()


@pytest.mark.parametrize("how", ["suspended", "evicted"])
def test_marks_go_when_the_attempt_ends(how: str) -> None:
    """And stay away in the back-off, or as long as the suspension lasts."""
    run = started(settings=MARKING)
    marked(run, "sick", "well")
    if how == "suspended":
        run.obj["spec"]["suspend"] = True
    else:
        run.change(Role.SUSPECT, phase="Failed", reason="Evicted")
        run.exit(Role.REFERENCE, 42, told("dead_peer"))
    assert do.UnmarkNodes(("sick", "well")) in run.plan(after=1).actions
    run.pods, run.jobs = [], []
    run.stored(1, state="closed")
    marked(run)
    assert "MarkNodes" not in kinds(run.plan(after=1))


@pytest.mark.parametrize(
    ("spec", "said"),
    [({}, "mismatch"), ({"workload": {"fault": "node-11"}}, ""), ({"workload": {"model": "huge"}}, "")],
    ids=["real", "synthetic", "unreadable"],
)
def test_only_a_run_without_an_injected_fault_says_something_of_its_node(spec: dict[str, Any], said: str) -> None:
    """A synthetic run's findings are its own. Of a spec that an upgrade made unreadable nobody knows what it was."""
    run = started({} if "model" in str(spec) else spec, settings=MARKING)
    run.stored(1, state="closed")
    run.judge("mismatch")
    run.plan(after=1)
    run.obj["spec"] |= spec
    run.obj["metadata"]["finalizers"] = [names.FINALIZER]
    assert do.UnmarkNodes(("sick", "well"), "sick", said) in run.plan(after=1).actions


def test_another_runs_mark_on_a_former_reference_stays() -> None:
    nodes = world(node("sick", cordoned=True), node("well"), node("well-2"))
    run = started(settings=MARKING, nodes=nodes)
    run.obj["spec"]["suspend"] = True
    run.observed["sessions"] = {"sick": str(run.look().run_id), "well": OTHER, "well-2": ""}
    assert [a for a in run.plan(after=1).actions if isinstance(a, do.UnmarkNodes)] == [do.UnmarkNodes(("sick",))]


def test_what_is_refused_is_told_in_every_state_of_a_run_until_it_is_done() -> None:
    run = started()
    assert condition(run, names.REFUSED) == ("", "")
    run.observed["failures"] = {"MarkNodes": "not allowed to patch nodes"}
    run.plan(after=1)
    assert condition(run, names.REFUSED) == ("True", "MarkNodes")
    run.observed["failures"] = {"DeleteSelf": "not allowed to delete pairruns"}
    run.judge("match")
    run.plan(after=1)
    run.plan(after=1)
    assert condition(run, names.FINISHED)[0] == condition(run, names.REFUSED)[0] == "True"
    run.obj["metadata"]["deletionTimestamp"] = "2027-01-15T08:10:00Z"
    run.observed["failures"] = {"UnmarkNodes": "not allowed to patch nodes"}
    run.plan(after=1)
    assert condition(run, names.REFUSED) == ("True", "UnmarkNodes")
    run.observed["failures"] = {}
    run.plan(after=1)
    assert condition(run, names.REFUSED) == ("False", "NothingRefused")
