"""The API in the chart: who reaches it, what it reaches, what it may do, how it is kept alive."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import yaml

from chart.rendering import CHART, NAMESPACE, Manifest, named, objects, of_kind, parse, template
from tandem.pairing.policy import read_policy
from tandem.spec import validate
from tandem_api.parts import WRITES
from tandem_api.settings import Settings

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
helm = pytest.mark.needs("helm")
OTHERS = {"namespace", "hosts", "loopbackOnly"}
"""Settings that are no values: the release's own; Host headers, which probes and scrapes do not know; one machine's."""
WITH = ("defaults", "existing database", "everything")


def deployment(choice: str) -> tuple[Manifest, Manifest]:
    """The pod's spec, and its container."""
    spec = named(choice, "Deployment", "tandem-api")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def test_the_schema_of_the_settings_is_that_of_the_api() -> None:
    model = Settings.model_json_schema(by_alias=True)

    def plain(schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            schema = model["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        kept = {k: v for k, v in schema.items() if k not in ("title", "description", "default", "$defs")}
        return (
            kept | {"properties": {k: plain(v) for k, v in kept["properties"].items()}}
            if "properties" in kept
            else kept
        )

    wanted = plain(model)
    wanted["properties"] = {k: v for k, v in wanted["properties"].items() if k not in OTHERS}
    assert SCHEMA["properties"]["api"]["properties"]["settings"] == wanted


def test_the_question_of_helm_test_is_a_program() -> None:
    ast.parse((CHART / "files" / "ask_api.py").read_text())


@helm
@pytest.mark.parametrize("choice", WITH)
def test_the_api_can_read_its_settings_and_policy(choice: str) -> None:
    data = named(choice, "ConfigMap", "tandem-api")["data"]
    settings = validate(Settings, yaml.safe_load(data["settings.yaml"]), "settings")
    policy = yaml.safe_load(data["policy.yaml"])
    read_policy(policy)
    assert policy == yaml.safe_load(named(choice, "ConfigMap", "tandem-controller")["data"]["policy.yaml"])
    asked = (
        {
            "writes": {"burst": 5},
            "body_limit": 2_000_000,
            "audiences": ["tandem", "sre"],
            "trusted_proxies": ["10.0.0.7", "10.1.0.0/16"],
        }
        if choice == "everything"
        else {}
    )
    assert settings == Settings.model_validate({"namespace": NAMESPACE, **asked})


@helm
@pytest.mark.parametrize("choice", WITH)
def test_its_files_are_where_it_is_told_that_they_are(choice: str) -> None:
    spec, container = deployment(choice)
    places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"][0] == "api"
    assert container["args"][1:] == [
        "--config", f"{places['config']}/settings.yaml", "--policy", f"{places['config']}/policy.yaml",
    ]  # fmt: skip
    (database,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "database"]
    (item,) = database["items"]
    assert container["env"] == [{"name": "TANDEM_DB_FILE", "value": f"{places['database']}/{item['path']}"}]
    wanted = ("records-api", "uri") if choice == "existing database" else ("tandem-database", "uri")
    assert (database["secretName"], item["key"]) == wanted
    assert named(choice, "ConfigMap", spec["volumes"][0]["configMap"]["name"])


@helm
def test_no_probe_asks_for_the_database() -> None:
    """Else the pod would be killed, or no launch find its way to it, while PostgreSQL is away."""
    spec, container = deployment("defaults")
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert set(map(str, probes.values())) == {str({"path": "/healthz", "port": "http"})}
    assert "initContainers" not in spec


@helm
def test_the_monitor_finds_the_service_and_its_port() -> None:
    monitor = named("everything", "ServiceMonitor", "tandem-api")["spec"]
    found = [s for s in of_kind("everything", "Service")
             if monitor["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()]  # fmt: skip
    assert [service["metadata"]["name"] for service in found] == ["tandem-api"]
    (endpoint,) = monitor["endpoints"]
    (port,) = found[0]["spec"]["ports"]
    _, container = deployment("everything")
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] in [p["name"] for p in container["ports"]]


@helm
def test_annotations_are_the_other_way_to_its_metrics() -> None:
    _, container = deployment("everything")
    annotations = named("everything", "Deployment", "tandem-api")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == str(container["ports"][0]["containerPort"])
    plain = named("defaults", "Deployment", "tandem-api")["spec"]["template"]["metadata"]["annotations"]
    assert "prometheus.io/scrape" not in plain


@helm
@pytest.mark.parametrize("choice", WITH)
def test_its_rights_are_those_that_the_docs_name(choice: str) -> None:
    def rights(kind: str, name: str) -> set[tuple[str, str]]:
        return {(what, verb) for rule in named(choice, kind, name)["rules"]
                for what in rule["resources"] for verb in rule["verbs"]}  # fmt: skip

    assert rights("Role", "tandem-api") == {("pairruns", v) for v in ("get", "list", "watch", "create", "delete")}
    assert rights("ClusterRole", f"{NAMESPACE}-tandem-api") == {
        ("nodes", "get"), ("nodes", "list"), ("pods", "list"), ("tokenreviews", "create"),
        ("subjectaccessreviews", "create"),
    }  # fmt: skip


@helm
def test_the_roles_for_people_open_what_the_api_asks_for() -> None:
    def verbs(name: str) -> set[str]:
        rules = named("defaults", "ClusterRole", f"{NAMESPACE}-tandem-{name}")["rules"]
        return {verb for rule in rules if "pairruns" in rule["resources"] for verb in rule["verbs"]}

    assert verbs("editor") >= {"get", "list", *WRITES}
    assert verbs("viewer") >= {"get", "list"}
    assert not verbs("viewer") & set(WRITES)


@helm
def test_it_reaches_names_the_api_server_and_postgresql_and_nothing_else() -> None:
    spec = named("defaults", "NetworkPolicy", "tandem-api")["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    dns, kubernetes, database = spec["egress"]
    assert {(p["protocol"], p["port"]) for p in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert {"namespaceSelector", "podSelector"} == set(dns["to"][0])
    assert dns["to"][1] == {"ipBlock": {"cidr": "169.254.20.10/32"}}
    assert [p["port"] for p in kubernetes["ports"]] == [443, 6443]
    assert [p["port"] for p in database["ports"]] == [5432]
    (peer,) = database["to"]
    labels = named("defaults", "StatefulSet", "tandem-postgres")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    outside = named("existing database", "NetworkPolicy", "tandem-api")["spec"]["egress"]
    assert outside[2] == {"ports": [{"protocol": "TCP", "port": 5432}]}
    narrow = named("everything", "NetworkPolicy", "tandem-api")["spec"]["egress"]
    assert narrow[1]["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]


@helm
def test_who_may_ask_is_who_the_values_name_and_prometheus_and_helm_test() -> None:
    (anyone,) = named("defaults", "NetworkPolicy", "tandem-api")["spec"]["ingress"]
    assert anyone["from"] == [{"namespaceSelector": {}}]
    (some,) = named("everything", "NetworkPolicy", "tandem-api")["spec"]["ingress"]
    *given, test = some["from"]
    assert given == [
        {"namespaceSelector": {"matchLabels": {"team": "sre"}}},
        {"podSelector": {"matchLabels": {"app": "p"}}},
    ]
    pod = named("everything", "Pod", "tandem-test-api")
    assert test["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [p["port"] for p in some["ports"]] == [8080]


@helm
def test_an_ingress_only_when_asked_and_with_a_host() -> None:
    assert not of_kind("defaults", "Ingress")
    spec = named("everything", "Ingress", "tandem-api")["spec"]
    assert (spec["ingressClassName"], spec["tls"]) == (
        "nginx",
        [{"secretName": "tls", "hosts": ["tandem.example.com"]}],
    )
    (rule,) = spec["rules"]
    service = rule["http"]["paths"][0]["backend"]["service"]
    assert service["port"]["name"] in [
        p["name"] for p in named("everything", "Service", service["name"])["spec"]["ports"]
    ]
    done = template("--set", "api.ingress.enabled=true")
    assert done.returncode != 0
    assert "api.ingress.host: name the host" in done.stderr


@helm
def test_a_disruption_budget_with_more_than_one_replica() -> None:
    budgets = {choice: {one["metadata"]["name"] for one in of_kind(choice, "PodDisruptionBudget")} for choice in WITH}
    assert budgets["everything"] == {"tandem-controller", "tandem-api"}
    assert budgets["defaults"] == set()


@helm
def test_the_test_s_token_is_for_an_audience_of_the_api() -> None:
    def source(*settings: str) -> dict[str, Any]:
        (pod,) = [one for one in parse(template(*settings).stdout) if one["metadata"]["name"] == "tandem-test-api"]
        found: dict[str, Any] = pod["spec"]["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"]
        return found

    assert source()["audience"] == "tandem"
    assert source("--set", "api.settings.audiences={sre,tandem}")["audience"] == "sre"
    assert "audience" not in source("--set-json", "api.settings.audiences=[]")


@helm
def test_without_it_nothing_of_it_is_left() -> None:
    def whose(one: Manifest) -> str:
        return str(one["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))

    left = [
        one["metadata"]["name"] for one in objects("least") if whose(one) == "api" or "-api" in one["metadata"]["name"]
    ]
    assert left == []
