"""Everything that a cluster holds, by name, so that two moments can be compared."""

from __future__ import annotations

from typing import Any

from cluster.handle import ApiServer

PASSING = (
    "events", "events.events.k8s.io", "certificatesigningrequests.certificates.k8s.io", "componentstatuses",
    "ipaddresses.networking.k8s.io",
)  # fmt: skip
"""Kinds that come and go by themselves, or long after what they belong to."""


def snapshot(cluster: ApiServer) -> set[str]:
    """Every object of every kind that can be listed, in every namespace, and of each node what may be changed of it."""
    found: set[str] = set()
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    for item in cluster.get(",".join(kind for kind in kinds if kind not in PASSING), "--all-namespaces")["items"]:
        meta = item["metadata"]
        found.add(f"{item['apiVersion'].split('/')[0]} {item['kind']} {meta.get('namespace', '-')} {meta['name']}")
        if item["kind"] == "Node":
            found |= {f"{meta['name']} {what}" for what in _of_a_node(item)}
    return found


def _of_a_node(node: dict[str, Any]) -> list[str]:
    meta, spec = node["metadata"], node["spec"]
    said = [f"label {k}={v}" for k, v in (meta.get("labels") or {}).items()]
    said += [f"annotation {k}={v}" for k, v in (meta.get("annotations") or {}).items()]
    said += [f"taint {t['key']}={t.get('value', '')}:{t['effect']}" for t in spec.get("taints") or []]
    said += [f"condition {c['type']}" for c in node["status"].get("conditions") or []]
    return [*said, f"unschedulable {bool(spec.get('unschedulable'))}"]
