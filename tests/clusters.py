"""Nodes, PairRuns and pods for tests of the pure parts of the cluster side."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any
from uuid import UUID

from tandem.pairing.choose import World
from tandem.pairing.nodes import Node, PodUse, Taint
from tandem.pairing.policy import read_policy
from tandem.pairrun.crd import crd
from tandem.pairrun.spec import Device, PairRunSpec, read_spec
from tandem.vocabulary import Role
from tandem_controller.manifests import Attempt, job_deadline
from tandem_controller.observed import Decision, Event, Facts, Job, Judgement, Live, Observed, Pod
from tandem_controller.plan import plan
from tandem_controller.settings import Settings

NOW = 1_800_000_000.0
POLICY = read_policy({})
SETTINGS = Settings.model_validate({"namespace": "tandem", "worker": {"image": "tandem-worker:1"}})
CORDONED = (Taint("node.kubernetes.io/unschedulable", "", "NoSchedule"),)


def node(name: str, *, gpus: int = 0, cordoned: bool = False, ready: bool = True, **values: Any) -> Node:
    """A Ready node of eight CPUs; ``gpus`` NVIDIA devices with their usual labels and taint."""
    labels = {"kubernetes.io/arch": "amd64"}
    capacity = {"cpu": 8.0, "memory": 32 * 2.0**30, "pods": 110.0}
    taints: tuple[Taint, ...] = CORDONED if cordoned else ()
    if gpus:
        labels |= {"nvidia.com/gpu.product": "NVIDIA-H100", "nvidia.com/gpu.count": str(gpus)}
        capacity["nvidia.com/gpu"] = float(gpus)
        taints += (Taint("nvidia.com/gpu", "present", "NoSchedule"),)
    fields: dict[str, Any] = {
        "labels": labels, "capacity": capacity, "allocatable": dict(capacity), "taints": taints,
        "unschedulable": cordoned, "conditions": {"Ready": "True" if ready else "False"},
        "info": {"kernelVersion": "6.1", "containerRuntimeVersion": "containerd://2.1", "bootID": f"boot-{name}"},
    }  # fmt: skip
    for key, value in values.items():
        fields[key] = fields[key] | value if isinstance(fields.get(key), dict) else value
    return Node(name=name, **fields)


def use(name: str, on: str, **requests: float) -> PodUse:
    return PodUse("default", name, on, {k.replace("__", "/").replace("_", "."): v for k, v in requests.items()})


def world(*nodes: Node, **values: Any) -> World:
    pods = values.pop("pods", ())
    usage = {n.name: [p for p in pods if p.node == n.name] for n in nodes}
    return World(nodes=nodes, usage=usage, **values)


SCHEMA: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def stored(values: Any, schema: dict[str, Any] = SCHEMA) -> Any:
    """A spec as an API server stores it: with the schema's defaults, which nobody can tell from what a user wrote."""
    if isinstance(values, list):
        return [stored(value, schema.get("items", {})) for value in values]
    if not isinstance(values, dict):
        return values
    known = schema.get("properties", {})
    full = {name: deepcopy(part["default"]) for name, part in known.items() if "default" in part} | values
    return {name: stored(value, known.get(name, {})) for name, value in full.items()}


def spec(**values: Any) -> PairRunSpec:
    return read_spec(stored(values))


