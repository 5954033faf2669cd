"""Marks on nodes: opt-in, and taken off on every way out, an uninstall included."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.api.hands import Hands, leading
from cluster.handle import until
from tandem.kube.client import Object
from tandem.kube.paths import NODES, PAIRRUNS
from tandem.pairrun import names
from tandem_controller.release import release

pytestmark = pytest.mark.needs("api-server")


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
    sick, well = (pair.kube.get(NODES.path(None, n))["metadata"]["name"] for n in pair._nodes)

    def labels(node: str) -> dict[str, str]:
        found = pair.kube.get(NODES.path(None, node))["metadata"]["labels"]
        return {k: v for k, v in found.items() if k.startswith("tandem.dev/")}

    with leading(pair, markNodes=True):
        pair.create("gone")
        until("the marks", lambda: labels(sick) == labels(well) == {names.LABEL_SESSION: "running"})
        pair.kube.delete(PAIRRUNS.path(pair.namespace, "gone"))
        until("no marks", lambda: labels(sick) == labels(well) == {})
        until("the object to go", lambda: not _pairruns(pair))
        pair.create("check")
        pair.start()
        pair.finish(tmp_path, rows=3)
        pair.wait_for(names.FINISHED, "True")
        until("the verdict's mark", lambda: labels(sick) == {names.LABEL_VERDICT: "corrupting"})
        assert labels(well) == {}
        conditions = pair.kube.get(NODES.path(None, sick))["status"]["conditions"]
        assert ("SilentDataCorruption", "True") in [(c["type"], c["status"]) for c in conditions]
        assert ("Ready", "True") in [(c["type"], c["status"]) for c in conditions]
        until("no finalizer", lambda: not pair.get()["metadata"].get("finalizers"))


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
