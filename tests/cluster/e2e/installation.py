"""Tandem, installed by its chart on the real two-node cluster, and what tests do with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import BareCluster, until
from cluster.images import installed_images
from cluster.outside import Outside
from tandem.pairrun import names
from tandem.pairrun.status import PairRunStatus, read_status
from tandem.vocabulary import Role

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "tandem"
NAMESPACE = "tandem"
CACHE = "/var/log/tandem-compiled"
"""A folder that each node has for itself: programs are compiled once per node, not once per pod."""
VERDICT_S = 420.0
"""How long a whole run may take on two cores, its programs not yet compiled."""
VALUES: dict[str, Any] = {
    "controller": {"pairingSeconds": 2, "factsSeconds": 1, "progressSeconds": 2, "leaseSeconds": 5},
    "worker": {"terminationGraceSeconds": 30, "allowedHostPaths": [CACHE]},
    "database": {"trial": {"persistence": {"size": "1Gi"}}},
}  # fmt: skip
OURS: dict[str, Any] = {
    "image": {"pullPolicy": "Never"},
    "controller": {"image": {"repository": "localhost/tandem-controller", "tag": "test"}},
    "api": {"image": {"repository": "localhost/tandem-api", "tag": "test"}},
    "worker": {"image": {"repository": "localhost/tandem-worker", "tag": "test"}},
    "database": {"trial": {"image": "localhost/postgres:test"}},
}
"""Images that are loaded into nodes of ours; no registry is asked."""


COMPILED: dict[str, Any] = {
    "env": [
        {"name": "JAX_COMPILATION_CACHE_DIR", "value": "/compiled"},
        {"name": "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "value": "0"},
        {"name": "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "value": "-1"},
        {"name": "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "value": "none"},
    ],
    "volumes": [{"name": "compiled", "mountPath": "/compiled", "hostPath": CACHE, "readOnly": False}],
}
"""Of a pod's template: programs are compiled once per node."""


