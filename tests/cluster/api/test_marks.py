"""Marks on nodes: opt-in, and taken off on every way out, an uninstall included."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.api.hands import Hands, leading
from cluster.api.rights import granted
from cluster.handle import until
from tandem.errors import SetupError
from tandem.kube.client import Object
from tandem.kube.paths import NODES, PAIRRUNS
from tandem.pairrun import names
from tandem.vocabulary import Role
from tandem_controller.release import release

pytestmark = [pytest.mark.needs("api-server"), pytest.mark.needs("helm")]
SESSION = {names.LABEL_SESSION: "running"}
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}


def labels(pair: Hands, node: str) -> dict[str, str]:
    """Tandem's own on a node."""
    found = pair.kube.get(NODES.path(None, node))["metadata"]["labels"]
    return {k: v for k, v in found.items() if k.startswith("tandem.dev/")}


def test_nodes_are_only_read_unless_marks_are_asked_for(pair: Hands, tmp_path: Path) -> None:
    before = {n: pair.kube.get(NODES.path(None, n))["metadata"] for n in pair._nodes}
    with leading(pair):
        pair.create()
        pair.start()
        pair.finish(tmp_path)
        pair.wait_for(names.FINISHED, "True")
    for name, meta in before.items():
        now = pair.kube.get(NODES.path(None, name))["metadata"]
        assert (now.get("labels"), now.get("annotations")) == (meta.get("labels"), meta.get("annotations"))


def test_situation_26_marks_are_opt_in_and_taken_off_on_every_way_out(pair: Hands, tmp_path: Path) -> None:
    sick, well = pair._nodes
    with leading(pair, markNodes=True):
        pair.create("gone")
        until("the marks", lambda: labels(pair, sick) == labels(pair, well) == SESSION)
        pair.kube.delete(PAIRRUNS.path(pair.namespace, "gone"))
        until("no marks", lambda: labels(pair, sick) == labels(pair, well) == {})
        until("the object to go", lambda: not _pairruns(pair))
        pair.create("check")
        pair.start()
        pair.finish(tmp_path, rows=3)
        pair.wait_for(names.FINISHED, "True")
        until("the verdict's mark", lambda: labels(pair, sick) == {names.LABEL_VERDICT: "corrupting"})
        assert labels(pair, well) == {}
        conditions = pair.kube.get(NODES.path(None, sick))["status"]["conditions"]
        assert ("SilentDataCorruption", "True") in [(c["type"], c["status"]) for c in conditions]
        assert ("Ready", "True") in [(c["type"], c["status"]) for c in conditions]
        until("no finalizer", lambda: not pair.get()["metadata"].get("finalizers"))


def test_a_synthetic_run_says_nothing_of_a_healthy_node(pair: Hands, tmp_path: Path) -> None:
    """Its faults were injected; what it finds is its own."""
    sick, well = pair._nodes
    with leading(pair, markNodes=True):
        pair.create(workload={"fault": "node-11"})
        pair.start()
        until("the marks", lambda: labels(pair, sick) == labels(pair, well) == SESSION)
        pair.finish(tmp_path, rows=3)
        pair.wait_for(names.FINISHED, "True", "Mismatch")
        until("no finalizer", lambda: not pair.get()["metadata"].get("finalizers"))
        assert labels(pair, sick) == labels(pair, well) == {}
        conditions = pair.kube.get(NODES.path(None, sick))["status"]["conditions"]
        assert names.NODE_CONDITION not in [c["type"] for c in conditions]


def test_between_attempts_nothing_runs_and_no_node_says_so(pair: Hands) -> None:
    """An attempt that ended, its back-off, and a suspension."""
    sick, well = pair._nodes
    with leading(pair, markNodes=True):
        pair.create(retry={"backoffSeconds": 1})
        pair.start()
        pair.wait_for(names.RUNNING, "True")
        until("the marks", lambda: labels(pair, sick) == labels(pair, well) == SESSION)
        pair.kube.patch(PAIRRUNS.path(pair.namespace, "check"), {"spec": {"suspend": True}})
        until("no marks", lambda: labels(pair, sick) == labels(pair, well) == {})
        assert pair.condition(names.RUNNING) == ("False", "Suspended")
        pair.kube.patch(PAIRRUNS.path(pair.namespace, "check"), {"spec": {"suspend": False}})
        pair.start(2)
        until("the marks again", lambda: labels(pair, sick) == labels(pair, well) == SESSION)
        pair.kube.patch(NODES.path(None, well), {"spec": {"unschedulable": True}})  # there will be no third attempt
        pair.set_pod(Role.SUSPECT, EVICTED, 2)
        pair.exit(Role.REFERENCE, 42, attempt=2)
        until("no marks", lambda: labels(pair, sick) == labels(pair, well) == {})
        assert not pair.status().holds(names.FINISHED)


