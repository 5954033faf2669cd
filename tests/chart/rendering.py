"""Renders the chart, and finds things in what comes out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cluster.bare.build import default_cache, find

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "tandem"
NAMESPACE = "tandem-test"
RELEASE = "tandem"

VALUES_FILES = sorted(path.name for path in CHART.glob("values-*.yaml"))
"""Beside the chart's own values."""
CHOICES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    **{name.removesuffix(".yaml"): ("-f", str(CHART / name)) for name in VALUES_FILES},
    "existing database": ("--set", "database.existingSecret=records,database.existingSecretKey=url",
                          "--set", "api.database.existingSecret=records-api"),
    "everything": (
        "--set", "controller.markNodes=true,controller.replicas=2,controller.priorityClassName=high",
        "--set", "metrics.podAnnotations=true,image.registry=r.example.com/x,image.pullSecrets={one,two}",
        "--set", "database.trial.persistence.keep=true,metrics.podMonitor.enabled=true",
        "--set", "metrics.serviceMonitor.enabled=true,metrics.dashboards.enabled=true,metrics.alerts.enabled=true",
        "--set", "metrics.alerts.runbooks=https://wiki.example.com/tandem/,metrics.alerts.labels.release=prometheus",
        "--set", "metrics.worker.from[0].namespaceSelector.matchLabels.team=monitoring",
        "--set", "controller.podLabels.team=sre,controller.podAnnotations.note=x,controller.nodeSelector.pool=cpu",
        "--set", "api.replicas=2,api.priorityClassName=high,api.podLabels.team=sre,api.podAnnotations.note=x",
        "--set", "api.settings.writes.burst=5,api.settings.bodyLimit=2000000,api.settings.audiences={tandem,sre}",
        "--set", "api.settings.trustedProxies={10.0.0.7,10.1.0.0/16}",
        "--set", "api.ingress.enabled=true,api.ingress.host=tandem.example.com,api.ingress.tlsSecret=tls",
        "--set", "api.ingress.className=nginx,api.ingress.annotations.note=x,api.service.annotations.note=x",
        "--set", "api.networkPolicy.from[0].namespaceSelector.matchLabels.team=sre",
        "--set", "api.networkPolicy.kubernetes.to[0].ipBlock.cidr=10.0.0.1/32",
        "--set", "controller.networkPolicy.kubernetes.to[0].ipBlock.cidr=10.0.0.1/32",
        "--set", "metrics.api.from[0].podSelector.matchLabels.app=p",
        "--set", "metrics.controller.from[0].podSelector.matchLabels.app=p",
        "--set", "worker.priorityClass.name=pairs,worker.allowedHostPaths={/mnt/weights},policy.runsPerReference=2",
    ),
    "least": (
        "--set", "crds.enabled=false,worker.priorityClass.create=false,metrics.service=false,rbac.aggregate=false",
        "--set", "api.enabled=false,metrics.serviceMonitor.enabled=true",
        "--set", "metrics.worker.enabled=false,controller.networkPolicy.enabled=false",
        "--set", "database.trial.persistence.enabled=false,database.trial.networkPolicy=false,migrations.hook=false",
    ),
}  # fmt: skip
"""Ways to install, by name: what every property below is held to."""

Manifest = dict[str, Any]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(find(default_cache(), "helm")), *arguments], capture_output=True, text=True, check=False)


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments)


@cache
def text(choice: str) -> str:
    done = template(*CHOICES[choice])
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def objects(choice: str) -> list[Manifest]:
    return parse(text(choice))


def parse(rendered: str) -> list[Manifest]:
    """The CRD is long: the loader that is written in C reads it ten times as fast."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [one for one in yaml.load_all(rendered, Loader=loader) if one]


def of_kind(choice: str, kind: str) -> list[Manifest]:
    return [one for one in objects(choice) if one["kind"] == kind]


def named(choice: str, kind: str, name: str) -> Manifest:
    (found,) = [one for one in of_kind(choice, kind) if one["metadata"]["name"] == name]
    return found


def pods(choice: str) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Name of the object, metadata and spec of every pod that the chart itself makes."""
    for one in objects(choice):
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["metadata"], one["spec"]
        elif "template" in one.get("spec", {}):
            yield one["metadata"]["name"], one["spec"]["template"]["metadata"], one["spec"]["template"]["spec"]


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]
