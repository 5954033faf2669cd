"""What of a cluster that exists the tests would use, and how they are told which one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.e2e.installation import merged
from cluster.outside import HOW, KIND_CONFIG, how, workers

ROOT = Path(__file__).resolve().parents[2]


def node(name: str, ready: str = "True", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def test_suspect_and_reference_are_ready_nodes_that_take_pods() -> None:
    control = [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]
    soft = [{"key": "a", "effect": "PreferNoSchedule"}]
    nodes = [
        node("c", taints=control), node("b", taints=soft), node("a"), node("d", ready="Unknown"),
        node("e", unschedulable=True),
    ]  # fmt: skip
    assert workers(nodes) == ["a", "b"]


@pytest.mark.parametrize(("value", "chosen"), [("", "bare"), ("bare", "bare"), ("kind", "kind")])
def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch, value: str, chosen: str) -> None:
    monkeypatch.setenv(HOW, value)
    assert how() == chosen


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOW, "minikube")
    with pytest.raises(ValueError, match="use bare, kind or kubeconfig"):
        how()


def test_kind_gets_two_nodes_beside_its_control_plane_and_the_workflow_runs_what_people_run() -> None:
    """Neither was run where Docker is: what can be held to without it."""
    roles = [n["role"] for n in yaml.safe_load(KIND_CONFIG.read_text())["nodes"]]
    assert roles == ["control-plane", "worker", "worker"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "e2e.yml").read_text())
    [job] = workflow["jobs"].values()
    assert any(step.get("run", "").startswith("make e2e") for step in job["steps"])
    assert workflow["permissions"] == {"contents": "read"}


def test_values_are_merged_deeply() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4}) == {"a": {"b": 1, "c": 3}, "d": 4}