class Tandem:
    """The installation."""

    def __init__(self, cluster: BareCluster | Outside, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.values = folder / "values.json"
        self.reference, self.suspect = cluster.nodes

    # -- installing --------------------------------------------------------------------------------

    def _images(self) -> dict[str, Any]:
        """See to it that both nodes have, or find, Tandem's images: chart values that name them."""
        if isinstance(self.cluster, Outside):
            # Without a StorageClass of the cluster's own nobody gives PostgreSQL a disk: its records go with its pod.
            disk = {"database": {"trial": {"persistence": {"enabled": self.cluster.gives_disks()}}}}
            return merged(self.cluster.images(), disk)
        self.cluster.load(*installed_images())
        return OURS

    def install(self) -> None:
        """``helm install``. Our own nodes have a disk for PostgreSQL and keep compiled programs; others bring one."""
        self.values.write_text(json.dumps(merged(VALUES, self._images())))
        if isinstance(self.cluster, BareCluster):
            for node in self.cluster.nodes:
                self.cluster.enter(node, "install", "-d", "-m", "0777", CACHE, "/var/log/tandem-database")
            self.cluster.apply(_disk(self.reference))
        self.helm("install", "--create-namespace")

    def helm(self, command: str, *options: str) -> None:
        """``helm install`` or ``upgrade`` with these tests' values, and what is given besides."""
        words = [command, "tandem", str(CHART), "--namespace", NAMESPACE, "--wait", "--timeout", "5m"]
        self.cluster.helm(*words, "-f", str(self.values), *options, timeout=400)

    def keeps_records(self) -> bool:
        """Whether what PostgreSQL holds outlives its pod."""
        return isinstance(self.cluster, BareCluster) or self.cluster.gives_disks()

    def uninstall(self) -> None:
        """``helm uninstall``; one that is not installed is fine."""
        self.cluster.helm("uninstall", "tandem", "--namespace", NAMESPACE, "--wait", "--ignore-not-found")

    # -- nodes -------------------------------------------------------------------------------------

    @contextmanager
    def quarantined(self) -> Iterator[None]:
        """The suspect's node is cordoned and tainted, as a health checker leaves it."""
        node = self.suspect
        self.cluster.kubectl("cordon", node)
        self.cluster.kubectl("taint", "node", node, "aiinfra/gpu-healthcheck=failed:NoSchedule", "--overwrite")
        try:
            yield
        finally:
            self.cluster.kubectl("taint", "node", node, "aiinfra/gpu-healthcheck-")
            self.cluster.kubectl("uncordon", node)

    # -- PairRuns ----------------------------------------------------------------------------------

    def create(self, name: str, **spec: Any) -> None:
        """A PairRun on the CPUs, with the nodes' compiled programs."""
        template = COMPILED if isinstance(self.cluster, BareCluster) else {}
        resources = {"device": "cpu", "cpu": "100m", "memory": "3Gi"}
        asked = spec.pop("workload", {})
        # Three steps, unless a time is given: then only that ends the run.
        workload = {"selfReplays": 2, **({} if "durationSeconds" in asked else {"steps": 3}), **asked}
        retry = {"backoffSeconds": 1, "maxAttempts": 3, **spec.pop("retry", {})}
        body = {
            "apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name},
            "spec": {
                "resources": resources, "workload": workload, "retry": retry, **spec,
                "template": {**template, **spec.get("template", {})},
            },
        }  # fmt: skip
        self.cluster.apply(body, namespace=NAMESPACE)

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get("pairrun", name, "--namespace", NAMESPACE)
        return found

    def status(self, name: str) -> PairRunStatus:
        return read_status(self.get(name).get("status"))

    def wait_for(
        self, name: str, kind: str, status: str = "True", reason: str | None = None, seconds: float = 120
    ) -> str:
        """Wait for a condition; returns its message."""

        def there() -> bool:
            found = self.status(name).condition(kind)
            right = found is not None and found.status == status and reason in (None, found.reason)
            assert right, f"{kind} of {name}: {found}"
            return right

        until(f"{name}: {kind}={status} {reason or ''}", there, seconds)
        found = self.status(name).condition(kind)
        assert found is not None
        return found.message

    def verdict(self, name: str) -> PairRunStatus:
        """Wait for the verdict."""
        self.wait_for(name, names.FINISHED, seconds=VERDICT_S)
        return self.status(name)

    def stepping(self, name: str, step: int = 1) -> None:
        """Wait until the pair compares, as PostgreSQL tells."""

        def there() -> bool:
            status = self.status(name)
            if status.holds(names.FINISHED):
                pytest.fail(f"{name} finished before it could be disturbed: {status.message}")
            return status.step >= step

        until(f"{name} to step", there, VERDICT_S)

    def goes_on(self, name: str) -> None:
        """After what was done to it, the first attempt compares further steps: their records arrive, the status tells.

        Told twice: the first may be of a step before.
        """
        told: list[int] = []

        def further() -> bool:
            step = self.status(name).step
            if not told or step > told[-1]:
                told.append(step)
            return len(told) > 2

        until("further steps", further, 120)
        assert len(self.status(name).attempts) == 1

    def pod(self, name: str, role: Role) -> str:
        """Name of a side's pod of the current attempt."""
        attempt = self.status(name).attempt
        labels = f"{names.LABEL_PAIRRUN}={name},{names.LABEL_ROLE}={role},{names.LABEL_ATTEMPT}={attempt}"
        found = self.cluster.get("pods", "--namespace", NAMESPACE, "-l", labels)["items"]
        assert len(found) == 1
        return str(found[0]["metadata"]["name"])

    def delete(self, name: str) -> None:
        """Delete a PairRun, and see that nothing of it stays."""
        uid = self.get(name)["metadata"]["uid"]
        self.cluster.kubectl("delete", "pairrun", name, "--namespace", NAMESPACE, "--wait=true")
        until(f"nothing of {name}", lambda: not self.children(uid), 90)

    def children(self, uid: str) -> list[str]:
        """Objects of a PairRun."""
        kinds = "jobs,pods,secrets,services,networkpolicies"
        found = self.cluster.get(kinds, "--namespace", NAMESPACE, "-l", names.LABEL_PAIR)["items"]
        mine = [o for o in found if o["metadata"]["labels"][names.LABEL_PAIR].startswith(uid)]
        return [f"{o['kind']}/{o['metadata']['name']}" for o in mine]

    # -- records -----------------------------------------------------------------------------------

    def show(self, name: str) -> dict[str, Any]:
        """What PostgreSQL holds of a run, as ``tandem show --json`` tells it in the controller's pod."""
        run = self.status(name).run_id
        words = ["exec", "--namespace", NAMESPACE, "deploy/tandem-controller", "--", "tandem", "show", run, "--json"]
        found: dict[str, Any] = json.loads(self.cluster.kubectl(*words))
        return found


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both, the other's values first; mappings are merged."""
    both = {k: merged(v, other[k]) if isinstance(v, dict) and k in other else other.get(k, v) for k, v in one.items()}
    return both | {k: v for k, v in other.items() if k not in one}


def _disk(node: str) -> dict[str, Any]:
    """A PersistentVolume for the trial database; both nodes share the machine's disk, and PostgreSQL stays on one."""
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    return {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"tandem-test-{os.urandom(3).hex()}"},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": "/var/log/tandem-database"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
        },
    }  # fmt: skip
