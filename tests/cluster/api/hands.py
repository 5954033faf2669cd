"""Hands that do what a Job controller, a scheduler and kubelets would: tests decide what happens to each pod."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Engine

from cluster.handle import ApiServer, until
from sample_runs import sample_run
from tandem.db.engine import connect
from tandem.db.sink import Sink
from tandem.kube.client import Kube, Object
from tandem.kube.errors import NotFound
from tandem.kube.paths import EVENTS, JOBS, NODES, PAIRRUNS, PODS, SECRETS
from tandem.pairing.policy import read_policy
from tandem.pairrun import names
from tandem.pairrun.crd import crd
from tandem.pairrun.status import PairRunStatus, read_status, timestamp
from tandem.records import ControlRecord, RunRecords
from tandem.runs.conclusive import REQUIRED_PARITY, REQUIRED_PROGRAMS
from tandem.vocabulary import ControlName, Role, Workload
from tandem_controller.controller import Controller
from tandem_controller.metrics import Metrics
from tandem_controller.settings import Settings

IMAGE = "i@sha256:1"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
INFO = {
    "kernelVersion": "6.1", "containerRuntimeVersion": "containerd://2", "architecture": "amd64", "bootID": "b",
    "kubeProxyVersion": "", "kubeletVersion": "v1.37.0", "machineID": "m", "operatingSystem": "linux", "osImage": "o",
    "systemUUID": "s",
}  # fmt: skip


class Hands:
    """A namespace on the API server, with nodes and pods made by hand."""

    def __init__(self, server: ApiServer, database: str) -> None:
        self.server, self.database = server, database
        self.namespace = f"t{os.urandom(4).hex()}"
        self.kube = Kube.connect(kubeconfig=str(server.kubeconfig), namespace=self.namespace)
        self._nodes: list[str] = []
        self._install()

    def _install(self) -> None:
        try:
            self.kube.get(f"{CRDS}/{names.PLURAL}.{names.GROUP}")
        except NotFound:
            self.kube.create(CRDS, crd())
            until("the definition", self._served)
        self.kube.create("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        for name in ("tandem-worker", "default"):
            self.kube.create(f"/api/v1/namespaces/{self.namespace}/serviceaccounts", {"metadata": {"name": name}})
        self.kube.create(SECRETS.path(self.namespace), {"metadata": {"name": "tandem-database"}, "data": {"uri": ""}})

    def _served(self) -> bool:
        try:
            self.kube.list(PAIRRUNS.path())
        except NotFound:
            return False
        return True

    def close(self) -> None:
        """Leave nothing that another test would see; there is no garbage collector here."""
        for obj in self.kube.list(PAIRRUNS.path(self.namespace)).items:
            if obj["metadata"].get("finalizers"):
                self.kube.patch(
                    PAIRRUNS.path(self.namespace, obj["metadata"]["name"]), {"metadata": {"finalizers": []}}
                )
            self.kube.delete(PAIRRUNS.path(self.namespace, obj["metadata"]["name"]))
        for obj in self.kube.list(PODS.path(self.namespace)).items:
            self.kube.delete(PODS.path(self.namespace, obj["metadata"]["name"]), grace_s=0)
        for name in self._nodes:
            self.kube.delete(NODES.path(None, name))

    # -- nodes -------------------------------------------------------------------------------------

    def node(self, name: str, *, cordoned: bool = False, **values: Any) -> str:
        """A Ready node; returns its full name, which no other test has."""
        full = f"{name}-{self.namespace}"
        labels = {"kubernetes.io/hostname": full, "test": self.namespace, **values.get("labels", {})}
        self.kube.create(
            NODES.path(), {"metadata": {"name": full, "labels": labels}, "spec": {"unschedulable": cordoned}}
        )
        self._nodes.append(full)
        # The API server taints a new node as not ready; nobody else would take that off.
        self.kube.patch(NODES.path(None, full), {"spec": {"taints": values.get("taints", [])}})
        self.ready(full)
        amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", **values.get("capacity", {})}
        status = {"capacity": amounts, "allocatable": {**amounts, **values.get("allocatable", {})}, "nodeInfo": INFO}
        self.kube.patch(NODES.path(None, full, "status"), {"status": status})
        return full

    def ready(self, node: str, ready: bool = True) -> None:
        """Set the node's condition."""
        now = timestamp(time.time())
        condition = {
            "type": "Ready", "status": "True" if ready else "Unknown", "reason": "Test", "message": "",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        }  # fmt: skip
        self.kube.patch(NODES.path(None, node, "status"), {"status": {"conditions": [condition]}})

    # -- PairRuns ----------------------------------------------------------------------------------

    def create(self, name: str = "check", **spec: Any) -> Object:
        """A PairRun whose nodes are among this test's."""
        mine = {"selector": {"matchLabels": {"test": self.namespace}}}
        spec = {"suspect": mine, "reference": mine, **spec}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
        return self.kube.create(PAIRRUNS.path(self.namespace), body)

    def get(self, name: str = "check") -> Object:
        return self.kube.get(PAIRRUNS.path(self.namespace, name))

    def status(self, name: str = "check") -> PairRunStatus:
        return read_status(self.get(name).get("status"))

    def run_id(self, name: str = "check") -> UUID:
        meta = self.get(name)["metadata"]
        return names.run_id_of(meta["uid"], meta["creationTimestamp"])

    def condition(self, kind: str, name: str = "check") -> tuple[str, str]:
        found = self.status(name).condition(kind)
        return (found.status, found.reason) if found else ("", "")

    def wait_for(
        self, kind: str, status: str, reason: str | None = None, name: str = "check", seconds: float = 120
    ) -> str:
        """Wait for a condition; returns its message."""

        def there() -> bool:
            found = self.condition(kind, name)
            right = found[0] == status and reason in (None, found[1])
            assert right, f"{kind} is {found}: {self.status(name)}"
            return right

        until(f"{kind}={status} {reason or ''}", there, seconds)
        found = self.status(name).condition(kind)
        assert found is not None
        return found.message

    def events(self, name: str = "check") -> list[str]:
        found = self.kube.list(EVENTS.path(self.namespace)).items
        return [e["reason"] for e in found if e["involvedObject"]["name"] == name]

    # -- pods --------------------------------------------------------------------------------------

    def jobs(self, attempt: int | None = None, name: str = "check") -> list[Object]:
        found = self.kube.list(JOBS.path(self.namespace), label_selector=f"{names.LABEL_PAIRRUN}={name}").items
        return [j for j in found if attempt is None or j["metadata"]["labels"][names.LABEL_ATTEMPT] == str(attempt)]

    def make_pods(self, attempt: int = 1, name: str = "check") -> None:
        """Pods for both Jobs, bound to the nodes that they ask for."""
        until("both Jobs", lambda: len(self.jobs(attempt, name)) == 2)
        for job in self.jobs(attempt, name):
            self.make_pod(job)

    def make_pod(self, job: Object, *, runs: bool = False) -> None:
        """The pod of a Job, bound to the node that it asks for; ``runs``: its container has started."""
        template = job["spec"]["template"]
        spec = {**template["spec"]}
        terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        spec["nodeName"] = terms["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
        meta = {"name": f"{job['metadata']['name']}-abcde", "labels": template["metadata"]["labels"]}
        self.kube.create(PODS.path(self.namespace), {"metadata": meta, "spec": spec})
        if runs:
            running = {"running": {"startedAt": timestamp(time.time())}}
            path = PODS.path(self.namespace, meta["name"], "status")
            self.kube.patch(path, {"status": _container(running, "Running")})

    def pod(self, role: Role, attempt: int = 1, name: str = "check") -> str:
        """Name of a side's pod."""
        uid = self.get(name)["metadata"]["uid"]
        return f"{names.child_name(name, uid, attempt, role)}-abcde"

    def set_pod(self, role: Role, status: Object, attempt: int = 1, name: str = "check") -> None:
        """Write a pod's status, as its kubelet would."""
        self.kube.patch(PODS.path(self.namespace, self.pod(role, attempt, name), "status"), {"status": status})

    def start(self, attempt: int = 1, name: str = "check") -> None:
        """Both pods run."""
        self.make_pods(attempt, name)
        for role in Role:
            self.run(role, attempt, name)

    def run(self, role: Role, attempt: int = 1, name: str = "check", image: str = IMAGE) -> None:
        """A side's pod runs."""
        running = {"running": {"startedAt": timestamp(time.time())}}
        self.set_pod(role, _container(running, "Running", image), attempt, name)

    def ask_to_stop(self, role: Role, attempt: int = 1, name: str = "check") -> None:
        """Delete a side's pod, as a drain does: it stays until its kubelet says that it has ended."""
        self.kube.delete(PODS.path(self.namespace, self.pod(role, attempt, name)), grace_s=60)

    def exit(self, role: Role, code: int, message: str = "", attempt: int = 1, name: str = "check") -> None:
        """A side's container ends."""
        now = timestamp(time.time())
        ended = {"exitCode": code, "message": message, "startedAt": now, "finishedAt": now, "reason": "Error"}
        self.set_pod(role, _container({"terminated": ended}, "Failed"), attempt, name)

    # -- records -----------------------------------------------------------------------------------

    def deliver(self, tmp: Path, *, rows: int = 0, name: str = "check", closed: bool = True) -> RunRecords:
        """What a reference would have written by now, through the real sink."""
        records = complete_run(self.run_id(name), rows=rows)
        sink = Sink(self.database, tmp / "spool", records.run.run_id, 1)
        for kind in (records.controls, records.mismatches, records.faults, records.steps):
            for record in kind:
                sink.put(record)
        if closed:
            for record in records.closings:
                sink.put(record)
        assert sink.close(30.0)
        return records

    def finish(self, tmp: Path, *, rows: int = 0, name: str = "check") -> None:
        """Both sides end regularly, everything delivered."""
        self.wait_for(names.RUNNING, "True", name=name)
        until("the attempt's row", lambda: self.deliver(tmp, rows=rows, name=name))
        for role in Role:
            self.exit(role, 41 if rows else 40, name=name)


def _container(state: Object, phase: str, image: str = IMAGE) -> Object:
    container = {
        "name": "worker", "image": "i", "imageID": image, "ready": False, "restartCount": 0, "state": state,
    }  # fmt: skip
    return {"phase": phase, "containerStatuses": [container]}


def complete_run(run_id: UUID, *, rows: int = 0) -> RunRecords:
    """A run with every control that a verdict needs."""
    records = sample_run(run_id=run_id, rows=rows)
    steps = len(records.steps) - 1
    programs = list(REQUIRED_PROGRAMS[Workload.SUBMODULE])

    def control(name: ControlName, role: Role, step: int, subject: str, **values: Any) -> ControlRecord:
        return ControlRecord(
            run_id=run_id, attempt=1, name=name, role=role, step=step, subject=subject, ok=True, **values
        )

    fields = dict.fromkeys(REQUIRED_PARITY, "x") | {"programs": ";".join(programs)}
    fields |= {f"program.{name}": "f" for name in programs}
    controls = [
        control(ControlName.PARITY, Role.SUSPECT, 0, field, detail={"reference": value})
        for field, value in fields.items()
    ]
    controls.append(control(ControlName.KNOWN_REDUCTION, Role.SUSPECT, 0, ""))
    for when, step in (("start", 1), ("end", steps)):
        for role in Role:
            replay = ControlName(f"self_replay_{when}")
            controls += [control(replay, role, step, program, repeats=8) for program in programs]
        positive = ControlName(f"positive_{when}")
        controls.append(control(positive, Role.REFERENCE, step, "digest"))
        controls += [control(positive, Role.SUSPECT, step, f"rank {rank}") for rank in range(2)]
    controls.append(control(ControlName.REPLAY_REFERENCE, Role.REFERENCE, steps, "", repeats=3))
    closing = msgspec.structs.replace(records.closings[0], controls=len(controls))
    return msgspec.structs.replace(records, controls=controls, closings=[closing])


# -- controllers -------------------------------------------------------------------------------------------


def settings(namespace: str, **values: Any) -> Settings:
    """Of an impatient installation."""
    fast = {"pairingSeconds": 1, "progressSeconds": 1, "factsSeconds": 0.2, "resyncSeconds": 30, "leaseSeconds": 3}
    return Settings.model_validate({"namespace": namespace, "worker": {"image": "tandem-worker:1"}, **fast, **values})


class Term:
    """A controller that leads, and why its term ended if it did."""

    def __init__(self, kube: Kube, engine: Engine, token: int, chosen: Settings) -> None:
        self.over = threading.Event()
        self.reason = ""
        self.controller = Controller(
            kube, engine, token, "test", read_policy({}), chosen, Metrics(), leads=lambda: not self.over.is_set(),
            ended=self._ended,
        )  # fmt: skip

    def _ended(self, reason: str) -> None:
        self.reason = reason
        self.over.set()


@contextmanager
def leading(
    hands: Hands, *, token: int = 1, kube: Kube | None = None, database: str | None = None, **values: Any
) -> Iterator[Term]:
    """A controller at work on the namespace."""
    engine = connect(database or hands.database)
    term = Term(kube or hands.kube, engine, token, settings(hands.namespace, **values))
    try:
        term.controller.start()
        yield term
    finally:
        term.controller.stop()
        engine.dispose()


def forever(check: Callable[[], bool], seconds: float) -> None:
    """See that something stays as it is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert check()
        time.sleep(0.1)
