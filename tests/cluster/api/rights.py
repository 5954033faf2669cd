"""A controller's account on the API server: what the chart grants, less what a test takes away."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chart.rendering import parse, template
from cluster.api.hands import Hands
from tandem.kube.client import Kube
from tandem.kube.paths import LEASES
from tandem.pairrun import names

RBAC = "rbac.authorization.k8s.io"
Rule = dict[str, Any]


class Rights:
    """A service account with the chart's rules."""

    def __init__(self, hands: Hands, mark_nodes: bool) -> None:
        self.hands, self.server = hands, hands.server
        self.name = f"controller-{hands.namespace}"
        done = template("--set", f"controller.markNodes={str(mark_nodes).lower()}")
        assert done.returncode == 0, done.stderr
        found = {(one["kind"], one["metadata"]["name"]): one for one in parse(done.stdout)}
        self._rules: dict[str, list[Rule]] = {
            "Role": found["Role", "tandem-controller"]["rules"],
            "ClusterRole": next(
                one["rules"] for (kind, name), one in found.items() if kind == "ClusterRole" and name.endswith("-nodes")
            ),
        }
        self.server.kubectl("-n", hands.namespace, "create", "serviceaccount", self.name)
        # As the chart does.
        hands.kube.create(LEASES.path(hands.namespace), {"metadata": {"name": names.LEASE}})
        self.kubeconfig = self._kubeconfig()
        self.kube = Kube.connect(kubeconfig=str(self.kubeconfig), namespace=hands.namespace)

    def set(self, without: Sequence[str] = ()) -> None:
        """Grant everything but some verbs on some resources: ``"patch jobs"``."""
        subject = {"kind": "ServiceAccount", "name": self.name, "namespace": self.hands.namespace}
        bodies = []
        for kind, rules in self._rules.items():
            where = {"namespace": self.hands.namespace} if kind == "Role" else {}
            meta = {"name": self.name, **where}
            bodies.append({"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": meta, "rules": _less(rules, without)})
            reference = {"apiGroup": RBAC, "kind": kind, "name": self.name}
            binding = {"kind": f"{kind}Binding", "metadata": meta, "roleRef": reference, "subjects": [subject]}
            bodies.append({"apiVersion": f"{RBAC}/v1", **binding})
        self.server.apply(*bodies, namespace=self.hands.namespace)

    def close(self) -> None:
        for kind in ("clusterrolebinding", "clusterrole"):
            self.server.kubectl("delete", kind, self.name, "--ignore-not-found")

    def _kubeconfig(self) -> Path:
        """The administrator's with this account's token."""
        token = self.server.kubectl("-n", self.hands.namespace, "create", "token", self.name)
        config = json.loads(self.server.kubectl("config", "view", "--raw", "-o", "json"))
        config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
        path = self.server.root / self.name
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path


@contextmanager
def granted(hands: Hands, *, without: Sequence[str] = (), mark_nodes: bool = False) -> Iterator[Rights]:
    """The chart's rights, less some; `Rights.set` changes them meanwhile."""
    rights = Rights(hands, mark_nodes)
    rights.set(without)
    try:
        yield rights
    finally:
        rights.close()


def _less(rules: Sequence[Rule], without: Sequence[str]) -> list[Rule]:
    """One rule for each resource, without the verbs that are taken away; and without those that have none left."""
    found = []
    for rule in rules:
        for resource in rule["resources"]:
            verbs = [verb for verb in rule["verbs"] if f"{verb} {resource}" not in without]
            if verbs:
                found.append({**rule, "resources": [resource], "verbs": verbs})
    return found
