"""Which devices a node has, and how many: where its plugin dropped some, or is gone, the labels still know. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from tandem.pairing.nodes import Node, count
from tandem.pairing.policy import Policy
from tandem.pairrun.spec import Device

ACCELERATORS = (Device.NVIDIA, Device.AMD, Device.TPU)
ACCELERATOR_LABELS = {
    Device.NVIDIA: ("nvidia.com/gpu.product", "nvidia.com/gpu.count", "cloud.google.com/gke-accelerator"),
    Device.AMD: ("amd.com/gpu.product-name", "amd.com/gpu.device-id"),
    Device.TPU: ("cloud.google.com/gke-tpu-accelerator",),
}
"""Labels by which a node says that it has such devices, whatever its device plugin offers at the moment."""
COUNT_LABELS = {
    Device.NVIDIA: ("nvidia.com/gpu.count", "cloud.google.com/gke-accelerator-count"),
    Device.TPU: ("cloud.google.com/gke-accelerator-count",),
}
"""Labels that say how many."""
MACHINE = "node.kubernetes.io/instance-type"
_MACHINE_KIND = (MACHINE, "cloud.google.com/gke-tpu-accelerator")


def device_of(node: Node, asked: Device) -> Device:
    """The kind of device that a pod on this node asks for."""
    if asked is not Device.AUTO:
        return asked
    for device in ACCELERATORS:
        if offered(node, device) or any(label in node.labels for label in ACCELERATOR_LABELS[device]):
            return device
    return Device.CPU


def offered(node: Node, device: Device) -> int:
    """The most that the node speaks of at the moment."""
    return int(max(node.capacity.get(device, 0), node.allocatable.get(device, 0)))


def whole(node: Node, device: Device, policy: Policy) -> int:
    """How many devices the node has; a plugin may drop a sick one from the capacity too.

    Args:
        node: no host of a slice of several (`multi_host_slice`).
        device: of which kind.
        policy: names the label of TPU topologies.
    """
    labelled = [count(node.labels.get(label)) for label in COUNT_LABELS.get(device, ())]
    topology = _chips(node, policy) if device is Device.TPU else 0
    return max(offered(node, device), topology, *labelled, 0)


def multi_host_slice(node: Node, nodes: Iterable[Node], policy: Policy) -> bool:
    """Whether the node is one host of a TPU slice of several: its topology has more chips than such a host.

    Chips that are missing make no slice: how many a host has is what its labels say, else the most that any node of its
    kind offers. All hosts of a slice have as many, so a number that does not divide the topology is no host's.

    Args:
        node: the node.
        nodes: of the cluster.
        policy: names the label of TPU topologies.
    """
    if not (chips := _chips(node, policy)):
        return False
    host = _stated(node) or max(offered(other, Device.TPU) for other in (node, *_like(node, nodes, policy)))
    return 0 < host < chips and chips % host == 0


def _chips(node: Node, policy: Policy) -> int:
    """Chips of the slice that the node belongs to; 0: its labels do not say."""
    topology = node.labels.get(policy.tpu_topology_label, "")
    if not re.fullmatch(r"[0-9]{1,5}(x[0-9]{1,5}){0,3}", topology):
        return 0
    return math.prod(int(part) for part in topology.split("x"))


def _stated(node: Node) -> int:
    """Chips of one host, by its labels: their number, or the machine type's end (``ct5lp-hightpu-4t``); 0: unsaid."""
    machine = re.search(r"-([0-9]{1,3})t$", node.labels.get(MACHINE, ""))
    return next((n for label in COUNT_LABELS[Device.TPU] if (n := count(node.labels.get(label)))), 0) or (
        int(machine[1]) if machine else 0
    )


def _like(node: Node, nodes: Iterable[Node], policy: Policy) -> list[Node]:
    labels = (*_MACHINE_KIND, policy.tpu_topology_label)
    return [n for n in nodes if all(n.labels.get(label) == node.labels.get(label) for label in labels)]
