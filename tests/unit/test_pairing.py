"""Pairing as a pure function: signs of quarantine, likeness, capacity, claims, and why others were passed over."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import CORDONED, POLICY, node, spec, stored, use, world
from tandem.errors import SpecError
from tandem.pairing.choose import Claim, NoPairing, Pairing, World, choose
from tandem.pairing.claims import claims
from tandem.pairing.devices import Share, multi_host_slice
from tandem.pairing.nodes import (
    Node,
    Taint,
    node_from,
    pod_use_from,
    quantity,
    quarantine_signs,
    tolerated_taints,
)
from tandem.pairing.policy import read_policy
from tandem.pairrun.spec import Device, read_spec
from tandem.spec import RunSpec, preset_names, resolve


def pair(where: World, **values: Any) -> Pairing:
    found = choose(spec(**values), where, POLICY)
    assert isinstance(found, Pairing), found
    return found


def none(where: World, **values: Any) -> NoPairing:
    found = choose(spec(**values), where, POLICY)
    assert isinstance(found, NoPairing), found
    return found


def why(found: Pairing | NoPairing) -> dict[str, str]:
    return {p.node: p.reason for p in found.passed_over}


SIGNS: list[tuple[str, dict[str, Any]]] = [
    ("cordoned", {"cordoned": True}),
    *((f"taint nvidia.com/{end}", {"taints": (Taint(f"nvidia.com/{end}", "true", "NoSchedule"),)})
      for end in ("gpu-error", "gpu-xid-error", "gpu-nvlink-error", "syslog-xid-error")),
    ("taint nvidia.com/gpu-xid", {"taints": (Taint("nvidia.com/gpu-xid", "", "NoSchedule"),)}),
    ("taint aiinfra/gpu-healthcheck", {"taints": (Taint("aiinfra/gpu-healthcheck", "x", "NoSchedule"),)}),
    ("taint sagemaker.amazonaws.com/node-health-status",
     {"taints": (Taint("sagemaker.amazonaws.com/node-health-status", "x", "NoSchedule"),)}),
    ("label k8saas.nvidia.com/cordon-by=NVSentinel", {"labels": {"k8saas.nvidia.com/cordon-by": "NVSentinel"}}),
    ("label autopilot.ibm.com/gpuhealth=EVICT", {"labels": {"autopilot.ibm.com/gpuhealth": "EVICT"}}),
    ("taint aiinfra/nccl-healthcheck", {"taints": (Taint("aiinfra/nccl-healthcheck", "x", "NoSchedule"),)}),
    ("taint tandem.dev/sdc-confirmed", {"taints": (Taint("tandem.dev/sdc-confirmed", "true", "NoSchedule"),)}),
    *((f"label aiinfra/gpu-healthcheck-result={word}", {"labels": {"aiinfra/gpu-healthcheck-result": word}})
      for word in ("fail", "failed", "FAIL", "FAILED")),
    ("condition NVLinkStatusInactive=True", {"conditions": {"NVLinkStatusInactive": "True"}}),
    ("label tandem.dev/quarantined=true", {"labels": {"tandem.dev/quarantined": "true"}}),
    ("condition AcceleratedHardwareReady=False", {"conditions": {"AcceleratedHardwareReady": "False"}}),
    ("condition GPUMissing=True", {"conditions": {"GPUMissing": "True"}}),
    ("condition XIDErrors=True", {"conditions": {"XIDErrors": "True"}}),
]  # fmt: skip


@pytest.mark.parametrize(("sign", "values"), SIGNS, ids=[sign for sign, _ in SIGNS])
def test_every_sign_of_quarantine_makes_a_suspect_and_never_a_reference(sign: str, values: dict[str, Any]) -> None:
    sick = node("sick", **values)
    assert quarantine_signs(sick, POLICY) == [sign]
    found = pair(world(sick, node("well")))
    assert (found.suspect.name, found.reference.name, found.suspect_reason) == ("sick", "well", sign)
    other = none(world(node("first", cordoned=True), sick), suspect={"nodeName": "first"})
    assert why(other)["sick"] == "Quarantined"


@pytest.mark.parametrize(
    "values",
    [
        {}, {"gpus": 8}, {"labels": {"autopilot.ibm.com/gpuhealth": "PASS"}},
        {"labels": {"tandem.dev/quarantined": "false"}}, {"conditions": {"GPUMissing": "False"}},
        {"conditions": {"AcceleratedHardwareReady": "True"}}, {"taints": (Taint("amd.com/gpu", "", "NoSchedule"),)},
    ],
)  # fmt: skip
def test_ordinary_nodes_are_not_quarantined(values: dict[str, Any]) -> None:
    """The ordinary device taints are no sign."""
    assert quarantine_signs(node("n", **values), POLICY) == []


def test_the_suspects_pod_tolerates_each_key_of_the_policy_and_never_everything() -> None:
    """Remediation may add a taint later; what the policy leaves open is tolerated as far as it is there."""
    sick = node("sick", cordoned=True, taints=(*CORDONED, Taint("nvidia.com/gpu-xid", "", "NoExecute")))
    keys = tolerated_taints(sick, POLICY)
    assert {"node.kubernetes.io/unschedulable", "nvidia.com/gpu-xid", "aiinfra/nccl-healthcheck"} <= set(keys)
    assert not any("*" in key or not key for key in keys)


def test_what_remediation_may_add_while_the_pair_runs_is_tolerated_before_it_is_there() -> None:
    """Else a NoExecute taint would evict the suspect; a key that the policy leaves open cannot be known before."""
    named = {s.key for s in POLICY.quarantine if s.kind == "taint" and s.key is not None and not s.key.endswith("*")}
    assert {"nvidia.com/gpu-xid-error", "nvidia.com/syslog-xid-error", "tandem.dev/sdc-confirmed"} <= named
    before = tolerated_taints(node("sick", labels={"tandem.dev/quarantined": "true"}), POLICY)
    assert named <= set(before)
    assert "nvidia.com/gpu-of-our-own" not in before
    after = tolerated_taints(node("sick", taints=(Taint("nvidia.com/gpu-of-our-own", "", "NoExecute"),)), POLICY)
    assert "nvidia.com/gpu-of-our-own" in after


PRIVATE = Taint("team/private", "a", "NoSchedule")


@pytest.mark.parametrize(
    ("toleration", "taint", "enough"),
    [
        (None, PRIVATE, False),
        ({"key": "team/private"}, PRIVATE, True),
        ({"key": "team/other"}, PRIVATE, False),
        ({"key": "team/private", "effect": "NoSchedule"}, PRIVATE, True),
        ({"key": "team/private", "effect": "NoExecute"}, PRIVATE, False),
        ({"key": "team/private", "operator": "Equal", "value": "a"}, PRIVATE, True),
        ({"key": "team/private", "operator": "Equal", "value": "b"}, PRIVATE, False),
        ({"key": "team/private", "operator": "Equal"}, PRIVATE, False),
        ({"key": "team/private", "operator": "Equal"}, Taint("team/private", "", "NoExecute"), True),
        (None, Taint("team/private", "a", "PreferNoSchedule"), True),
    ],
)
@pytest.mark.parametrize("side", ["sick", "well"])
def test_a_taint_that_keeps_a_pod_off_is_told_before_the_pod_waits_for_ever(
    toleration: dict[str, Any] | None, taint: Taint, enough: bool, side: str
) -> None:
    """A toleration counts as the scheduler reads it: key, operator, value and effect."""
    taints = {"sick": CORDONED, "well": ()}
    taints[side] = (*taints[side], taint)
    where = world(node("sick", cordoned=True, taints=taints["sick"]), node("well", taints=taints["well"]))
    found = choose(spec(template={"tolerations": [toleration] if toleration else []}), where, POLICY)
    assert isinstance(found, Pairing) is enough
    if isinstance(found, NoPairing):
        assert (found.reason if side == "sick" else why(found)["well"]) == "UntoleratedTaint"
        assert f"{taint.key}=a:{taint.effect}" in found.message


UNLIKE: list[tuple[str, dict[str, Any]]] = [
    ("kubernetes.io/arch", {"labels": {"kubernetes.io/arch": "arm64"}}),
    ("node.kubernetes.io/instance-type", {"labels": {"node.kubernetes.io/instance-type": "a3"}}),
    ("nvidia.com/gpu.product", {"labels": {"nvidia.com/gpu.product": "NVIDIA-A100"}}),
    ("nvidia.com/cuda.driver-version.full", {"labels": {"nvidia.com/cuda.driver-version.full": "580.1"}}),
    ("nvidia.com/mig.strategy", {"labels": {"nvidia.com/mig.strategy": "single"}}),
    ("cloud.google.com/gke-tpu-accelerator", {"labels": {"cloud.google.com/gke-tpu-accelerator": "v5e"}}),
    ("feature.node.kubernetes.io/cpu-model.id", {"labels": {"feature.node.kubernetes.io/cpu-model.id": "85"}}),
    ("nvidia.com/gpu.count", {"labels": {"nvidia.com/gpu.count": "8"}}),
    ("amd.com/gpu.product-name", {"labels": {"amd.com/gpu.product-name": "AMD_Instinct_MI250_OAM"}}),
    ("amd.com/gpu.device-id", {"labels": {"amd.com/gpu.device-id": "740c"}}),
    ("amd.com/gpu.cu-count", {"labels": {"amd.com/gpu.cu-count": "304"}}),
    ("amd.com/gpu.vram", {"labels": {"amd.com/gpu.vram": "64G"}}),
    ("amd.com/gpu.driver-version", {"labels": {"amd.com/gpu.driver-version": "6.12.12"}}),
    ("amd.com/gpu.compute-memory-partition", {"labels": {"amd.com/gpu.compute-memory-partition": "cpx_nps1"}}),
    ("cloud.google.com/gke-accelerator", {"labels": {"cloud.google.com/gke-accelerator": "nvidia-l4"}}),
    ("cloud.google.com/gke-tpu-topology", {"labels": {"cloud.google.com/gke-tpu-topology": "odd"}}),
    ("feature.node.kubernetes.io/cpu-model.family", {"labels": {"feature.node.kubernetes.io/cpu-model.family": "6"}}),
    ("feature.node.kubernetes.io/cpu-model.vendor_id",
     {"labels": {"feature.node.kubernetes.io/cpu-model.vendor_id": "AMD"}}),
    ("nodeInfo.kernelVersion", {"info": {"kernelVersion": "6.2"}}),
    ("nodeInfo.containerRuntimeVersion", {"info": {"containerRuntimeVersion": "cri-o://1"}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "values"), UNLIKE, ids=[field for field, _ in UNLIKE])
def test_situation_5_unlike_nodes_never_pair_and_the_field_is_named(field: str, values: dict[str, Any]) -> None:
    found = none(world(node("sick", cordoned=True), node("other", **values)))
    assert found.reason == "NoReference"
    [passed] = found.passed_over[1:] if found.passed_over[0].role == "suspect" else found.passed_over
    assert passed.reason == "Unlike"
    assert field in passed.message
    assert field in found.message


def test_every_field_of_likeness_and_every_sign_has_its_row() -> None:
    """A line of the policy that nobody tried may be misspelt, and does nothing."""
    fields = {*POLICY.likeness.labels, *(f"nodeInfo.{name}" for name in POLICY.likeness.node_info)}
    assert {field for field, _ in UNLIKE} == fields
    signs = {signal.key or "cordoned" for signal in POLICY.quarantine}
    tried = {
        (signal.key or "cordoned")
        for signal in POLICY.quarantine
        for _, values in SIGNS
        if quarantine_signs(node("n", **values), POLICY.model_copy(update={"quarantine": [signal]}))
    }
    assert tried == signs


@pytest.mark.parametrize("device", ["nvidia.com/gpu", "amd.com/gpu", "google.com/tpu"])
@pytest.mark.parametrize(("mine", "theirs"), [(8, 16), (8, 4), (16, 8)])
def test_nodes_with_another_number_of_devices_are_unlike(device: str, mine: int, theirs: int) -> None:
    """Whatever labels they carry: not every labeller counts."""

    def of(name: str, count: int, **more: Any) -> Node:
        amounts = {device: float(count)}
        return node(name, capacity=amounts, allocatable=amounts, **more)

    found = none(world(of("sick", mine, cordoned=True), of("other", theirs)))
    assert why(found)["other"] == "Unlike"
    assert f"number of {device} ({mine}, {theirs})" in found.message


def test_likeness_fields_and_signs_are_data() -> None:
    """An installation may replace any list; a wrong one is one line that names the field."""
    policy = read_policy({"likeness": {"labels": ["rack"]}, "quarantine": [{"kind": "label", "key": "bad"}]})
    first, second = node("a", labels={"bad": "1", "rack": "1"}), node("b", labels={"rack": "2"})
    found = choose(spec(), world(first, second), policy)
    assert isinstance(found, NoPairing)
    assert "rack (1, 2)" in found.message
    assert "kubernetes.io/arch" not in policy.likeness.labels
    for wrong in (
        {"quarantine": [{"kind": "taint", "key": "*"}]}, {"quarantine": [{"kind": "taint"}]}, {"colour": 1},
        {"quarantine": [{"kind": "label", "key": "a*"}]}, {"runsPerReference": 0},
    ):  # fmt: skip
        with pytest.raises(SpecError, match=r"^policy: ") as error:
            read_policy(wrong)
        assert "\n" not in str(error.value)


def test_idle_comes_before_busy_and_then_who_served_less() -> None:
    sick = node("sick", cordoned=True)
    pods = [use("job", "busy", cpu=2.0)]
    where = world(sick, node("busy"), node("idle"), pods=pods)
    assert pair(where).reference.name == "idle"
    where = world(sick, node("one"), node("two"), served={"one": 3, "two": 1})
    found = pair(where)
    assert found.reference.name == "two"
    assert why(found) == {"one": "NotNeeded"}


def test_a_reference_serves_one_run_at_a_time() -> None:
    sick = node("sick", cordoned=True)
    claims = (Claim("tandem/other", "elsewhere", "well"),)
    found = none(world(sick, node("well"), claims=claims))
    assert (found.reason, why(found)["well"]) == ("NoReference", "Busy")
    assert "tandem/other" in found.message
    two = read_policy({"runsPerReference": 2})
    assert isinstance(choose(spec(), world(sick, node("well"), claims=claims), two), Pairing)


def test_never_two_runs_on_one_suspect() -> None:
    """Named or found: the second waits, and says for whom; another quarantined node is taken if there is one."""
    nodes = [node("sick", cordoned=True), node("well"), node("well-2")]
    claims = (Claim("tandem/first", "sick", "well"),)
    for values in ({}, {"suspect": {"nodeName": "sick"}}):
        found = none(world(*nodes, claims=claims), **values)
        assert found.reason == "SuspectBusy"
        assert "tandem/first" in found.message
    found = pair(world(*nodes, node("sick-2", cordoned=True), claims=claims))
    assert (found.suspect.name, found.reference.name) == ("sick-2", "well-2")


def test_situation_22_every_node_that_was_passed_over_is_there_with_its_reason() -> None:
    nodes = [
        node("sick", cordoned=True), node("cold", ready=False), node("ill", cordoned=True),
        node("small", allocatable={"cpu": 0.1}), node("arm", labels={"kubernetes.io/arch": "arm64"}),
        node("left", labels={"tandem.dev/managed": "false"}), node("well"),
    ]  # fmt: skip
    found = pair(world(*nodes), suspect={"nodeName": "sick"})
    assert why(found) == {
        "cold": "NodeNotReady", "ill": "Quarantined", "small": "TooSmall", "arm": "Unlike", "left": "OptedOut",
    }  # fmt: skip


def test_situation_23_a_node_with_7_of_8_gpus_is_named_at_once_or_paired_with_7() -> None:
    sick = node("sick", gpus=8, cordoned=True, allocatable={"nvidia.com/gpu": 7.0})
    found = none(world(sick, node("well", gpus=8)))
    assert found.reason == "DevicesMissing"
    assert "7 of its 8 nvidia.com/gpu" in found.message
    # The plugin may drop the sick device from the capacity too; the label still knows.
    dropped = node("sick", gpus=8, cordoned=True, capacity={"nvidia.com/gpu": 7.0}, allocatable={"nvidia.com/gpu": 7.0})
    assert none(world(dropped, node("well", gpus=8))).reason == "DevicesMissing"
    left = pair(world(dropped, node("well", gpus=8)), resources={"devices": "allocatable"})
    assert left.share == Share(Device.NVIDIA, devices=7, tp=4, has=8)
    assert left.suspect_reason == "cordoned; computes on 4 of its 8 nvidia.com/gpu"


@pytest.mark.parametrize("counted", [7, 8])
def test_a_label_that_follows_the_loss_does_not_make_the_node_unlike(counted: int) -> None:
    """GPU feature discovery counts what the plugin offers: a run of what is left compares no numbers."""
    amounts = {"nvidia.com/gpu": 7.0}
    sick = node(
        "sick",
        gpus=8,
        cordoned=True,
        capacity=amounts,
        allocatable=amounts,
        labels={"nvidia.com/gpu.count": str(counted)},
    )
    found = pair(world(sick, node("well", gpus=8)), resources={"devices": "allocatable"})
    assert (found.reference.name, found.share.devices, found.share.has) == ("well", 7, counted)
    other = node("well", gpus=8, labels={"nvidia.com/gpu.product": "NVIDIA-A100"})
    assert why(none(world(sick, other), resources={"devices": "allocatable"}))["well"] == "Unlike"
    assert none(world(sick, node("well", gpus=8))).reason in ("NoReference", "DevicesMissing")


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("left", range(1, 9))
def test_every_preset_runs_on_whatever_is_left(preset: str, left: int) -> None:
    """On as many devices as it can be split over, and on no fewer."""
    sick = node("sick", gpus=8, cordoned=True, allocatable={"nvidia.com/gpu": float(left)})
    workload = {"model": preset}
    found = pair(world(sick, node("well", gpus=8)), workload=workload, resources={"devices": "allocatable"})
    fits = []
    for tp in range(1, left + 1):
        with suppress(SpecError):
            resolve(RunSpec(model=preset, tp=tp))
            fits.append(tp)
    assert found.share == Share(Device.NVIDIA, devices=left, tp=max(fits), has=8)
    assert ("of its 8" in found.suspect_reason) is (max(fits) < 8)


@pytest.mark.parametrize(
    ("workload", "offers", "outcome"),
    [
        ({"tp": 2}, 8, 2),
        ({"tp": 4, "weights": "/w"}, 7, 4),
        ({"weights": "/w"}, 8, 8),
        ({"weights": "/w", "model": "llama3-8b"}, 7, 4),
        ({"tp": 9, "weights": "/w"}, 8, ("ImpossibleTP", True)),
        ({"tp": 8, "model": "paper-16l"}, 7, ("ImpossibleTP", False)),
        ({"tp": 3}, 8, ("ImpossibleTP", True)),
        ({"tp": 8}, 8, ("ImpossibleTP", True)),
        ({"optimizer": [{"name": "colour", "value": "1"}]}, 8, ("InvalidSpec", True)),
    ],
)
def test_what_a_tp_that_is_asked_for_comes_to(workload: dict[str, Any], offers: int, outcome: Any) -> None:
    sick = node("sick", gpus=8, cordoned=True, allocatable={"nvidia.com/gpu": float(offers)})
    where = world(sick, node("well", gpus=8))
    found = choose(spec(workload=workload, resources={"devices": "allocatable"}), where, POLICY)
    if isinstance(found, Pairing):
        assert found.share == Share(Device.NVIDIA, devices=offers, tp=outcome, has=8)
    else:
        assert (found.reason, found.final) == outcome
        assert "\n" not in found.message


def test_a_device_plugin_that_is_gone_is_told_and_never_becomes_a_cpu_run() -> None:
    sick = node("sick", gpus=8, cordoned=True, capacity={"nvidia.com/gpu": 0.0}, allocatable={"nvidia.com/gpu": 0.0})
    found = none(world(sick, node("well", gpus=8)), resources={"devices": "allocatable"})
    assert found.reason == "NoDevices"


def test_the_pods_that_hold_devices_on_an_undrained_suspect_are_named() -> None:
    sick = node("sick", gpus=8, cordoned=True)
    held = use("trainer-0", "sick", nvidia_com__gpu=2.0)
    found = none(world(sick, node("well", gpus=8), pods=[held]))
    assert found.reason == "SuspectNotDrained"
    assert "default/trainer-0" in found.message


def test_capacity_is_what_is_free_on_the_reference_too() -> None:
    sick = node("sick", gpus=8, cordoned=True)
    held = use("trainer-0", "well", nvidia_com__gpu=1.0)
    found = none(world(sick, node("well", gpus=8), pods=[held]))
    assert why(found)["well"] == "NoRoom"
    assert "default/trainer-0" in found.message


@pytest.mark.parametrize(
    ("topology", "chips", "multi"),
    [("2x4", 8, False), ("2x4", 4, True), ("4x4x4", 4, True), ("1x1", 1, False), ("odd", 4, False)],
)
def test_hosts_of_multi_host_slices_are_refused_by_name(topology: str, chips: int, multi: bool) -> None:
    tpu = {"labels": {"cloud.google.com/gke-tpu-topology": topology, "cloud.google.com/gke-tpu-accelerator": "v5e"}}
    amounts = {"capacity": {"google.com/tpu": float(chips)}, "allocatable": {"google.com/tpu": float(chips)}}
    sick, well = node("sick", cordoned=True, **tpu, **amounts), node("well", **tpu, **amounts)
    assert multi_host_slice(sick, [sick, well], POLICY) is multi
    found = choose(spec(), world(sick, well), POLICY)
    if multi:
        assert isinstance(found, NoPairing)
        assert found.reason == "MultiHostSliceUnsupported"
    else:
        assert isinstance(found, Pairing)
        assert (found.share.device, found.share.devices) == ("google.com/tpu", chips)


def tpu(name: str, offers: int, topology: str = "2x4", machine: str = "", chips: str = "", **more: Any) -> Node:
    labels = {"cloud.google.com/gke-tpu-topology": topology, "cloud.google.com/gke-tpu-accelerator": "v5e"}
    labels |= {"node.kubernetes.io/instance-type": machine} if machine else {}
    labels |= {"cloud.google.com/gke-accelerator-count": chips} if chips else {}
    amounts = {"google.com/tpu": float(offers)}
    return node(name, labels=labels, capacity=amounts, allocatable=amounts, **more)


@pytest.mark.parametrize(
    ("offers", "labels", "others", "reason"),
    [
        (0, {}, (8,), "NoDevices"),
        (0, {}, (0,), "NoDevices"),
        (7, {}, (8,), "DevicesMissing"),
        (7, {}, (7,), "DevicesMissing"),
        (4, {}, (8,), "DevicesMissing"),
        (4, {"machine": "ct5lp-hightpu-8t"}, (4,), "DevicesMissing"),
        (4, {"chips": "8"}, (4,), "DevicesMissing"),
        (0, {"machine": "ct5lp-hightpu-4t"}, (0,), "MultiHostSliceUnsupported"),
        (0, {"chips": "4"}, (0,), "MultiHostSliceUnsupported"),
        (0, {}, (4,), "MultiHostSliceUnsupported"),
        (3, {}, (4,), "MultiHostSliceUnsupported"),
    ],
)
def test_chips_that_a_plugin_dropped_make_no_slice_of_several_hosts(
    offers: int, labels: dict[str, str], others: tuple[int, ...], reason: str
) -> None:
    """How many a host has is known from its labels or from its like, not from what it offers while it is sick."""
    sick = tpu("sick", offers, cordoned=True, **labels)  # type: ignore[arg-type]
    well = [tpu(f"well-{i}", n, **labels) for i, n in enumerate(others)]  # type: ignore[arg-type]
    found = none(world(sick, *well))
    assert found.reason == reason
    assert ("of its 8 google.com/tpu" in found.message) is (reason == "DevicesMissing")


WISHES: list[dict[str, Any]] = [
    {}, {"workload": {"model": "small"}}, {"workload": {"model": "paper-16l", "durationSeconds": 60}},
    {"workload": {"tp": 2}}, {"workload": {"tp": 8, "model": "paper-16l"}}, {"workload": {"weights": "/w"}},
    {"kind": "null"}, {"resources": {"devices": "allocatable"}}, {"resources": {"device": "cpu"}},
]  # fmt: skip


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("gpus", [0, 1, 4, 8])
def test_what_the_schema_fills_in_is_no_wish(wish: dict[str, Any], gpus: int) -> None:
    """An API server stores each default as if the user had written it: it must change neither the run nor the pair."""
    where = world(node("sick", gpus=gpus, cordoned=True), node("well", gpus=gpus), node("well-2", gpus=gpus))
    written, full = read_spec(wish), read_spec(stored(wish))
    assert written.run == full.run
    assert choose(written, where, POLICY) == choose(full, where, POLICY)


def test_situations_4_and_8_a_null_pair_takes_two_healthy_nodes_and_a_swap_another_reference() -> None:
    sick, one, two = node("sick", cordoned=True), node("one"), node("two")
    found = pair(world(sick, one, two), kind="null")
    assert {found.suspect.name, found.reference.name} == {"one", "two"}
    assert none(world(sick, one), kind="null").reason == "NoReference"
    assert none(world(sick, one), kind="null", suspect={"nodeName": "sick"}).reason == "Quarantined"
    swapped = pair(world(sick, one, two, used_before={"sick": frozenset({"one"})}), kind="swap")
    assert swapped.reference.name == "two"
    only = none(world(sick, one, used_before={"sick": frozenset({"one"})}), kind="swap")
    assert why(only)["one"] == "UsedBefore"


def test_situation_25_attempts_are_capped_per_node() -> None:
    sick, one, two = node("sick", cordoned=True), node("one"), node("two")
    assert pair(world(sick, one, two, tried={"one": 1})).reference.name == "two"
    found = pair(world(sick, one, two, tried={"one": 2}))
    assert why(found)["one"] == "AttemptsUsed"
    assert none(world(sick, one, tried={"one": 2})).reason == "NoReference"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"suspect": {"nodeName": "nowhere"}}, "UnknownNode"),
        ({"reference": {"nodeName": "nowhere"}}, "UnknownNode"),
        ({"suspect": {"selector": {"matchLabels": {"x": "y"}}}}, "NoSuspect"),
        ({"reference": {"selector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}}, "NoReference"),
    ],
)
def test_what_is_not_there_is_named(values: dict[str, Any], reason: str) -> None:
    found = none(world(node("sick", cordoned=True), node("well")), **values)
    assert found.reason == reason
    assert "\n" not in found.message
    assert found.message


def test_a_named_suspect_need_not_be_quarantined() -> None:
    found = pair(world(node("a"), node("b")), suspect={"nodeName": "a"})
    assert (found.suspect.name, found.suspect_reason) == ("a", "named")
    assert none(world(node("a"), node("b"))).reason == "NoSuspect"


def test_a_cluster_of_nobody() -> None:
    assert none(world()).reason == "NoSuspect"
    assert none(world(node("sick", cordoned=True))).reason == "NoReference"


@given(
    st.lists(
        st.builds(
            lambda name, gpus, cordoned, ready: node(f"n{name}", gpus=gpus, cordoned=cordoned, ready=ready),
            st.integers(0, 9), st.sampled_from([0, 8]), st.booleans(), st.booleans(),
        ),
        max_size=8, unique_by=lambda n: n.name,
    ),
    st.randoms(),
)  # fmt: skip
def test_the_choice_does_not_depend_on_the_order_and_is_always_sound(nodes: list[Node], random: Any) -> None:
    """Whatever the nodes are: the pair is alike, Ready, distinct, one of it quarantined; and nothing is left unsaid."""
    found = choose(spec(), world(*nodes), POLICY)
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert choose(spec(), world(*shuffled), POLICY) == found
    if isinstance(found, Pairing):
        assert found.suspect.name != found.reference.name
        assert found.suspect.ready
        assert found.reference.ready
        assert quarantine_signs(found.suspect, POLICY)
        assert not quarantine_signs(found.reference, POLICY)
        assert found.suspect.labels == found.reference.labels
    else:
        assert found.message


# -- claims ------------------------------------------------------------------------------------------------


def test_nodes_of_live_runs_are_claimed_and_a_run_never_stands_in_its_own_way() -> None:
    finished = {"type": "Finished", "status": "True", "reason": "Match", "lastTransitionTime": "t"}
    attempt = {"number": 1, "suspect": {"node": "s"}, "reference": {"node": "r"}, "startedAt": "t"}

    def run_of(name: str, **values: Any) -> dict[str, Any]:
        return {"metadata": {"namespace": "ns", "name": name}, "status": {"attempts": [attempt], **values}}

    found = claims(
        [
            run_of("live"),
            run_of("between", attempts=[attempt | {"endedAt": "t"}]),
            run_of("done", conditions=[finished]),
            {"metadata": {"namespace": "ns", "name": "new"}},
        ]
    )
    assert [(c.pairrun, c.suspect, c.reference) for c in found] == [("ns/live", "s", "r"), ("ns/between", "s", "")]


# -- reading objects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("500m", 0.5), ("2Gi", 2 * 2**30), ("1k", 1000), ("1e3", 1000), ("", 0), ("x", 0), (None, 0), (3, 3)],
)
def test_quantities(text: Any, value: float) -> None:
    assert quantity(text) == value


def test_a_pods_use_is_what_the_scheduler_counts() -> None:
    def container(**requests: str) -> dict[str, Any]:
        return {"resources": {"requests": requests}}

    obj = {
        "metadata": {"namespace": "a", "name": "p"},
        "spec": {
            "nodeName": "n",
            "containers": [container(cpu="1"), {"resources": {"limits": {"nvidia.com/gpu": "2"}}}],
            "initContainers": [container(cpu="3"), container(cpu="500m") | {"restartPolicy": "Always"}],
            "overhead": {"cpu": "100m"},
        },
        "status": {"phase": "Running"},
    }
    found = pod_use_from(obj)
    assert found is not None
    assert found.requests == pytest.approx({"cpu": 3.1, "nvidia.com/gpu": 2.0})
    whole = pod_use_from(obj | {"spec": obj["spec"] | {"resources": {"requests": {"cpu": "6", "memory": "1Gi"}}}})
    assert whole is not None
    assert whole.requests == pytest.approx({"cpu": 6.1, "nvidia.com/gpu": 2.0, "memory": 2.0**30})
    for phase in ("Succeeded", "Failed"):
        assert pod_use_from({**obj, "status": {"phase": phase}}) is None
    assert pod_use_from({"metadata": {}, "spec": {}}) is None


def test_a_node_whose_object_lacks_everything_is_read_as_not_ready() -> None:
    found = node_from({"metadata": {"name": "bare"}})
    assert (found.name, found.ready, found.taints) == ("bare", False, ())


@pytest.mark.parametrize(("tp", "final"), [(3, True), (8, False)])
def test_what_no_suspect_can_ever_do_is_final(tp: int, final: bool) -> None:
    """As with one suspect: a run that waits for what cannot come is told so."""
    seen = world(node("sick-1", gpus=8, cordoned=True), node("sick-2", gpus=8, cordoned=True))
    found = none(seen, workload={"model": "paper-16l", "tp": tp})
    assert found.final is final
    assert (found.reason == "ImpossibleTP") is final