def test_a_reference_that_another_run_took_keeps_that_runs_mark(pair: Hands) -> None:
    """The first run's attempt ended; while it waits for the next, another pair runs on its former reference."""
    sick, well = pair._nodes
    other = pair.node("sick-2", cordoned=True)
    with leading(pair, markNodes=True):
        pair.create("first", suspect={"nodeName": sick}, retry={"backoffSeconds": 600})
        pair.start(name="first")
        pair.wait_for(names.RUNNING, "True", name="first")
        pair.set_pod(Role.SUSPECT, EVICTED, name="first")
        pair.exit(Role.REFERENCE, 42, name="first")
        pair.wait_for(names.PAIRED, "False", "BackOff", name="first")
        pair.create("second", suspect={"nodeName": other})
        pair.wait_for(names.PAIRED, "True", name="second")
        until("the second run's marks", lambda: labels(pair, other) == labels(pair, well) == SESSION)
        mark = pair.kube.get(NODES.path(None, well))["metadata"]["annotations"][names.ANNOTATION_LAST_RUN]
        assert mark.split()[0] == str(pair.run_id("second"))
        pair.kube.delete(PAIRRUNS.path(pair.namespace, "first"))
        until("the first to go", lambda: [o["metadata"]["name"] for o in _pairruns(pair)] == ["second"])
        assert labels(pair, sick) == {}
        assert labels(pair, other) == labels(pair, well) == SESSION


def test_marks_that_may_not_be_taken_off_hold_the_object_and_say_so(pair: Hands) -> None:
    """`controller.markNodes` was switched off, and the right with it: marks that nobody answers for would stay."""
    sick, well = pair._nodes
    with granted(pair, mark_nodes=True) as rights:
        with leading(pair, kube=rights.kube, markNodes=True):
            pair.create()
            until("the marks", lambda: labels(pair, sick) == labels(pair, well) == SESSION)
        rights.set(without=["patch nodes"])
        with leading(pair, kube=rights.kube, token=2):
            pair.kube.delete(PAIRRUNS.path(pair.namespace, "check"))
            message = pair.wait_for(names.REFUSED, "True", "UnmarkNodes")
            assert "patch nodes in the whole cluster" in message
            assert pair.get()["metadata"]["finalizers"] == [names.FINALIZER]
            assert labels(pair, sick) == SESSION
            with pytest.raises(SetupError, match="patch nodes"):
                release(rights.kube, pair.namespace, patience_s=0.0)
            assert pair.get()["metadata"]["finalizers"] == [names.FINALIZER]
            rights.set()
            until("the object to go", lambda: not _pairruns(pair))
            assert labels(pair, sick) == labels(pair, well) == {}


def test_a_node_that_may_not_be_marked_is_told_and_the_run_goes_on(pair: Hands, tmp_path: Path) -> None:
    with (
        granted(pair, mark_nodes=True, without=["patch nodes"]) as rights,
        leading(pair, kube=rights.kube, markNodes=True),
    ):
        pair.create()
        pair.start()
        assert "patch nodes" in pair.wait_for(names.REFUSED, "True", "MarkNodes")
        pair.wait_for(names.RUNNING, "True")
        rights.set()
        pair.wait_for(names.REFUSED, "False", "NothingRefused")
        until("the marks", lambda: all(labels(pair, node) == SESSION for node in pair._nodes))
        pair.finish(tmp_path)
        pair.wait_for(names.FINISHED, "True", "Match")


def test_an_uninstall_leaves_the_marks_of_another_installation(pair: Hands) -> None:
    sick, _ = pair._nodes
    mark = {names.ANNOTATION_LAST_RUN: "0a1b2c3d 2027-01-15T08:00:00Z elsewhere"}
    meta = {"labels": {names.LABEL_VERDICT: "corrupting"}, "annotations": mark}
    pair.kube.patch(NODES.path(None, sick), {"metadata": meta})
    release(pair.kube, pair.namespace)
    assert labels(pair, sick) == {names.LABEL_VERDICT: "corrupting"}


@pytest.mark.parametrize("alive", [True, False])
def test_an_uninstall_ends_live_pairs_and_leaves_no_mark_on_any_node(pair: Hands, tmp_path: Path, alive: bool) -> None:
    """With the controller at its side, or long after it died; a finished PairRun stays, and can be deleted."""
    before = {n: pair.kube.get(NODES.path(None, n)) for n in pair._nodes}
    with leading(pair, markNodes=True):
        pair.create("done")
        pair.start(name="done")
        pair.finish(tmp_path, rows=3, name="done")
        pair.wait_for(names.FINISHED, "True", name="done")
        pair.create("live", suspect={"nodeName": f"sick-{pair.namespace}"})
        pair.wait_for(names.PAIRED, "True", name="live")
        until("the finalizer", lambda: pair.get("live")["metadata"].get("finalizers"))
        if alive:
            release(pair.kube, pair.namespace)
    if not alive:
        release(pair.kube, pair.namespace, patience_s=0.0)
    for name, was in before.items():
        now = pair.kube.get(NODES.path(None, name))
        assert now["metadata"].get("labels") == was["metadata"].get("labels")
        assert names.ANNOTATION_LAST_RUN not in (now["metadata"].get("annotations") or {})
        assert {c["type"] for c in now["status"]["conditions"]} == {c["type"] for c in was["status"]["conditions"]}
    until("no live PairRun", lambda: [o["metadata"]["name"] for o in _pairruns(pair)] == ["done"])
    pair.kube.delete(PAIRRUNS.path(pair.namespace, "done"))
    until("none at all", lambda: not _pairruns(pair))


def _pairruns(pair: Hands) -> list[Object]:
    return pair.kube.list(PAIRRUNS.path(pair.namespace)).items
