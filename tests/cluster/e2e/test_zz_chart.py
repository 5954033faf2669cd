"""The chart on a real cluster: its own test, and what an uninstall leaves. Last, since it removes the installation."""

from __future__ import annotations

import pytest

from cluster.e2e.installation import NAMESPACE, Tandem
from cluster.handle import until

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.slow, pytest.mark.timeout(1800)]
KINDS = (
    "clusterroles,clusterrolebindings,priorityclasses,validatingadmissionpolicies,mutatingwebhookconfigurations,"
    "validatingwebhookconfigurations"
)


def test_helm_test_asks_the_api_and_runs_a_null_pair(tandem: Tandem) -> None:
    words = ("test", "tandem", "--namespace", NAMESPACE, "--timeout", "10m")
    done = tandem.cluster.try_run("helm", *words, timeout=700)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    for line in ("POST /v1/runs of a viewer: 403", "GET /v1/nodes of a viewer: 200", "match: 0 of"):
        assert line in said, said


def test_uninstall_leaves_nothing_but_what_keep_says(tandem: Tandem) -> None:
    """The CRD stays (crds.keep), and nothing else: in the namespace, in the cluster, on the nodes."""
    cluster = tandem.cluster
    marks = [
        key for node in cluster.get("nodes")["items"]
        for key in (*node["metadata"].get("labels", {}), *node["metadata"].get("annotations", {}))
        if key.startswith("tandem.dev/")
    ]  # fmt: skip
    assert marks == []
    tandem.uninstall()
    kinds = "all,secrets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,pvc,leases,poddisruptionbudgets"

    def left() -> list[str]:
        found = cluster.kubectl("get", kinds, "--namespace", NAMESPACE, "-o", "name").split()
        found += [n for n in cluster.kubectl("get", KINDS, "-o", "name").split() if "tandem" in n]
        ours = ("kube-root-ca.crt", "serviceaccount/default")
        return [name for name in found if not name.endswith(ours)]

    def empty() -> bool:
        found = left()
        assert found == []
        return found == []

    until("an empty namespace", empty, 60)
    assert "pairruns.tandem.dev" in cluster.kubectl("get", "crds", "-o", "name")
