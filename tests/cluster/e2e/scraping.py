"""A real Prometheus in a pod of the cluster, which scrapes what the chart's PodMonitors and ServiceMonitors select.

Debian's Prometheus is built without Kubernetes' discovery, and the Prometheus Operator is no package: what these would
do - ask the cluster for what the selectors choose, and give each target its labels - is done here, and no more.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from chart.rendering import CHART, parse
from cluster.e2e.installation import NAMESPACE, OURS
from cluster.forwarded import forwarded
from cluster.handle import BareCluster
from prometheus import SCRAPE, Prometheus

MONITORING = "monitoring"
ON = ("--set", "metrics.podMonitor.enabled=true,metrics.serviceMonitor.enabled=true")
GIVEN = {"namespace": "namespace", "pod": "pod_name", "container": "pod_container_name"}
"""Labels that the operator's configuration gives every target, and the name of the discovered one."""


class Looking:
    """The Prometheus, and who keeps its targets up to date.

    Args:
        cluster: where it runs.
        monitors: whose targets it scrapes.
        asks: its API.
    """

    def __init__(self, cluster: BareCluster, monitors: list[dict[str, Any]], asks: Prometheus) -> None:
        self.cluster, self.monitors, self.asks = cluster, monitors, asks

    def now(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, once the targets of this moment are known to it."""
        for monitor in self.monitors:
            text = json.dumps(targets(self.cluster, monitor))
            write = f"cat > /data/new && mv /data/new /data/{monitor['metadata']['name']}.json"
            words = ("exec", "-i", "-n", MONITORING, "prometheus", "--", "sh", "-c", write)
            self.cluster.kubectl(*words, input=text)
        return self.asks.now(expression)


@contextmanager
def prometheus_in(cluster: BareCluster) -> Iterator[Looking]:
    """Debian's program, that of this machine, in a namespace of its own: what it reaches, policies let it reach."""
    words = ("template", "tandem", str(CHART), "--namespace", NAMESPACE, "--show-only", "templates/monitors.yaml", *ON)
    monitors = parse(cluster.helm(*words))
    cluster.kubectl("create", "namespace", MONITORING)
    try:
        cluster.apply(*_objects([_scrape_config(monitor) for monitor in monitors]), namespace=MONITORING)
        cluster.kubectl("wait", "pod/prometheus", "-n", MONITORING, "--for=condition=Ready", "--timeout=100s")
        with forwarded(cluster, MONITORING, "pod/prometheus", 9090) as port:
            yield Looking(cluster, monitors, Prometheus(port))
    finally:
        cluster.kubectl("delete", "namespace", MONITORING, "--wait=false")


def targets(cluster: BareCluster, monitor: dict[str, Any]) -> list[dict[str, Any]]:
    """What a monitor selects now, as file_sd has it."""
    selector = monitor["spec"]["selector"]
    assert set(selector) == {"matchLabels"}
    chosen = ",".join(f"{key}={value}" for key, value in selector["matchLabels"].items())
    port = _endpoint(monitor)["port"]
    found = []
    if monitor["kind"] == "PodMonitor":
        for pod in _list(cluster, "pods", chosen):
            for container in pod["spec"]["containers"]:
                numbers = [p["containerPort"] for p in container.get("ports", []) if p["name"] == port]
                if pod["status"]["phase"] == "Running" and numbers:
                    found.append(
                        _target(pod["status"]["podIP"], numbers[0], pod["metadata"]["name"], container["name"])
                    )
        return found
    for service in _list(cluster, "services", chosen):
        for part in _list(cluster, "endpointslices", f"kubernetes.io/service-name={service['metadata']['name']}"):
            numbers = [p["port"] for p in part["ports"] if p["name"] == port]
            found += [_target(one["addresses"][0], number, one["targetRef"]["name"], "api")
                      for number in numbers for one in part["endpoints"]]  # fmt: skip
    return found


def _list(cluster: BareCluster, kind: str, selector: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.get(kind, "--namespace", NAMESPACE, "-l", selector)["items"]
    return found


def _target(address: str, port: int, pod: str, container: str) -> dict[str, Any]:
    values = {"namespace": NAMESPACE, "pod_name": pod, "pod_container_name": container}
    labels = {f"__meta_kubernetes_{name}": value for name, value in values.items()}
    return {"targets": [f"{address}:{port}"], "labels": labels}


def _endpoint(monitor: dict[str, Any]) -> dict[str, Any]:
    (found,) = monitor["spec"][{"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}[monitor["kind"]]]
    assert set(found) <= {"port", "path", "interval", "relabelings"}, found
    return dict(found)


def _scrape_config(monitor: dict[str, Any]) -> dict[str, Any]:
    endpoint, name = _endpoint(monitor), monitor["metadata"]["name"]
    rules = [
        {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": label} for label, source in GIVEN.items()
    ]
    return {
        "job_name": f"{monitor['metadata']['namespace']}/{name}",
        "scrape_interval": SCRAPE,
        "scrape_timeout": SCRAPE,
        "metrics_path": endpoint.get("path", "/metrics"),
        "file_sd_configs": [{"files": [f"/data/{name}.json"], "refresh_interval": "1s"}],
        "relabel_configs": rules + [_snake(rule) for rule in endpoint.get("relabelings", [])],
    }


def _snake(rule: dict[str, Any]) -> dict[str, Any]:
    return {re.sub(r"[A-Z]", lambda m: "_" + m.group().lower(), key): value for key, value in rule.items()}


def _objects(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    program = shutil.which("prometheus")
    assert program
    image = OURS["api"]["image"]  # any Debian
    container = {
        "name": "prometheus", "image": f"{image['repository']}:{image['tag']}", "imagePullPolicy": "Never",
        "command": ["/prometheus", "--config.file=/config/prometheus.yml", "--storage.tsdb.path=/data/series"],
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
        "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1, "volumes": volumes,
        "containers": [container], "securityContext": {"runAsUser": 65532, "fsGroup": 65532},
    }  # fmt: skip
    data, name = {"prometheus.yml": yaml.safe_dump({"scrape_configs": configs})}, {"name": "prometheus"}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": name, "data": data},
        {"apiVersion": "v1", "kind": "Pod", "metadata": name, "spec": spec},
    ]
