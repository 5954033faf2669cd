"""Properties of everything that the chart renders, in every way to install it."""

from __future__ import annotations

import base64
import re

import pytest
import yaml

from chart.rendering import CHART, CHOICES, NAMESPACE, containers, named, objects, of_kind, pods, template, text
from tandem.pairing.policy import read_policy
from tandem.pairrun.names import LABEL_ROLE, LEASE
from tandem.spec import validate
from tandem_controller.settings import Settings

pytestmark = [pytest.mark.needs("helm"), pytest.mark.parametrize("choice", CHOICES)]


def _api(choice: str) -> set[str]:
    return set() if choice == "least" else {"tandem-api"}


def test_every_pod_satisfies_pod_security_restricted(choice: str) -> None:
    for name, _, spec in pods(choice):
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        for container in containers(spec):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "limits" in container["resources"], name
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], name


def test_tokens_only_where_the_api_is_used(choice: str) -> None:
    tokens = {name: spec["automountServiceAccountToken"] for name, _, spec in pods(choice)}
    wanted = {"tandem-controller", "tandem-test", "tandem-uninstall"} | _api(choice)
    assert {name for name, token in tokens.items() if token} == wanted
    for account in of_kind(choice, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    bound = {
        s["name"]
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for b in of_kind(choice, kind)
        for s in b["subjects"]
    }
    assert bound == {"tandem-controller", "tandem-test"} | _api(choice)


def test_every_image_is_named_with_a_tag_or_digest_that_is_not_latest(choice: str) -> None:
    for name, _, spec in pods(choice):
        for container in containers(spec):
            assert re.search(r"[:@][^/]+$", container["image"]), name
            assert not container["image"].endswith(":latest"), name


def test_selectors_match_the_labels_of_pods_and_nothing_else(choice: str) -> None:
    labels = {name: meta["labels"] for name, meta, _ in pods(choice)}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, have in labels.items() if selector.items() <= have.items()}

    for one in objects(choice):
        name = one["metadata"]["name"]
        if one["kind"] in ("Deployment", "StatefulSet"):
            assert chosen(one["spec"]["selector"]["matchLabels"]) == {name}
        elif one["kind"] == "Service":
            assert chosen(one["spec"]["selector"]) == {name.removesuffix("-metrics")}
        elif one["kind"] == "PodDisruptionBudget":
            assert chosen(one["spec"]["selector"]["matchLabels"]) == {name}
        elif one["kind"] == "NetworkPolicy" and name != "tandem-suspects":  # its pods come later
            assert chosen(one["spec"]["podSelector"]["matchLabels"]) == {name}


def test_only_those_who_need_it_reach_the_trial_database(choice: str) -> None:
    labels = {name: meta["labels"] for name, meta, _ in pods(choice)}
    for policy in of_kind(choice, "NetworkPolicy"):
        if policy["metadata"]["name"] != "tandem-postgres":
            continue
        (rule,) = policy["spec"]["ingress"]
        peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
        let_in = {name for name, have in labels.items() for peer in peers if peer.items() <= have.items()}
        assert {name.partition("-migrate")[0] for name in let_in} == {"tandem", "tandem-controller"} | _api(choice)
        assert peers[-1] == {"app.kubernetes.io/component": "worker", LABEL_ROLE: "reference"}


def test_a_suspect_has_no_network_once_the_policy_of_its_attempt_is_gone(choice: str) -> None:
    """That one is the PairRun's, and goes with it; the pod may take two minutes more to end."""
    spec = named(choice, "NetworkPolicy", "tandem-suspects")["spec"]
    assert spec == {"podSelector": {"matchLabels": {LABEL_ROLE: "suspect"}}, "policyTypes": ["Ingress", "Egress"]}


def test_the_controller_is_reached_by_scrapes_and_probes_and_reaches_what_the_api_does(choice: str) -> None:
    """Names, the API server and PostgreSQL; in come only its own ports, and metrics only for those who are named."""
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(choice, "NetworkPolicy")}
    if choice == "least":
        assert "tandem-controller" not in policies
        return
    spec = policies["tandem-controller"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert spec["egress"] == policies["tandem-api"]["egress"]
    (pod,) = [pod for name, _, pod in pods(choice) if name == "tandem-controller"]
    ports = [[{"protocol": "TCP", "port": port["containerPort"]}] for port in pod["containers"][0]["ports"]]
    scrapes, probes = spec["ingress"]
    assert [scrapes["ports"], probes["ports"]] == ports
    some = [{"podSelector": {"matchLabels": {"app": "p"}}}]
    assert scrapes["from"] == (some if choice == "everything" else [{"namespaceSelector": {}}])
    assert "from" not in probes, "a kubelet is no pod"


def test_every_rule_names_its_verbs_resources_and_groups(choice: str) -> None:
    for kind in ("Role", "ClusterRole"):
        for role in of_kind(choice, kind):
            for rule in role["rules"]:
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], role["metadata"]["name"]
                assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])
                assert "nonResourceURLs" not in rule


