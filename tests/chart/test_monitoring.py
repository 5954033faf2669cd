"""What the chart gives to Prometheus and Grafana: monitors, rules, dashboards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from chart.rendering import CHART, NAMESPACE, Manifest, named, of_kind, parse, template
from clusters import SETTINGS, attempt
from deploy.dashboards import generate
from tandem.vocabulary import Role
from tandem_controller import manifests

ROOT = Path(__file__).resolve().parents[2]
ALERTS = sorted((CHART / "files" / "alerts").glob("*.yaml"))
helm = pytest.mark.needs("helm")


@pytest.mark.parametrize("name", generate.BOARDS)
def test_no_dashboard_is_stale(name: str) -> None:
    path = CHART / "files" / "dashboards" / f"{name}.json"
    assert path.read_text() == generate.text(name), "run `make generate`"


def test_there_is_no_other_dashboard() -> None:
    assert {path.stem for path in (CHART / "files" / "dashboards").iterdir()} == set(generate.BOARDS)


@pytest.mark.parametrize("path", ALERTS, ids=lambda path: path.stem)
def test_every_alert_is_a_file_of_its_own_with_a_page_that_says_what_to_do(path: Path) -> None:
    rule = yaml.safe_load(path.read_text())
    assert rule["alert"] == path.stem
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page = ROOT / rule["annotations"]["runbook_url"]
    text = page.read_text()
    assert text.startswith(f"# {path.stem}\n")
    for heading in ("**Meaning.**", "**Look.**", "**Do"):
        assert heading in text


def test_every_runbook_has_its_alert() -> None:
    assert {page.stem for page in (ROOT / "docs" / "runbooks").glob("*.md")} == {path.stem for path in ALERTS}


@helm
def test_nothing_that_needs_the_operator_is_there_unless_asked() -> None:
    for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule"):
        assert not of_kind("defaults", kind)
    assert not [one for one in of_kind("defaults", "ConfigMap") if "dashboard" in one["metadata"]["name"]]


@helm
def test_the_monitors_find_the_controller_and_references_and_no_suspect() -> None:
    monitors = {one["metadata"]["name"]: one["spec"] for one in of_kind("everything", "PodMonitor")}
    chosen = monitors["tandem-worker"]["selector"]["matchLabels"]
    pods = {role: manifests.job(attempt(), role, SETTINGS)["spec"]["template"] for role in Role}
    assert chosen.items() <= pods[Role.REFERENCE]["metadata"]["labels"].items()
    assert not chosen.items() <= pods[Role.SUSPECT]["metadata"]["labels"].items()
    (port,) = [endpoint["port"] for endpoint in monitors["tandem-worker"]["podMetricsEndpoints"]]
    names = [p["name"] for p in pods[Role.REFERENCE]["spec"]["containers"][0]["ports"]]
    assert port in names
    deployment = named("everything", "Deployment", "tandem-controller")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitors["tandem-controller"]["selector"]["matchLabels"].items() <= labels.items()


@helm
def test_annotations_are_the_other_way_to_the_controller_s_metrics() -> None:
    def pod(choice: str) -> Manifest:
        found: Manifest = named(choice, "Deployment", "tandem-controller")["spec"]["template"]
        return found

    told = {name: value for name, value in pod("everything")["metadata"]["annotations"].items() if "prometheus" in name}
    ports = {port["name"]: port["containerPort"] for port in pod("everything")["spec"]["containers"][0]["ports"]}
    assert told == {
        "prometheus.io/scrape": "true", "prometheus.io/port": str(ports["metrics"]), "prometheus.io/path": "/metrics",
    }  # fmt: skip
    assert not [name for name in pod("defaults")["metadata"]["annotations"] if "prometheus" in name]


@helm
def test_no_series_carries_a_pod_s_name() -> None:
    monitor = named("everything", "PodMonitor", "tandem-worker")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (rule,) = [rule for rule in endpoint["relabelings"] if rule["action"] == "labeldrop"]
    for label in ("pod", "container"):
        assert re.fullmatch(rule["regex"], label)
    assert not re.fullmatch(rule["regex"], "namespace")


@helm
def test_every_alert_is_a_rule_with_the_runbooks_address() -> None:
    rules = named("everything", "PrometheusRule", "tandem")["spec"]["groups"][0]["rules"]
    files = [yaml.safe_load(path.read_text()) for path in ALERTS]
    assert [rule["alert"] for rule in rules] == [rule["alert"] for rule in files]
    for rule, file in zip(rules, files, strict=True):
        assert rule["expr"] == file["expr"]
        assert rule["annotations"]["runbook_url"] == f"https://wiki.example.com/tandem/{rule['alert']}.md"
    assert named("everything", "PrometheusRule", "tandem")["metadata"]["labels"]["release"] == "prometheus"
    plain = parse(template("--set", "metrics.alerts.enabled=true").stdout)
    (rule_set,) = [one for one in plain if one["kind"] == "PrometheusRule"]
    assert rule_set["spec"]["groups"][0]["rules"] == files


@helm
@pytest.mark.parametrize("name", generate.BOARDS)
def test_every_dashboard_is_a_config_map_that_grafana_s_sidecar_finds(name: str) -> None:
    found = named("everything", "ConfigMap", f"tandem-dashboard-{name}")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["namespace"] == NAMESPACE
    (text,) = found["data"].values()
    assert json.loads(text) == json.loads(generate.text(name))


@helm
def test_the_worker_s_metrics_can_be_closed() -> None:
    rendered = parse(template("--set", "metrics.worker.enabled=false,metrics.podMonitor.enabled=true").stdout)
    assert [one["metadata"]["name"] for one in rendered if one["kind"] == "PodMonitor"] == ["tandem-controller"]
