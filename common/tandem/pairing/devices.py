"""Which devices a node has and how many a pair takes. Pure.

Where a plugin dropped a sick device, or is gone, the node's labels still know what it had.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.errors import SpecError
from tandem.pairing.nodes import Node, count
from tandem.pairing.policy import Policy
from tandem.pairrun.spec import Device, PairRunSpec
from tandem.spec import ModelConfig, Training, check_tp, degrees, resolve

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


@dataclass(frozen=True, slots=True)
class Share:
    """What a pair takes of its nodes' devices."""

    device: Device
    devices: int
    """How many of ``device`` each pod asks for; for CPU, the ranks."""
    tp: int
    """Tensor-parallel ranks, one device each."""
    has: int
    """How many the suspect's node has; for CPU, the ranks."""

    @property
    def sentence(self) -> str:
        """What nobody must take for covered; empty if every device of the node computes."""
        return f"computes on {self.tp} of its {self.has} {self.device}" if self.tp < self.has else ""


@dataclass(frozen=True, slots=True)
class NoShare:
    """Why a pair cannot take its devices here: a CamelCase reason and one sentence."""

    reason: str
    message: str
    final: bool = False
    """Whether waiting cannot help."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides over how many devices a run can be split."""

    model: ModelConfig
    training: Training
    known: bool
    """False: weights are given whose preset is not named, and they are in the pods. The workers then say what fits."""


def shape_of(spec: PairRunSpec) -> Shape | NoShare:
    """The model and training shape of a request; `NoShare`: no run has such a shape, whatever its devices."""
    run = spec.run
    try:
        model, training = resolve(run.model_copy(update={"tp": 1}))
    except SpecError as error:
        return NoShare("InvalidSpec", str(error), final=True)
    return Shape(model, training, known=run.weights is None or "model" in run.model_fields_set)


def share(spec: PairRunSpec, shape: Shape, suspect: Node, policy: Policy) -> Share | NoShare:
    """How many devices each pod asks for, and how many of them compute: as many as the model can be split over.

    `NoShare`: the node offers too few, or the request asks for what cannot be.
    """
    device, tp = device_of(suspect, spec.resources.device), spec.run.tp
    asked = device is Device.CPU or "tp" in spec.workload
    if asked and spec.run.weights is None:
        try:
            check_tp(shape.model, shape.training, tp)
        except SpecError as error:
            return NoShare("ImpossibleTP", str(error), final=True)
    if device is Device.CPU:
        return Share(device, tp, tp, tp)
    offers, has = int(suspect.allocatable.get(device, 0)), whole(suspect, device, policy)
    if not offers:
        return NoShare("NoDevices", f"{suspect.name} offers no {device}: is its device plugin running?")
    if spec.resources.devices == "all" and offers < has:
        return NoShare(
            "DevicesMissing",
            f"{suspect.name} offers {offers} of its {has} {device}: "
            "run on what is left with resources.devices: allocatable",
        )
    if asked and tp > offers:
        return NoShare(
            "ImpossibleTP", f"tp {tp} is more than the {offers} {device} of {suspect.name}: leave workload.tp out",
            final=tp > has,
        )  # fmt: skip
    if not asked:
        fits = degrees(shape.model, shape.training) if shape.known else [offers]
        tp = max(degree for degree in fits if degree <= offers)
    return Share(device, offers, tp, has)


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
