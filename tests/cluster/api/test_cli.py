"""`tandem pair`, `watch` and `candidates` against a real API server; the test plays the controller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api.test_kube import NAMESPACES, with_crd
from cluster.handle import ApiServer, until
from tandem.kube.client import Kube, Object
from tandem.kube.paths import NODES, PAIRRUNS

__all__ = ["with_crd"]
pytestmark = pytest.mark.needs("api-server")


class Cluster:
    """A namespace, two nodes, and commands that run there."""

    def __init__(self, server: ApiServer) -> None:
        self.server, self.namespace = server, f"t-{os.urandom(4).hex()}"
        self.kube = Kube.connect(kubeconfig=str(server.kubeconfig), namespace=self.namespace)
        self.kube.create(
            NAMESPACES.path(), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        )
        self.sick, self.good = f"sick-{self.namespace}", f"good-{self.namespace}"
        for name, cordoned in ((self.sick, True), (self.good, False)):
            self.kube.create(NODES.path(), {
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": name, "labels": {"node.kubernetes.io/instance-type": self.namespace}},
                "spec": {"unschedulable": cordoned},
            })  # fmt: skip
            amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"}
            ready = {"type": "Ready", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": None}
            self.kube.patch_status(
                NODES.path(name=name), {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
            )
            # The API server marks new nodes until a controller manager takes it away; there is none.
            self.kube.patch(NODES.path(name=name), {"spec": {"taints": None}})

    def tandem(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tandem.cli.app", *arguments, "-n", self.namespace], text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=self.server.environment | environment, start_new_session=True,
        )  # fmt: skip

    def done(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.tandem(*arguments, **environment)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def only(self) -> Object:
        (found,) = self.kube.list(PAIRRUNS.path(self.namespace)).items
        return found

    def made(self) -> str:
        until("a PairRun", lambda: len(self.kube.list(PAIRRUNS.path(self.namespace)).items) == 1)
        return str(self.only()["metadata"]["name"])

    def says(self, name: str, **status: Any) -> None:
        self.kube.patch_status(PAIRRUNS.path(self.namespace, name), status)

    def paired(self, **more: Any) -> dict[str, Any]:
        return {
            "conditions": [_condition("Paired", "True", "Chosen")], "suspect": {"node": self.sick, "reason": "named"},
            "reference": {"node": self.good, "reason": "idle"}, "attempt": 1, "steps": 20, **more,
        }  # fmt: skip

    def finished(self, verdict: str, message: str) -> dict[str, Any]:
        ended = [_condition("Finished", "True", "Completed", message), _condition("Paired", "True", "Chosen")]
        return self.paired(conditions=ended, verdict=verdict, message=message, reason="completed", runId="r-1", step=20)


def _condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-30T00:00:00Z", "observedGeneration": 1,
    }  # fmt: skip


@pytest.fixture
def cluster(with_crd: ApiServer) -> Iterator[Cluster]:
    found = Cluster(with_crd)
    yield found
    for name in (found.sick, found.good):
        found.kube.delete(NODES.path(name=name))


@pytest.mark.parametrize(("verdict", "code"), [("match", 0), ("mismatch", 1), ("inconclusive", 2)])
def test_a_pair_is_made_and_followed_to_its_verdict(cluster: Cluster, verdict: str, code: int) -> None:
    """Also through a restart of the API server."""
    process = cluster.tandem("pair", cluster.sick, "--steps", "20", "--fault", "node-11")
    name = cluster.made()
    spec = cluster.only()["spec"]
    assert spec["suspect"] == {"nodeName": cluster.sick}
    assert (spec["workload"]["steps"], spec["workload"]["fault"]) == (20, "node-11")
    cluster.says(name, **cluster.paired())
    if verdict == "match":
        cluster.server.stop("kube-apiserver")
        cluster.server.start("kube-apiserver")
    cluster.says(name, **cluster.paired(step=7, counts={"elements": 5000}))
    cluster.says(name, **cluster.finished(verdict, f"{verdict}: it is said"))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (code, f"{verdict}: it is said\n"), err
    assert f"suspect {cluster.sick} (named), reference {cluster.good} (idle)" in err


def test_ctrl_c_detaches_and_says_how_to_follow_again(cluster: Cluster) -> None:
    process = cluster.tandem("pair", "--null", "--name", "mine")
    name = cluster.made()
    assert name == "mine"
    cluster.says(name, **cluster.paired())
    lines: list[str] = []
    assert process.stderr is not None
    while not any("suspect" in line for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"tandem watch mine --namespace {cluster.namespace}" in err
    assert "Traceback" not in err
    assert "deletionTimestamp" not in cluster.only()["metadata"]
    cluster.says(name, **cluster.finished("match", "match: fine"))
    code, out, _ = cluster.done("watch", "mine", "--json")
    assert (code, json.loads(out)["verdict"], json.loads(out)["run"]) == (0, "match", "r-1")


def test_detached_or_too_slow_the_run_goes_on(cluster: Cluster) -> None:
    code, out, err = cluster.done("pair", cluster.sick, "--detach")
    name = cluster.made()
    assert (code, out) == (0, f"{name}\n")
    assert "tandem watch" in err
    code, out, err = cluster.done("watch", name, "--timeout", "1")
    assert (code, out) == (2, "")
    assert "not finished after 1 s" in err


def test_a_pairrun_that_is_deleted_ends_the_watch(cluster: Cluster) -> None:
    process = cluster.tandem("pair", "--null")
    name = cluster.made()
    cluster.kube.delete(PAIRRUNS.path(cluster.namespace, name))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "was deleted" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pair", "nobody"], 64, "there is no node nobody"),
        (["pair", "--null", "--reference", "nobody"], 64, "there is no node nobody"),
        (["watch", "nobody"], 2, "there is no PairRun"),
        (["pair", "--null", "--name", "Not A Name"], 64, "Not A Name"),
        (["pair", "--null", "--context", "other"], 2, "no context 'other'"),
    ],
)
def test_errors_of_the_cluster_are_one_line(cluster: Cluster, arguments: list[str], code: int, words: str) -> None:
    found, out, err = cluster.done(*arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert words in err


def test_a_name_that_is_taken_is_said(cluster: Cluster) -> None:
    assert cluster.done("pair", "--null", "--name", "x", "--detach")[0] == 0
    code, _, err = cluster.done("pair", "--null", "--name", "x")
    assert code == 64
    assert "exists already" in err


def test_a_namespace_that_is_not_there_and_rights_that_do_not_suffice(cluster: Cluster) -> None:
    absent = cluster.server.environment
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli.app", "pair", "--null", "-n", "absent"], env=absent, capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "there is no namespace absent" in done.stderr
    config = cluster.server.root / "nobody.kubeconfig"
    config.write_text(cluster.server.kubeconfig.read_text())
    cluster.server.run("kubectl", "config", "set-credentials", "anonymous", "--kubeconfig", str(config))
    context = cluster.server.run("kubectl", "config", "current-context", "--kubeconfig", str(config))
    cluster.server.run("kubectl", "config", "set-context", context, "--user=anonymous", "--kubeconfig", str(config))
    code, _, err = cluster.done("candidates", KUBECONFIG=str(config))
    assert (code, err.count("\n")) == (2, 1)
    assert "refused" in err or "not allowed to list nodes" in err


@pytest.mark.parametrize(
    "flags",
    [(), ("--workload", "gradient", "--steps", "7", "--model", "paper-16l"), ("--kind", "null", "--seed", "3")],
    ids=str,
)
def test_what_a_dry_run_prints_is_taken_by_the_api_server(cluster: Cluster, flags: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli.app", "run", "--dry-run", *flags], env=cluster.server.environment,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = cluster.server.kubectl("create", "-n", cluster.namespace, "--dry-run=server", "-f", "-", input=done.stdout)
    assert "created (server dry run)" in said


def test_candidates_of_a_real_cluster(cluster: Cluster) -> None:
    code, out, err = cluster.done("candidates", "--json")
    assert code == 0, err
    mine = {c["node"]: c for c in json.loads(out)["candidates"]}
    assert mine[cluster.sick]["reference"] == cluster.good, mine
    code, out, _ = cluster.done("candidates")
    assert f"{cluster.sick} (cordoned): {cluster.good} (like the suspect, idle; cpu)" in out
