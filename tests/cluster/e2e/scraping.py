"""A real Prometheus in a pod of the cluster: it finds its targets by the cluster's API, as the chart's monitors say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from chart.rendering import CHART, parse
from cluster.e2e.installation import NAMESPACE, OURS
from cluster.forwarded import forwarded
from cluster.handle import BareCluster
from monitors import scrape_configs
from prometheus import Prometheus

MONITORING = "monitoring"
ON = ("--set", "metrics.podMonitor.enabled=true,metrics.serviceMonitor.enabled=true")


@contextmanager
def prometheus_in(cluster: BareCluster) -> Iterator[Prometheus]:
    """Debian's Prometheus, this machine's own program; it may look at pods, Services and their endpoints, no more."""
    for kind, body in _objects(cluster):
        if kind == "namespace":
            cluster.kubectl("create", "namespace", body)
        else:
            cluster.apply(body, namespace=kind)
    try:
        cluster.kubectl("wait", "pod/prometheus", "-n", MONITORING, "--for=condition=Ready", "--timeout=120s")
        with forwarded(cluster, MONITORING, "pod/prometheus", 9090) as port:
            yield Prometheus(port)
    finally:
        for what in ("role/prometheus", "rolebinding/prometheus"):
            cluster.kubectl("delete", what, "-n", NAMESPACE)
        cluster.kubectl("delete", "namespace", MONITORING, "--wait=false")


def _monitors(cluster: BareCluster) -> list[dict[str, Any]]:
    words = ("template", "tandem", str(CHART), "--namespace", NAMESPACE, "--show-only", "templates/monitors.yaml", *ON)
    return parse(cluster.helm(*words))


def _objects(cluster: BareCluster) -> list[tuple[str, Any]]:
    config = yaml.safe_dump({"scrape_configs": scrape_configs(_monitors(cluster))})
    program = shutil.which("prometheus")
    assert program
    rules = [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
    ]
    rbac, name = "rbac.authorization.k8s.io", {"name": "prometheus"}
    binding = {
        "subjects": [{"kind": "ServiceAccount", "name": "prometheus", "namespace": MONITORING}],
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "prometheus"},
    }
    image = OURS["api"]["image"]  # any Debian
    container = {
        "name": "prometheus", "image": f"{image['repository']}:{image['tag']}", "imagePullPolicy": "Never",
        "command": ["/prometheus", "--config.file=/config/prometheus.yml", "--storage.tsdb.path=/data"],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "program", "mountPath": "/prometheus", "readOnly": True},
            {"name": "config", "mountPath": "/config"}, {"name": "data", "mountPath": "/data"},
        ],
    }  # fmt: skip
    volumes = [
        {"name": "program", "hostPath": {"path": program, "type": "File"}},
        {"name": "config", "configMap": {"name": "prometheus"}}, {"name": "data", "emptyDir": {}},
    ]  # fmt: skip
    spec = {
        "serviceAccountName": "prometheus", "terminationGracePeriodSeconds": 1, "volumes": volumes,
        "containers": [container], "securityContext": {"runAsUser": 65532, "fsGroup": 65532},
    }  # fmt: skip
    return [
        ("namespace", MONITORING),
        (MONITORING, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": name}),
        (NAMESPACE, {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": name, "rules": rules}),
        (NAMESPACE, {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": name, **binding}),
        (MONITORING, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": name, "data": {"prometheus.yml": config}}),
        (MONITORING, {"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": spec}),
    ]
