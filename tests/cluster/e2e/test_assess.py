"""``tandem assess`` on real nodes: the null control between two others, then the node against one of them."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.e2e.installation import NAMESPACE, Tandem
from cluster.forwarded import forwarded
from cluster.handle import BareCluster
from cluster.sessions import booted

pytestmark = [pytest.mark.needs("machines"), pytest.mark.slow, pytest.mark.timeout(2400)]
RUNS = 4
"""For each of two workloads a null control and the node itself."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    """An installation on three nodes: a null control asks for two besides the one in doubt."""
    with booted("--nodes", "3") as root:
        bare = BareCluster(root)
        bare.nodes = ("node-1", "node-3")
        found = Tandem(bare, tmp_path_factory.mktemp("tandem"))
        found.install()
        yield found


@contextmanager
def reachable(tandem: Tandem) -> Iterator[BareCluster]:
    """The cluster with TANDEM_DB in its environment: PostgreSQL by `kubectl port-forward`, as docs/cli.md says."""
    assert isinstance(tandem.cluster, BareCluster)
    held = tandem.cluster.get("secrets", "--namespace", NAMESPACE, "-l", "app.kubernetes.io/component=postgres")
    password = base64.b64decode(held["items"][0]["data"]["password"]).decode()
    with forwarded(tandem.cluster, NAMESPACE, "service/tandem-postgres", 5432) as port:
        tandem.cluster.environment["TANDEM_DB"] = f"postgresql://tandem:{password}@127.0.0.1:{port}/tandem"
        yield tandem.cluster


def test_an_assessment_makes_its_controls_and_pairs_and_says_what_is_missing(three: Tandem, tmp_path: Path) -> None:
    """With `tiny` it cannot clear the node, and says so; called again it makes nothing anew."""
    words = [
        sys.executable, "-m", "tandem.cli.app", "assess", three.suspect, "--model", "tiny", "--tp", "1",
        "--each", "60s", "--namespace", NAMESPACE, "--out", str(tmp_path / "node.html"), "--json",
    ]  # fmt: skip
    with three.quarantined(), reachable(three) as cluster:
        done = cluster.try_run(*words, timeout=2000)
        again = cluster.try_run(*words, timeout=100)
    assert done.stdout, done.stderr
    assert again.stdout, again.stderr
    assert done.returncode == again.returncode == 2, done.stderr
    told, told_again = (json.loads(each.stdout) for each in (done, again))
    assert told["runs_made"] == RUNS, done.stderr
    assert told_again["runs_made"] == 0, again.stderr
    assert "too small" in told["ended"]
    assert told["profile"]["verdict"] == "unknown"
    assert told["profile"] == told_again["profile"]
    assert (tmp_path / "node.html").stat().st_size > 10_000
    made = three.cluster.get("pairruns", "--namespace", NAMESPACE)["items"]
    kinds = sorted((each["spec"]["kind"], each["spec"]["workload"]["name"]) for each in made)
    assert kinds == [("null", "gradient"), ("null", "submodule"), ("suspect", "gradient"), ("suspect", "submodule")]
    for each in made:
        nodes = {each["status"]["suspect"]["node"], each["status"]["reference"]["node"]}
        assert (three.suspect in nodes) == (each["spec"]["kind"] == "suspect")
