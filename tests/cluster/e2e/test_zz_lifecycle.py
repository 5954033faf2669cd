"""A whole life of an installation around a live pair. After the chart's own tests, since it takes their one away."""

from __future__ import annotations

import pytest

from cluster.e2e.installation import NAMESPACE, Tandem
from cluster.e2e.snapshots import snapshot
from cluster.handle import BareCluster, until
from cluster.outside import Outside
from tandem.pairrun import names

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.slow, pytest.mark.timeout(1800)]


def test_an_upgrade_a_rollback_and_an_uninstall_around_a_live_pair_leave_an_empty_diff(tandem: Tandem) -> None:
    """Installed again beside the CRD that was kept, with marks on nodes. A rollback takes away what the upgrade
    brought, and brings back what that took; the pair goes on through both; an uninstall ends it and takes its marks
    off. Then the cluster holds the objects of every kind that it held before, and no other, and its nodes are as they
    were.
    """
    cluster = tandem.cluster
    tandem.uninstall()
    until("nothing of the pairs", lambda: not cluster.get("pods", "--namespace", NAMESPACE)["items"], 300)
    once = "controller.markNodes=true,database.trial.persistence.enabled=false,worker.recordsTimeoutSeconds=20"
    later = "controller.replicas=2,metrics.service=false,metrics.dashboards.enabled=true"
    before = snapshot(cluster)
    tandem.helm("install", "--set", once)
    installed = release(cluster)
    with tandem.quarantined():
        tandem.create("live", workload={"durationSeconds": 1200, "selfReplays": 2})
        tandem.stepping("live")
        until("the marks", lambda: marked(cluster) == set(cluster.nodes))
        tandem.helm("upgrade", "--set", f"{once},{later}")
        upgraded = release(cluster)
        assert any(name.startswith("ConfigMap/tandem-dashboard") for name in upgraded - installed), upgraded - installed
        assert "Service/tandem-controller-metrics" in installed - upgraded
        tandem.goes_on("live")
        cluster.helm("rollback", "tandem", "1", "--namespace", NAMESPACE, "--wait", "--timeout", "5m", timeout=400)
        until("what was installed", lambda: release(cluster) == installed)
        controller = cluster.get("deployment", "tandem-controller", "--namespace", NAMESPACE)
        assert controller["spec"]["replicas"] == 1
        tandem.goes_on("live")
        assert marked(cluster) == set(cluster.nodes)
        tandem.uninstall()
        assert marked(cluster) == set()

    def same() -> bool:
        now = snapshot(cluster)
        assert (now - before, before - now) == (set(), set())
        return now == before

    until("an empty diff", same, 300)


def release(cluster: BareCluster | Outside) -> set[str]:
    """What the chart made in its namespace: that which carries its label."""
    kinds = "deployments,statefulsets,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,pdb"
    found = cluster.get(kinds, "--namespace", NAMESPACE, "-l", "app.kubernetes.io/managed-by=Helm")["items"]
    return {f"{item['kind']}/{item['metadata']['name']}" for item in found}


def marked(cluster: BareCluster | Outside) -> set[str]:
    """Nodes with any of Tandem's marks."""
    found = set()
    for node in cluster.get("nodes")["items"]:
        meta = node["metadata"]
        words = [*(meta.get("labels") or {}), *(meta.get("annotations") or {})]
        words += [c["type"] for c in node["status"]["conditions"] if c["type"] == names.NODE_CONDITION]
        if any(word.startswith("tandem.dev/") or word == names.NODE_CONDITION for word in words):
            found.add(meta["name"])
    return found
