"""The cluster that tests get is real: pods run on both nodes, policies hold, parts die and come back."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from cluster.handle import BareCluster, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("machines")]

SERVE = ["sh", "-c", "mkdir /tmp/w; hostname > /tmp/w/index.html; exec httpd -f -p 8080 -h /tmp/w"]
WAIT = ["sleep", "86400"]


def pod(name: str, node: str, command: list[str], **container: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "c", "image": "busybox:1", "command": command, **container}],
        },
    }


@pytest.fixture
def namespace(cluster: BareCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[:50].strip("-")
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def ready(cluster: BareCluster, namespace: str, *names: str) -> None:
    pods = [f"pod/{name}" for name in names]
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "--timeout=60s", *pods)


def fetch(cluster: BareCluster, namespace: str, client: str, url: str) -> subprocess.CompletedProcess[str]:
    # Debian's busybox crashes on `wget -T`.
    return cluster.try_kubectl("exec", "-n", namespace, client, "--", "timeout", "3", "wget", "-qO-", url)


def test_a_pod_runs_on_each_node_and_reaches_the_other_through_its_service(
    cluster: BareCluster, namespace: str
) -> None:
    """Scheduling aside: containers, addresses, routes between nodes, Services and DNS."""
    probe = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}}
    for node in cluster.nodes:
        ports = [{"port": 80, "targetPort": 8080}]
        service = {"selector": {"app": f"on-{node}"}, "ports": ports}
        cluster.apply(
            pod(f"on-{node}", node, SERVE, **probe),
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"on-{node}"}, "spec": service},
            namespace=namespace,
        )
    ready(cluster, namespace, *(f"on-{node}" for node in cluster.nodes))
    for here, there in (cluster.nodes, cluster.nodes[::-1]):
        answer = partial(fetch, cluster, namespace, f"on-{here}", f"http://on-{there}")
        until(f"on-{there} from {here}", lambda answer=answer, there=there: answer().stdout == f"on-{there}\n", 20)
    address = cluster.get("pod", "on-node-2", "-n", namespace)["status"]["podIP"]
    with cluster.forward(f"{address}:8080") as port, urllib.request.urlopen(f"http://127.0.0.1:{port}") as reply:
        assert reply.read() == b"on-node-2\n"
    assert "node-2" in cluster.enter("node-2", "hostname")


def test_a_network_policy_holds(cluster: BareCluster, namespace: str) -> None:
    """Only the peer's one port stays open: not its others, nor another pod, the API server or a kubelet."""
    cluster.apply(
        pod("client", "node-1", WAIT), pod("peer", "node-2", SERVE), pod("other", "node-2", SERVE), namespace=namespace
    )
    ready(cluster, namespace, "client", "peer", "other")
    ip = {name: cluster.get("pod", name, "-n", namespace)["status"]["podIP"] for name in ("peer", "other")}
    allowed = f"http://{ip['peer']}:8080"
    refused = [f"http://{ip['other']}:8080", "http://10.96.0.1:443", "http://10.200.0.12:10250"]

    def reaches(url: str) -> bool:
        """TLS servers answer plain HTTP with an error of theirs."""
        done = fetch(cluster, namespace, "client", url)
        return done.returncode == 0 or "HTTP/1." in done.stderr

    for url in (allowed, *refused):
        until(f"{url} before the policy", lambda url=url: reaches(url), 20)
    egress = [{"to": [{"podSelector": {"matchLabels": {"app": "peer"}}}], "ports": [{"port": 8080}]}]
    spec = {"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"], "egress": egress}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "p"}, "spec": spec}
    cluster.apply(policy, namespace=namespace)
    until("the policy", lambda: not reaches(refused[0]), 20)
    assert [url for url in (allowed, *refused) if reaches(url)] == [allowed]


def test_the_api_server_is_killed_and_comes_back_while_pods_run_on(cluster: BareCluster, namespace: str) -> None:
    cluster.apply(pod("steady", "node-1", WAIT), namespace=namespace)
    ready(cluster, namespace, "steady")
    cluster.stop("kube-apiserver")
    assert cluster.try_kubectl("get", "--raw", "/readyz", "--request-timeout=3s").returncode != 0
    cluster.start("kube-apiserver")
    until("its answer", lambda: cluster.kubectl("get", "--raw", "/readyz") == "ok")
    ready(cluster, namespace, "steady")
    assert cluster.get("pod", "steady", "-n", namespace)["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_node_without_power_is_seen_and_returns(cluster: BareCluster) -> None:
    cluster.stop("node-2")
    until("node-2 to be seen as gone", lambda: not cluster.node_is_ready("node-2"), 90)
    assert cluster.node_is_ready("node-1")
    cluster.start("node-2")
    until("node-2 to be Ready again", lambda: cluster.node_is_ready("node-2"), 90)


def test_a_silent_kubelet_is_mended_after_the_test(cluster: BareCluster) -> None:
    before = cluster.status()["kubelet@node-2"]
    cluster.stop("kubelet@node-2")
    cluster.mend()
    assert cluster.status()["kubelet@node-2"] != before
    until("node-2 to be Ready", lambda: cluster.node_is_ready("node-2"), 90)
