"""The objects of an attempt: what each pod gets, and what it must never get."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from clusters import SETTINGS, attempt
from tandem.pairrun.spec import Device
from tandem.spec import RunSpec
from tandem.vocabulary import Role
from tandem.worker_io import DATABASE_FOLDER, LINK_FOLDER
from tandem_controller import manifests
from tandem_controller.manifests import Attempt
from tandem_controller.settings import Settings


def pod(role: Role, **values: Any) -> dict[str, Any]:
    found: dict[str, Any] = manifests.job(attempt(**values), role, SETTINGS)["spec"]["template"]["spec"]
    return found


def everything(a: Attempt) -> list[dict[str, Any]]:
    keys = (b"a" * 40, b"b" * 40)
    return [
        manifests.service(a), *manifests.network_policies(a, SETTINGS.worker),
        *(manifests.link_secret(a, role, keys, b"c" * 40) for role in Role),
        *(manifests.job(a, role, SETTINGS) for role in Role),
    ]  # fmt: skip


def test_every_child_carries_owner_attempt_and_pair_and_a_name_of_its_own() -> None:
    a = attempt()
    found = everything(a)
    names = [(o["kind"], o["metadata"]["name"]) for o in found]
    assert len(set(names)) == len(names)
    for obj in found:
        meta = obj["metadata"]
        [owner] = meta["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("PairRun", a.uid, True)
        assert meta["labels"]["tandem.dev/attempt"] == "3"
        assert meta["labels"]["tandem.dev/pair"] == f"{a.uid}-3"
    later = {(o["kind"], o["metadata"]["name"]) for o in everything(replace(a, number=4))}
    assert not later & set(names)


@pytest.mark.parametrize("role", list(Role))
def test_pods_are_pinned_through_the_scheduler_and_never_retried(role: Role) -> None:
    job = manifests.job(attempt(), role, SETTINGS)["spec"]
    there = job["template"]["spec"]
    assert "nodeName" not in there
    [term] = there["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    node = {"sick": Role.SUSPECT, "well": Role.REFERENCE}
    [field] = term["matchFields"]
    assert (field["key"], node[field["values"][0]]) == ("metadata.name", role)
    assert (job["backoffLimit"], there["restartPolicy"], job["podReplacementPolicy"]) == (0, "Never", "Failed")
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"FailJob"}
    assert job["template"]["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


@pytest.mark.parametrize("role", list(Role))
def test_pods_have_the_installations_priority_class_unless_the_template_names_one(role: Role) -> None:
    worker = SETTINGS.worker.model_copy(update={"priority_class": "tandem-worker"})
    settings = SETTINGS.model_copy(update={"worker": worker})

    def shown(**template: str) -> str:
        one = attempt(spec={"template": template})
        return str(manifests.job(one, role, settings)["spec"]["template"]["spec"]["priorityClassName"])

    assert shown() == "tandem-worker"
    assert shown(priorityClassName="other") == "other"


@pytest.mark.parametrize("role", list(Role))
def test_pods_are_restricted_and_without_a_token(role: Role) -> None:
    there = pod(role)
    assert there["automountServiceAccountToken"] is False
    assert there["securityContext"]["runAsNonRoot"]
    assert there["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    [container] = there["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_the_suspect_has_no_database_and_each_side_only_its_own_keys() -> None:
    """The suspect is untrusted: nothing in its pod names the database, not even the name of a Secret."""
    a = attempt()
    suspect, reference = pod(Role.SUSPECT), pod(Role.REFERENCE)
    assert "database" not in json.dumps(suspect).lower()
    assert any(m["mountPath"] == DATABASE_FOLDER for m in reference["containers"][0]["volumeMounts"])
    for role, there in ((Role.SUSPECT, suspect), (Role.REFERENCE, reference)):
        secrets = [v["secret"]["secretName"] for v in there["volumes"] if "secret" in v]
        assert a.name(role) in secrets
        assert a.name(Role.SUSPECT if role is Role.REFERENCE else Role.REFERENCE) not in secrets
        assert any(m["mountPath"] == LINK_FOLDER and m["readOnly"] for m in there["containers"][0]["volumeMounts"])
    own = manifests.link_secret(a, Role.SUSPECT, (b"public", b"secret"), b"peer")
    assert own["immutable"] is True
    assert {name: base64.b64decode(value) for name, value in own["data"].items()} == {
        "own.public": b"public", "own.secret": b"secret", "peer.public": b"peer",
    }  # fmt: skip


def test_situation_30_tolerations_name_their_keys_and_noexecute_has_no_time_limit() -> None:
    for role in Role:
        tolerations = pod(role)["tolerations"]
        assert all(t.get("key") for t in tolerations)
        assert not any("tolerationSeconds" in t for t in tolerations)
        keys = {t["key"] for t in tolerations}
        assert {"nvidia.com/gpu", "team"} <= keys
        assert ("nvidia.com/gpu-xid" in keys) is (role is Role.SUSPECT)


def test_both_sides_run_the_same_spec_image_environment_and_devices() -> None:
    sides = [pod(role, device=Device.NVIDIA, devices=8, node_devices=9, run=RunSpec(tp=8)) for role in Role]
    containers = [there["containers"][0] for there in sides]
    assert containers[0]["image"] == containers[1]["image"]
    assert containers[0]["resources"] == containers[1]["resources"]
    assert containers[0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    values = [{e["name"]: e.get("value") for e in c["env"]} for c in containers]
    own = {"TANDEM_ROLE", "TANDEM_ENDPOINT", "TANDEM_SUSPECT_NODE", "TANDEM_METRICS_PORT"}
    assert {k: v for k, v in values[0].items() if k not in own} == {k: v for k, v in values[1].items() if k not in own}
    assert json.loads(values[0]["TANDEM_SPEC"] or "")["tp"] == 8
    assert values[0]["XLA_FLAGS"] == "--x"
    assert values[0]["TANDEM_NODE_DEVICES"] == "9"
    for there in sides:
        assert {"user-weights", "user-cache"} <= {v["name"] for v in there["volumes"]}


def test_the_suspect_may_reach_its_partners_port_and_dns_and_nobody_reaches_it() -> None:
    a = attempt()
    suspect, reference = manifests.network_policies(a, SETTINGS.worker)
    assert suspect["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert suspect["spec"]["ingress"] == []
    link, dns = suspect["spec"]["egress"]
    [partner] = link["to"]
    assert partner["podSelector"]["matchLabels"] == {"tandem.dev/pair": f"{a.uid}-3", "tandem.dev/role": "reference"}
    assert [p["port"] for p in link["ports"]] == [7733]
    assert {p["port"] for p in dns["ports"]} == {53}
    assert all("ipBlock" in to or "namespaceSelector" in to for to in dns["to"])
    assert reference["spec"]["policyTypes"] == ["Ingress"]
    allowed, scraped = reference["spec"]["ingress"]
    assert scraped == {"ports": [{"protocol": "TCP", "port": 7734}]}
    assert allowed["from"][0]["podSelector"]["matchLabels"]["tandem.dev/role"] == "suspect"


def test_no_rule_of_a_policy_is_open_to_everybody_by_an_empty_list() -> None:
    """To Kubernetes no peer means every peer: settings that name none are refused."""
    with pytest.raises(ValidationError, match="dns"):
        Settings.model_validate({"namespace": "tandem", "worker": {"image": "worker:1", "dns": []}})
    for policy in manifests.network_policies(attempt(), SETTINGS.worker):
        for rule in [*policy["spec"].get("egress", []), *policy["spec"]["ingress"]]:
            assert rule["ports"]
            assert rule.get("to", True)
            assert rule.get("from", True)
        assert all("to" in rule for rule in policy["spec"].get("egress", []))


def test_the_service_resolves_before_the_pods_are_ready() -> None:
    found = manifests.service(attempt())
    assert found["spec"]["publishNotReadyAddresses"] is True
    assert found["spec"]["clusterIP"] == "None"
    endpoint = {e["name"]: e.get("value") for e in pod(Role.SUSPECT)["containers"][0]["env"]}["TANDEM_ENDPOINT"]
    there = pod(Role.REFERENCE)
    assert endpoint == f"tcp://{there['hostname']}.{found['metadata']['name']}.tandem.svc:7733"
    assert there["subdomain"] == found["metadata"]["name"]


def test_only_the_reference_answers_scrapes_and_only_where_that_is_asked_for() -> None:
    def told(role: Role, settings: Settings) -> tuple[set[str], set[str], set[str]]:
        template = manifests.job(attempt(), role, settings)["spec"]["template"]
        [container] = template["spec"]["containers"]
        names = {e["name"] for e in container["env"]} & {"TANDEM_SUSPECT_NODE", "TANDEM_METRICS_PORT"}
        scraped = {k for k in template["metadata"]["annotations"] if k.startswith("prometheus.io/")}
        return {p["name"] for p in container["ports"]}, names, scraped

    def with_metrics(**values: Any) -> Settings:
        return Settings.model_validate({"namespace": "tandem", "worker": {"image": "worker:1", "metrics": values}})

    both = {"TANDEM_SUSPECT_NODE", "TANDEM_METRICS_PORT"}
    annotations = {"prometheus.io/scrape", "prometheus.io/port", "prometheus.io/path"}
    assert told(Role.REFERENCE, with_metrics()) == ({"link", "metrics"}, both, set())
    assert told(Role.REFERENCE, with_metrics(annotations=True)) == ({"link", "metrics"}, both, annotations)
    assert told(Role.REFERENCE, with_metrics(enabled=False, annotations=True)) == ({"link"}, set(), set())
    assert told(Role.SUSPECT, with_metrics(annotations=True)) == (set(), set(), set())
    peers = [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]
    suspect, reference = manifests.network_policies(attempt(), with_metrics(**{"from": peers}).worker)
    assert reference["spec"]["ingress"][1]["from"] == peers
    assert suspect["spec"]["ingress"] == []
    assert not any(7734 in [p["port"] for p in rule["ports"]] for rule in suspect["spec"]["egress"])
    _, closed = manifests.network_policies(attempt(), with_metrics(enabled=False).worker)
    assert len(closed["spec"]["ingress"]) == 1
