"""Pairs on nodes with accelerators: the objects that a real API server stores, its defaults filled in."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from cluster.api.hands import Hands, leading
from cluster.handle import until
from tandem.kube.client import Object
from tandem.pairrun import names

pytestmark = pytest.mark.needs("api-server")
KINDS: dict[str, tuple[dict[str, str], int]] = {
    "nvidia.com/gpu": ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8"}, 8),
    "amd.com/gpu": ({"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, 8),
    "google.com/tpu": (
        {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "2x2"}, 4,
    ),
}  # fmt: skip


def two_nodes(hands: Hands, device: str) -> int:
    """A quarantined node and a healthy one with devices; returns how many each has."""
    labels, count = KINDS[device]
    for name in ("sick", "well"):
        hands.node(name, cordoned=name == "sick", labels=labels, capacity={device: str(count)})
    return count


def asked(job: Object, device: str) -> tuple[str, int]:
    """How many devices a Job's pod asks for, and how many ranks its worker is told to make."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    told = json.loads(next(e["value"] for e in container["env"] if e["name"] == "TANDEM_SPEC"))
    assert container["resources"]["limits"][device] == container["resources"]["requests"][device]
    return container["resources"]["limits"][device], told["tp"]


@pytest.mark.parametrize("device", list(KINDS))
def test_whoever_names_no_tp_gets_every_device_of_the_node(hands: Hands, device: str) -> None:
    """The API server fills in what the user left out: it must not read as a wish that no such node can meet."""
    count = two_nodes(hands, device)
    with leading(hands):
        hands.create(workload={"model": "paper-16l" if count == 8 else "small"})
        hands.wait_for(names.PAIRED, "True")
        until("both Jobs", lambda: len(hands.jobs(1)) == 2)
        assert [asked(job, device) for job in hands.jobs(1)] == [(str(count), count)] * 2
        attempt = hands.status().attempts[0]
        assert (attempt.device, attempt.devices) == (device, count)


def test_situation_23_a_node_whose_plugin_dropped_a_device_runs_on_what_the_model_can_use_of_the_rest(
    hands: Hands,
) -> None:
    """Both pods ask for what is left; the ranks are as many as the model can be split over, and the status says so."""
    labels, count = KINDS["nvidia.com/gpu"]
    seven = {"nvidia.com/gpu": str(count - 1)}
    hands.node("sick", cordoned=True, labels=labels | {"nvidia.com/gpu.count": "7"}, capacity=seven)
    hands.node("well", labels=labels, capacity={"nvidia.com/gpu": str(count)})
    with leading(hands):
        hands.create(resources={"devices": "allocatable"})
        hands.wait_for(names.PAIRED, "True")
        until("both Jobs", lambda: len(hands.jobs(1)) == 2)
        assert [asked(job, "nvidia.com/gpu") for job in hands.jobs(1)] == [("7", 4)] * 2
        status = hands.status()
        assert (status.attempts[0].devices, status.attempts[0].tp) == (7, 4)
        assert status.suspect is not None
        assert status.suspect.reason == "cordoned; computes on 4 of its 7 nvidia.com/gpu"


@pytest.mark.parametrize("more", [[], ["--tp", "8"]])
def test_tandem_pair_asks_for_no_tp_that_was_not_given(hands: Hands, more: list[str]) -> None:
    two_nodes(hands, "nvidia.com/gpu")
    node = f"sick-{hands.namespace}"
    words = ["pair", node, "--model", "paper-16l", "--detach", "--name", "check", "-n", hands.namespace, *more]
    hands.server.run(sys.executable, "-m", "tandem.cli.app", *words)
    workload: dict[str, Any] = hands.get()["spec"]["workload"]
    assert workload.get("tp") == (8 if more else None)
    with leading(hands):
        hands.wait_for(names.PAIRED, "True")
        assert hands.status().attempts[0].devices == 8
