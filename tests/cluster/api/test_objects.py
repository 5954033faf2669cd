"""A real API server takes every object of a pair, template and devices included, and admits its pods as restricted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cluster.api.hands import Hands
from cluster.handle import ApiServer
from clusters import SETTINGS, TEMPLATE, attempt
from tandem.pairrun.spec import Device
from tandem.spec import RunSpec
from tandem.vocabulary import Role
from tandem_controller import manifests
from tandem_controller.manifests import Attempt, Manifest

pytestmark = pytest.mark.needs("api-server")
CLASS = "of-this-test"
FULL: dict[str, Any] = {
    **TEMPLATE,
    "image": "registry.example.com/worker@sha256:" + "0" * 64,
    "imagePullPolicy": "Always",
    "volumes": [*TEMPLATE["volumes"], {"name": "questions", "mountPath": "/questions", "configMap": "questions"}],
    "tolerations": [
        *TEMPLATE["tolerations"], {"key": "other"}, {"key": "third", "operator": "Exists", "effect": "NoExecute"},
    ],
    "priorityClassName": CLASS,
    "runtimeClassName": CLASS,
}  # fmt: skip
HOST_PATH = {"volumes": [{"name": "data", "mountPath": "/data", "hostPath": "/srv/data"}]}


@pytest.fixture(scope="module")
def classes(api_server: ApiServer) -> Iterator[None]:
    """A priority and a runtime class, as an installation has them."""
    body = yaml.safe_dump_all([
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": CLASS}, "value": 1,
         "preemptionPolicy": "Never"},
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": CLASS}, "handler": "nvidia"},
    ])  # fmt: skip
    api_server.kubectl("apply", "-f", "-", input=body)
    yield
    api_server.kubectl("delete", f"priorityclass/{CLASS}", f"runtimeclass/{CLASS}")


@pytest.fixture
def restricted(hands: Hands, classes: None) -> Hands:
    """A namespace that enforces pod security ``restricted``, and warns of what a Job's pods would break."""
    labels = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
    hands.server.kubectl("label", "namespace", hands.namespace, *labels)
    return hands


def of(hands: Hands, device: Device, template: dict[str, Any]) -> Attempt:
    return attempt(
        namespace=hands.namespace, device=device, devices=8, node_devices=8, run=RunSpec(tp=8),
        device_taints=("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu"),
        spec={"template": template, "activeDeadlineSeconds": 600},
    )  # fmt: skip


def objects(a: Attempt) -> list[Manifest]:
    keys = [manifests.link_secret(a, role, (b"public", b"secret"), b"peer") for role in Role]
    jobs = [manifests.job(a, role, SETTINGS) for role in Role]
    return [*keys, manifests.service(a), *manifests.network_policies(a, SETTINGS.worker), *jobs]


def pods(a: Attempt) -> list[Manifest]:
    """As the Job controller would make them."""
    templates = [(role, manifests.job(a, role, SETTINGS)["spec"]["template"]) for role in Role]
    return [
        {"apiVersion": "v1", "kind": "Pod", "spec": t["spec"],
         "metadata": {**t["metadata"], "name": f"pod-of-the-{role}", "namespace": a.namespace}}
        for role, t in templates
    ]  # fmt: skip


def dry_run(hands: Hands, bodies: list[Manifest]) -> tuple[int, str]:
    """Strict: a field that no schema knows is an error, and so is a warning."""
    words = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    done = hands.server.try_kubectl(*words, input=yaml.safe_dump_all(bodies))
    said = done.stdout + done.stderr
    return (done.returncode or int("Warning" in said)), said


@pytest.mark.parametrize("device", [d for d in Device if d is not Device.AUTO])
@pytest.mark.parametrize("template", [{}, FULL], ids=["plain", "full"])
def test_every_object_of_a_pair_is_taken_and_its_pods_are_restricted(
    restricted: Hands, device: Device, template: dict[str, Any]
) -> None:
    a = of(restricted, device, template)
    everything = objects(a)
    code, said = dry_run(restricted, everything)
    assert code == 0, said
    assert said.count("serverside-applied (server dry run)") == len(everything) == 7
    code, said = dry_run(restricted, pods(a))
    assert code == 0, said


def test_a_folder_of_the_node_is_not_restricted(restricted: Hands) -> None:
    """As the page says of ``worker.allowedHostPaths``; and the namespace of these tests does refuse."""
    a = of(restricted, Device.CPU, HOST_PATH)
    code, said = dry_run(restricted, objects(a))
    assert code != 0
    assert "would violate PodSecurity" in said
    code, said = dry_run(restricted, pods(a))
    assert code != 0
    assert "violates PodSecurity" in said
    assert "hostPath" in said