TEMPLATE: dict[str, Any] = {
    "env": [{"name": "XLA_FLAGS", "value": "--x"}],
    "volumes": [
        {"name": "weights", "mountPath": "/weights", "persistentVolumeClaim": "weights"},
        {"name": "cache", "mountPath": "/cache", "emptyDir": "1Gi", "readOnly": False},
    ],
    "tolerations": [{"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}],
    "runtimeClassName": "nvidia",
}


def attempt(**values: Any) -> Attempt:
    """The third attempt of a PairRun with a template."""
    asked = spec(**({"template": TEMPLATE} | values.pop("spec", {})))
    fields: dict[str, Any] = {
        "pairrun": "check", "uid": "0a1b2c3d-0000-4000-8000-000000000001", "namespace": "tandem",
        "run_id": UUID(int=7), "number": 3, "spec": asked, "run": asked.run,
        "nodes": {Role.SUSPECT: "sick", Role.REFERENCE: "well"}, "device": Device.CPU, "devices": 2,
        "tolerated": ("nvidia.com/gpu-xid",), "device_taints": ("nvidia.com/gpu",),
    }  # fmt: skip
    return Attempt(**(fields | values))


class Run:
    """A PairRun that is planned again and again, as the loop would: statuses feed back, actions are kept."""

    def __init__(self, values: dict[str, Any] | None = None, nodes: World | None = None, **observed: Any) -> None:
        self.now = NOW
        self.obj: dict[str, Any] = {
            "metadata": {
                "name": "check", "namespace": "tandem", "uid": "0a1b2c3d-0000-4000-8000-000000000001", "generation": 1,
                "creationTimestamp": "2027-01-15T08:00:00Z",
            },
            "spec": stored(values or {}),
        }  # fmt: skip
        self.world = nodes or world(node("sick", cordoned=True), node("well"))
        self.facts = Facts(reachable=True)
        self.pods: list[Pod] = []
        self.jobs: list[Job] = []
        self.observed = observed

    def look(self) -> Observed:
        parsed: PairRunSpec | None = None
        error = ""
        try:
            parsed = read_spec(self.obj["spec"])
        except Exception as failure:
            error = str(failure)
        values: dict[str, Any] = {
            "now": self.now, "obj": self.obj, "spec": parsed, "spec_error": error, "world": self.world,
            "policy": POLICY, "settings": SETTINGS, "facts": self.facts, "pods": tuple(self.pods),
            "jobs": tuple(self.jobs), "node_ready": {n.name: n.ready for n in self.world.nodes},
        }  # fmt: skip
        return Observed(**(values | self.observed))

    def plan(self, *, after: float = 0.0) -> Decision:
        """Plan once, and write the status back."""
        self.now += after
        decision = plan(self.look())
        self.obj["status"] = decision.status.to_object()
        return decision

    def make(self, number: int = 1) -> None:
        """The children of an attempt, their pods pending."""
        self.jobs = [j for j in self.jobs if j.attempt != number]
        asked = self.look().spec
        deadline = job_deadline(asked) if asked is not None else None
        self.jobs += [Job(f"job-{number}-{role}", role, number, deadline=deadline) for role in Role]
        nodes = {Role.SUSPECT: "sick", Role.REFERENCE: "well"}
        self.pods = [Pod(f"pod-{number}-{role}", role, number, node=nodes[role]) for role in Role]

    def start(self, number: int = 1) -> None:
        """Both pods of an attempt run."""
        self.make(number)
        self.pods = [replace(pod, phase="Running", started_at=self.now) for pod in self.pods]

    def change(self, role: Role, **values: Any) -> None:
        """Change the pod of a side."""
        self.pods = [replace(pod, **values) if pod.role is role else pod for pod in self.pods]

    def exit(self, role: Role, code: int, message: str = "") -> None:
        """A side's container ends."""
        phase = "Succeeded" if code == 0 else "Failed"
        self.change(role, exit_code=code, exit_message=message, phase=phase, ended_at=self.now)

    def stored(self, *attempts: int, state: str = "running", live: Live | None = None) -> None:
        """PostgreSQL holds the run and these attempts."""
        self.facts = Facts(
            reachable=True, run_stored=True, attempts=dict.fromkeys(attempts, state), live=live or Live(),
        )  # fmt: skip

    def judge(self, verdict: str, reason: str = "completed") -> None:
        """PostgreSQL holds the verdict."""
        self.facts = replace(self.facts, judgement=Judgement(verdict, reason, f"{verdict}: as the test says"))


# -- what tests say of a decision ------------------------------------------------------------------------


def kinds(decision: Decision) -> list[str]:
    return [type(a).__name__ for a in decision.actions if not isinstance(a, Event)]


def events(decision: Decision) -> list[str]:
    return [a.reason for a in decision.actions if isinstance(a, Event)]


def condition(run: Run, kind: str) -> tuple[str, str]:
    found = run.look().status.condition(kind)
    return (found.status, found.reason) if found else ("", "")


def told(reason: str, message: str = "as told") -> str:
    return json.dumps({"reason": reason, "message": message})


def started(values: dict[str, Any] | None = None, **options: Any) -> Run:
    """A run whose first attempt runs."""
    run = Run(values, **options)
    run.plan()
    run.start()
    run.stored(1)
    run.plan(after=5)
    return run
