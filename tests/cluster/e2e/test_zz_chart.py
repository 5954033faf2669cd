"""The chart on a real cluster: its own test, and what an uninstall leaves. Last, since it removes the installation."""

from __future__ import annotations

import json
import tarfile
from typing import Any

import pytest

from cluster.e2e.installation import NAMESPACE, Tandem
from cluster.handle import BareCluster, until
from cluster.images import installed_images
from tandem import __version__

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


@pytest.mark.parametrize("service", ["controller", "api", "worker"])
def test_the_images_say_what_they_are_and_never_run_as_root(machines: BareCluster, service: str) -> None:
    """Read from the archives that the nodes were given: labels by which an SBOM names them, their user, their parts."""
    (archive,) = [path for path in installed_images() if path.name.startswith(f"{service}-")]
    with tarfile.open(archive) as tar:

        def read(name: str) -> Any:
            member = tar.extractfile(name)
            assert member is not None
            return json.load(member)

        config = read(read("manifest.json")[0]["Config"])["config"]
    assert config["User"] == "65532:65532"
    label = "org.opencontainers.image."
    labels = {k.removeprefix(label): v for k, v in config["Labels"].items() if k.startswith(label)}
    assert labels["title"] == f"tandem-{service}"
    assert {"description", "licenses", "revision", "source", "version", "base.name"} <= set(labels)
    assert labels["version"] == __version__
    assert not any("SECRET" in line or "TOKEN" in line for line in config["Env"])