def test_what_reaches_beyond_the_namespace_is_reading_unless_nodes_are_marked(choice: str) -> None:
    role = named(choice, "ClusterRole", f"{NAMESPACE}-tandem-nodes")
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    reading = {("nodes", "get"), ("nodes", "list"), ("nodes", "watch"), ("pods", "list"), ("namespaces", "get")}
    marks = {("nodes", "patch"), ("nodes/status", "patch")}
    assert allowed == (reading | marks if choice == "everything" else reading)


def test_the_lease_is_the_only_one_that_may_be_changed(choice: str) -> None:
    rules = named(choice, "Role", "tandem-controller")["rules"]
    leases = {
        verb: rule.get("resourceNames") for rule in rules if rule["resources"] == ["leases"] for verb in rule["verbs"]
    }
    assert leases == {"get": [LEASE], "update": [LEASE], "create": None}
    assert named(choice, "Lease", LEASE)


def test_no_secret_is_in_a_config_map_an_argument_or_a_variable(choice: str) -> None:
    values = [base64.b64decode(v).decode() for s in of_kind(choice, "Secret") for v in s["data"].values()]
    rest = yaml.safe_dump([one for one in objects(choice) if one["kind"] != "Secret"])
    assert not [value for value in values if value in rest]
    for name, _, spec in pods(choice):
        for container in containers(spec):
            assert not [v for v in container.get("env", []) if "secretKeyRef" in str(v)], name


def test_everything_is_in_the_release_s_namespace_or_in_none(choice: str) -> None:
    cluster = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "PriorityClass"}
    for one in objects(choice):
        expected = None if one["kind"] in cluster else NAMESPACE
        assert one["metadata"].get("namespace") == expected, one["metadata"]["name"]


def test_the_controller_can_read_its_settings_and_policy(choice: str) -> None:
    data = named(choice, "ConfigMap", "tandem-controller")["data"]
    settings = validate(Settings, yaml.safe_load(data["settings.yaml"]), "settings")
    read_policy(yaml.safe_load(data["policy.yaml"]))
    assert settings.namespace == NAMESPACE
    assert settings.worker.service_account in {a["metadata"]["name"] for a in of_kind(choice, "ServiceAccount")}
    if settings.worker.priority_class:
        assert named(choice, "PriorityClass", settings.worker.priority_class)["preemptionPolicy"] == "Never"
    if settings.database.name == "tandem-database":
        assert settings.database.key in named(choice, "Secret", "tandem-database")["data"]
    else:
        assert not of_kind(choice, "StatefulSet")


def test_every_setting_is_a_value_of_the_chart(choice: str) -> None:
    """None is left to a default that nobody sees, but a priority class that the values leave out."""
    given = yaml.safe_load(named(choice, "ConfigMap", "tandem-controller")["data"]["settings.yaml"])
    fields = {f.alias for f in Settings.model_fields.values()}
    worker = {f.alias for f in Settings.model_fields["worker"].annotation.model_fields.values()}  # type: ignore[union-attr]
    assert set(given) == fields
    assert worker - set(given["worker"]) <= {"priorityClass"}


def test_volumes_of_pods_are_there(choice: str) -> None:
    for name, _, spec in pods(choice):
        volumes = {volume["name"] for volume in spec["volumes"]}
        owners = [one["spec"] for one in objects(choice) if one["metadata"]["name"] == name and "spec" in one]
        volumes |= {c["metadata"]["name"] for owner in owners for c in owner.get("volumeClaimTemplates", [])}
        for container in containers(spec):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, name


def test_a_hook_runs_migrations_only_where_the_database_is_there_before(choice: str) -> None:
    """At a first install the trial database is not: a hook before would find no server, one after would never run."""
    (job,) = [job for job in of_kind(choice, "Job") if "migrate" in job["metadata"]["name"]]
    hook = job["metadata"].get("annotations", {}).get("helm.sh/hook")
    assert hook == ("pre-install,pre-upgrade" if choice == "existing database" else None)


def test_a_hook_ends_live_pairs_before_an_uninstall(choice: str) -> None:
    (job,) = [job for job in of_kind(choice, "Job") if "uninstall" in job["metadata"]["name"]]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "--uninstall"


def test_nothing_renders_differently_twice_but_the_password(choice: str) -> None:
    again = template(*CHOICES[choice]).stdout

    def without(rendered: str) -> str:
        return re.sub(r"^  (password|uri): .*$", "", rendered, flags=re.MULTILINE)

    assert without(again) == without(text(choice))


def test_values_files_say_something_else_than_the_defaults(choice: str) -> None:
    path = CHART / f"{choice}.yaml"
    if path.exists():
        assert text(choice) != text("defaults")
