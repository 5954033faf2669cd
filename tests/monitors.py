"""PodMonitors and ServiceMonitors as the Prometheus Operator reads them: scrape configurations of a plain Prometheus.

Only what the chart's monitors use: matchLabels, one port by name, a path, an interval, relabelings.
"""

from __future__ import annotations

import re
from typing import Any

SCRAPE = "500ms"


def scrape_configs(monitors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each endpoint; the job is ``NAMESPACE/NAME-OF-MONITOR``. Scrapes come as fast as tests want them."""
    return [_config(monitor, endpoint) for monitor in monitors for endpoint in _endpoints(monitor)]


def _endpoints(monitor: dict[str, Any]) -> list[dict[str, Any]]:
    name = {"PodMonitor": "podMetricsEndpoints", "ServiceMonitor": "endpoints"}[monitor["kind"]]
    found: list[dict[str, Any]] = monitor["spec"][name]
    for endpoint in found:
        assert set(endpoint) <= {"port", "path", "interval", "relabelings"}, endpoint
        assert re.fullmatch(r"\d+(ms|s|m|h)", endpoint["interval"])
    return found


def _config(monitor: dict[str, Any], endpoint: dict[str, Any]) -> dict[str, Any]:
    pods = monitor["kind"] == "PodMonitor"
    namespace, name = monitor["metadata"]["namespace"], monitor["metadata"]["name"]
    selector = monitor["spec"]["selector"]
    assert set(selector) == {"matchLabels"}
    owner = "pod" if pods else "service"
    rules: list[dict[str, Any]] = [
        _keep(f"__meta_kubernetes_{owner}_label_{_sanitised(key)}", value)
        for key, value in selector["matchLabels"].items()
    ]
    port = "__meta_kubernetes_pod_container_port_name" if pods else "__meta_kubernetes_endpointslice_port_name"
    rules.append(_keep(port, endpoint["port"]))
    rules.append(_keep("__meta_kubernetes_pod_phase", "Failed|Succeeded") | {"action": "drop"})
    given = {"namespace": "namespace", "pod": "pod_name", "container": "pod_container_name"}
    rules += [
        {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": label} for label, source in given.items()
    ]
    return {
        "job_name": f"{namespace}/{name}",
        "scrape_interval": SCRAPE,
        "scrape_timeout": SCRAPE,
        "metrics_path": endpoint.get("path", "/metrics"),
        "kubernetes_sd_configs": [{"role": "pod" if pods else "endpointslice", "namespaces": {"names": [namespace]}}],
        "relabel_configs": rules + [_relabeling(rule) for rule in endpoint.get("relabelings", [])],
    }


def _keep(label: str, value: str) -> dict[str, Any]:
    return {"source_labels": [label], "regex": value, "action": "keep"}


def _sanitised(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _relabeling(rule: dict[str, Any]) -> dict[str, Any]:
    """The operator's spelling is camelCase."""
    return {re.sub(r"[A-Z]", lambda m: "_" + m.group().lower(), key): value for key, value in rule.items()}
