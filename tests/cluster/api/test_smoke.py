"""The API server that tests get is real: it keeps, refuses, watches, and survives its own restart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.bare.build import API_SERVER, ASSETS, CLIENTS_LOCK, default_cache, find
from cluster.bare.machines import marked_processes
from cluster.handle import ApiServer, until
from cluster.sessions import PREFIX, TOOL, booted, clean

pytestmark = pytest.mark.needs("api-server")


def config_map(name: str, **data: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_it_runs_etcd_and_an_api_server_and_nothing_else(api_server: ApiServer) -> None:
    assert set(api_server.status()) == {"etcd", "kube-apiserver"}
    version = json.loads(api_server.kubectl("version", "-o", "json"))
    assert version["serverVersion"]["gitVersion"].startswith("v1.")
    assert "$Format" not in version["serverVersion"]["gitVersion"]


def test_what_is_written_is_read_again_and_nonsense_is_refused(api_server: ApiServer) -> None:
    api_server.apply(config_map("smoke", a="1"))
    assert api_server.get("configmap", "smoke")["data"] == {"a": "1"}
    refused = api_server.try_kubectl("apply", "-f", "-", input=json.dumps(config_map("Not A Name")))
    assert refused.returncode != 0
    assert "Invalid value" in refused.stderr


@pytest.mark.parametrize("part", ["kube-apiserver", "etcd"])
def test_a_part_that_was_killed_is_started_again_and_nothing_is_lost(api_server: ApiServer, part: str) -> None:
    api_server.apply(config_map("kept", by=part))
    api_server.stop(part)
    assert part not in api_server.status()
    assert api_server.try_kubectl("get", "configmap", "kept", "--request-timeout=3s").returncode != 0
    api_server.start(part)
    until("an answer", lambda: api_server.get("configmap", "kept")["data"] == {"by": part})


def test_what_a_test_left_stopped_is_mended(api_server: ApiServer) -> None:
    before = api_server.status()["kube-apiserver"]
    api_server.stop("kube-apiserver")
    api_server.mend()
    assert api_server.status()["kube-apiserver"] != before
    until("an answer", lambda: api_server.kubectl("get", "--raw", "/readyz") == "ok")


def test_a_server_that_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """The run is killed at its worst moment: when it has just booted, with everything running."""
    program = (
        "import sys, time; from cluster.sessions import booted\n"
        "with booted('--nodes', '0') as root: print(root, flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout is not None
    root = Path(run.stdout.readline().strip())
    assert root.parent.name.startswith(PREFIX)
    clean()
    assert (root / "state.json").exists(), "a server whose run is alive is left alone"
    run.kill()
    run.wait()
    run.stdout.close()
    clean()
    assert not root.parent.exists()
    assert str(root) not in {owner for owner, _, _ in marked_processes().values()}


def test_two_at_a_time_do_not_meet(api_server: ApiServer) -> None:
    api_server.apply(config_map("here"))
    with booted("--nodes", "0") as root:
        other = ApiServer(root)
        assert other.try_kubectl("get", "configmap", "here").returncode != 0
    assert not root.parent.exists()
    assert api_server.get("configmap", "here")


@pytest.mark.needs("root")
def test_it_needs_no_root(api_server: ApiServer, tandem_home: Path) -> None:
    """An unprivileged user, with two programs in KUBEBUILDER_ASSETS and the tool, boots one and takes it down."""
    nobody, assets, tool = 65534, tandem_home / "assets", tandem_home / "tests/cluster/bare"
    assets.mkdir()
    for name in API_SERVER:
        shutil.copy(find(default_cache(), name, os.environ.get(ASSETS, "")), assets / name)
    shutil.copytree(TOOL, tool)
    (tandem_home / "requirements").mkdir()
    shutil.copy(CLIENTS_LOCK, tandem_home / "requirements")
    own = tandem_home / "own"
    own.mkdir()
    os.chown(own, nobody, nobody)
    environment = {"PATH": f"{assets}:/usr/bin:/bin", ASSETS: str(assets), "HOME": str(own), "CLUSTER_CACHE": str(own)}
    words = ["setpriv", f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups"]

    def as_nobody(*argv: str) -> str:
        done = subprocess.run(
            [*words, *argv], env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def runs(python: str) -> bool:
        code = "import sys; sys.exit(sys.version_info < (3, 11))"
        return (
            Path(python).exists()
            and subprocess.run([*words, python, "-c", code], capture_output=True, check=False).returncode == 0
        )

    # The environment's Python may lie in a home that nobody else can enter.
    python = next((each for each in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3") if runs(each)), None)
    if python is None:
        pytest.skip("no Python that an unprivileged user may run")
    try:
        as_nobody(python, str(tool), "up", "--nodes", "0")
        assert as_nobody("kubectl", f"--kubeconfig={own}/run/kubeconfig", "get", "--raw", "/readyz") == "ok"
    finally:
        as_nobody(python, str(tool), "down")
    assert not (own / "run").exists()
