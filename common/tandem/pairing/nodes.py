"""Nodes and what uses them, as pairing sees them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.pairing.policy import Policy, Signal
from tandem.pairrun.spec import Toleration

CORDON_TAINT = "node.kubernetes.io/unschedulable"
"""Set by Kubernetes on a cordoned node."""
_TAINTS = ("taint", "unschedulable")


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Node:
    """What pairing needs of a node."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    conditions: dict[str, str] = field(default_factory=dict)
    """Type -> status."""
    capacity: dict[str, float] = field(default_factory=dict)
    allocatable: dict[str, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    """``status.nodeInfo``."""
    leaving: bool = False
    """Its deletion was asked for."""

    @property
    def ready(self) -> bool:
        return self.conditions.get("Ready") == "True" and not self.leaving

    @property
    def boot_id(self) -> str:
        return self.info.get("bootID", "")


@dataclass(frozen=True, slots=True)
class PodUse:
    """A pod that occupies part of a node."""

    namespace: str
    name: str
    node: str
    requests: dict[str, float] = field(default_factory=dict)


def node_from(obj: Mapping[str, Any]) -> Node:
    """A node from its API object; what is missing or malformed counts as absent."""
    meta, spec, status = (obj.get(part) or {} for part in ("metadata", "spec", "status"))
    return Node(
        name=str(meta.get("name", "")),
        labels=dict(meta.get("labels") or {}),
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(str(t.get("key", "")), str(t.get("value") or ""), str(t.get("effect") or ""))
            for t in spec.get("taints") or []
        ),
        conditions={str(c.get("type")): str(c.get("status")) for c in status.get("conditions") or []},
        capacity=quantities(status.get("capacity") or {}),
        allocatable=quantities(status.get("allocatable") or {}),
        info={k: str(v) for k, v in (status.get("nodeInfo") or {}).items()},
        leaving=bool(meta.get("deletionTimestamp")),
    )


def pod_use_from(obj: Mapping[str, Any]) -> PodUse | None:
    """What a pod occupies; None for one that has ended or has no node yet."""
    meta, spec, status = (obj.get(part) or {} for part in ("metadata", "spec", "status"))
    if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return None
    return PodUse(
        namespace=str(meta.get("namespace", "")), name=str(meta.get("name", "")), node=str(spec["nodeName"]),
        requests=_pod_requests(spec),
    )  # fmt: skip


def _pod_requests(spec: Mapping[str, Any]) -> dict[str, float]:
    """As the scheduler counts: containers and sidecars together, or the largest init container, and the overhead."""

    def requests(container: Mapping[str, Any]) -> dict[str, float]:
        found = container.get("resources") or {}
        # A limit without a request counts as one; extended resources are often given as limits only.
        return quantities({**(found.get("limits") or {}), **(found.get("requests") or {})})

    running: dict[str, float] = {}
    largest: dict[str, float] = {}
    for init in spec.get("initContainers") or []:
        if init.get("restartPolicy") == "Always":
            running = _add(running, requests(init))
            largest = _most(largest, running)
        else:
            largest = _most(largest, _add(running, requests(init)))
    for container in spec.get("containers") or []:
        running = _add(running, requests(container))
    # What a pod asks for as a whole stands in place of its containers' sum.
    whole = requests(spec) if spec.get("resources") else {}
    return _add(_most(running, largest) | whole, quantities(spec.get("overhead") or {}))


def _add(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _most(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


_SUFFIX = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


def quantity(text: Any) -> float:
    """A Kubernetes quantity as a number; 0 for what is none."""
    found = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", str(text))
    if found is None or found[2] not in _SUFFIX:
        return 0.0
    try:
        value = float(found[1]) * _SUFFIX[found[2]]
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def count(text: str | None) -> int:
    """A label's value as a number; 0 for what is none."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,6}", text) else 0


def quantities(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): quantity(value) for name, value in values.items()}


# -- signs -------------------------------------------------------------------------------------------


def quarantine_signs(node: Node, policy: Policy) -> list[str]:
    """Why a node counts as quarantined, each sign in a few words; empty if it does not."""
    signs = []
    for signal in policy.quarantine:
        match signal.kind:
            case "unschedulable" if node.unschedulable:
                signs.append("cordoned")
            case "taint":
                signs += [f"taint {t.key}" for t in node.taints if matches_taint(signal, t.key)]
            case "label" if signal.key in node.labels:
                value = node.labels[signal.key]
                if not signal.values or value in signal.values:
                    signs.append(f"label {signal.key}={value}")
            case "condition" if signal.key in node.conditions:
                status = node.conditions[signal.key]
                if not signal.values or status in signal.values:
                    signs.append(f"condition {signal.key}={status}")
    return list(dict.fromkeys(signs))


def matches_taint(signal: Signal, key: str) -> bool:
    """Whether a taint's key is one that the signal means."""
    if signal.key is None:
        return key == CORDON_TAINT and signal.kind == "unschedulable"
    return key.startswith(signal.key[:-1]) if signal.key.endswith("*") else key == signal.key


def tolerated_taints(node: Node, policy: Policy) -> list[str]:
    """Keys that the suspect's pod tolerates one by one: the node's quarantine taints, and every key that the policy
    names in full, since remediation may add one while the pair runs.
    """
    named = {CORDON_TAINT if s.kind == "unschedulable" else s.key for s in policy.quarantine if s.kind in _TAINTS}
    there = {t.key for t in node.taints for s in policy.quarantine if s.kind in _TAINTS and matches_taint(s, t.key)}
    return sorted({key for key in named if key is not None and not key.endswith("*")} | there)


def untolerated(node: Node, keys: Iterable[str], tolerations: Iterable[Toleration], policy: Policy) -> str | None:
    """The first taint that would keep a pod off the node, or throw it out; None if there is none.

    Args:
        node: the node.
        keys: taints that the pod tolerates whatever their value and effect, besides the device taints.
        tolerations: those of the pod's template, which may be narrower.
        policy: names the device taints.
    """
    known, asked = {*keys, *policy.device_taints}, list(tolerations)
    for taint in node.taints:
        if taint.effect not in ("NoSchedule", "NoExecute") or taint.key in known:
            continue
        if not any(_tolerates(each, taint) for each in asked):
            value = f"={taint.value}" if taint.value else ""
            return f"{taint.key}{value}:{taint.effect}"
    return None


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    """As the scheduler reads it: an effect or a value that is given must be the taint's."""
    if toleration.key != taint.key or toleration.effect not in (None, taint.effect):
        return False
    return toleration.operator == "Exists" or (toleration.value or "") == taint.value


def opted_out(node: Node, policy: Policy) -> str | None:
    """The label by which a node asks to be left alone; None if it does not."""
    found = next((m for m in policy.opt_out if m.matches(node.labels)), None)
    return f"{found.key}={node.labels[found.key]}" if found else None


def unlike(one: Node, other: Node, policy: Policy, but: Container[str] = ()) -> str | None:
    """The first likeness field in which two nodes differ, with both values; None if they are alike.

    Args:
        one: a node.
        other: another.
        policy: the fields.
        but: labels among them that do not count.
    """
    for label in (label for label in policy.likeness.labels if label not in but):
        mine, theirs = one.labels.get(label), other.labels.get(label)
        if mine != theirs:
            return f"{label} ({_shown(mine)}, {_shown(theirs)})"
    for name in policy.likeness.node_info:
        if one.info.get(name) != other.info.get(name):
            return f"nodeInfo.{name} ({_shown(one.info.get(name))}, {_shown(other.info.get(name))})"
    return None


def _shown(value: str | None) -> str:
    return "absent" if value is None else value
