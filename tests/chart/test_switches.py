"""What single values change."""

from __future__ import annotations

import json

import pytest
import yaml

from chart.rendering import CHART, NAMESPACE, Manifest, named, objects, of_kind, parse, template
from tandem.pairing.policy import read_policy
from tandem.pairrun.spec import Device, read_spec
from tandem.vocabulary import Kind

pytestmark = pytest.mark.needs("helm")


def render(*settings: str) -> list[Manifest]:
    done = template(*(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def one(rendered: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [each for each in rendered if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def test_the_crd_is_the_generated_one_with_the_chart_s_metadata() -> None:
    """Through Helm's YAML and back: no number becomes a float, no text another."""
    (rendered,) = of_kind("defaults", "CustomResourceDefinition")
    generated = yaml.safe_load((CHART / "files" / "crd.yaml").read_text())
    assert rendered["spec"] == generated["spec"]
    assert json.dumps(rendered["spec"], sort_keys=True) == json.dumps(generated["spec"], sort_keys=True)
    assert rendered["metadata"]["name"] == generated["metadata"]["name"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (free,) = [one for one in render("crds.keep=false") if one["kind"] == "CustomResourceDefinition"]
    assert "annotations" not in free["metadata"]
    assert not of_kind("least", "CustomResourceDefinition")


def test_a_policy_list_replaces_the_shipped_one_and_the_others_stay() -> None:
    """For the controller, which pairs, and the API, which tells what would be paired."""
    found = [one for one in render("policy.deviceTaints={example.com/npu}") if one["kind"] == "ConfigMap"]
    assert len(found) == 2
    for config in found:
        policy = read_policy(yaml.safe_load(config["data"]["policy.yaml"]))
        assert policy.device_taints == ["example.com/npu"]
        assert policy.quarantine == read_policy({}).quarantine


def test_a_change_of_settings_starts_new_controller_pods() -> None:
    def checksum(*settings: str) -> str:
        deployment = one(render(*settings), "Deployment", "tandem-controller")
        return deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert checksum() == checksum()
    assert len({checksum(), checksum("controller.workers=5"), checksum("policy.runsPerReference=2")}) == 3


def test_another_image_or_database_is_another_migration_job() -> None:
    """A Job cannot be changed."""

    def name(*settings: str) -> str:
        (job,) = [one for one in render(*settings) if one["kind"] == "Job" and "migrate" in one["metadata"]["name"]]
        return job["metadata"]["name"]

    names = [name(), name("controller.image.tag=0.2.0"), name("database.existingSecret=records")]
    assert len(set(names)) == 3
    assert name() == names[0]


@pytest.mark.parametrize(
    ("settings", "controller", "worker"),
    [
        ((), "tandem-controller:0.1.0", "tandem-worker:0.1.0-cpu"),
        (("worker.accelerator=tpu",), "tandem-controller:0.1.0", "tandem-worker:0.1.0-tpu"),
        (("image.registry=r.io/a/",), "r.io/a/tandem-controller:0.1.0", "r.io/a/tandem-worker:0.1.0-cpu"),
        (("worker.image.tag=mine", "controller.image.repository=c"), "c:0.1.0", "tandem-worker:mine"),
        ((f"worker.image.digest=sha256:{'0' * 64}",), "tandem-controller:0.1.0", f"tandem-worker@sha256:{'0' * 64}"),
    ],
)  # fmt: skip
def test_images(settings: tuple[str, ...], controller: str, worker: str) -> None:
    rendered = render(*settings)
    deployment = one(rendered, "Deployment", "tandem-controller")
    config = one(rendered, "ConfigMap", "tandem-controller")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == controller
    assert yaml.safe_load(config["data"]["settings.yaml"])["worker"]["image"] == worker


def test_two_releases_of_one_name_share_nothing_that_belongs_to_the_cluster() -> None:
    def names(namespace: str) -> set[tuple[str, str]]:
        done = template("--namespace", namespace, "--set", "crds.enabled=false")
        found = parse(done.stdout)
        return {(one["kind"], one["metadata"]["name"]) for one in found if "namespace" not in one["metadata"]}

    assert names("one")
    assert not names("one") & names("two")


def test_a_kept_claim_keeps_its_password() -> None:
    (claims,) = of_kind("everything", "StatefulSet")
    assert claims["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"
    assert (
        named("everything", "Secret", "tandem-database")["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    )
    (claims,) = of_kind("defaults", "StatefulSet")
    assert claims["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete"
    assert "annotations" not in named("defaults", "Secret", "tandem-database")["metadata"]


def test_a_pod_monitor_only_when_asked() -> None:
    assert not of_kind("defaults", "PodMonitor")
    monitors = [one for one in render("metrics.podMonitor.enabled=true") if one["kind"] == "PodMonitor"]
    assert {one["metadata"]["name"] for one in monitors} == {"tandem-controller", "tandem-worker"}
    (monitor,) = [one for one in monitors if one["metadata"]["name"] == "tandem-controller"]
    deployment = named("defaults", "Deployment", "tandem-controller")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_null_pair_of_helm_test_is_one_that_the_controller_reads() -> None:
    (pairrun,) = of_kind("defaults", "PairRun")
    spec = read_spec(pairrun["spec"])
    assert (spec.kind, spec.resources.device, spec.run.steps) == (Kind.NULL, Device.CPU, 2)


def test_what_a_test_run_makes_goes_with_it() -> None:
    """Helm never removes a hook's objects at uninstall."""
    made = [one for one in objects("defaults") if one["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]
    assert {one["kind"] for one in made} == {"ServiceAccount", "Role", "RoleBinding", "PairRun", "Pod"}
    for one in made:
        assert one["metadata"]["namespace"] == NAMESPACE
        policy = one["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert set(policy.split(",")) == {"before-hook-creation", "hook-succeeded", "hook-failed"}
