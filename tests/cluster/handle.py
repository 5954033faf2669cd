"""What tests hold of a running API server or cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cluster.bare.build import bin_dir, default_cache
from cluster.bare.tools import free_ports
from cluster.sessions import TOOL, bare

Object = Mapping[str, Any]
"""A Kubernetes object, as in YAML."""


class ApiServer:
    """etcd and kube-apiserver, and nothing else: no controller, no scheduler, no node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        """The state folder; ``logs/NAME.log`` in it has each component's output."""
        self.kubeconfig = root / "kubeconfig"
        """Of the administrator, for any client on this machine."""
        programs = [os.environ.get("KUBEBUILDER_ASSETS", ""), str(bin_dir(default_cache(), "clients"))]
        own = root.parent  # no test leaves files in the home folder
        self.environment = {
            **os.environ,
            "PATH": ":".join([*filter(None, programs), os.environ["PATH"]]),
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(own / "kubectl"),
            "HELM_CACHE_HOME": str(own / "helm-cache"),
            "HELM_CONFIG_HOME": str(own / "helm-config"),
            "HELM_DATA_HOME": str(own / "helm-data"),
        }
        """For programs that tests start: kubectl and helm first in PATH, and KUBECONFIG."""
        self._touched = False

    def try_run(
        self, *argv: str, input: str | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a program in `environment`."""
        return subprocess.run(
            argv, env=self.environment, input=input, capture_output=True, text=True, timeout=timeout, check=False
        )

    def run(self, *argv: str, input: str | None = None, timeout: float = 120) -> str:
        """What the program prints.

        Raises:
            AssertionError: it failed; with what it said.
        """
        done = self.try_run(*argv, input=input, timeout=timeout)
        said = f"{done.stderr.strip()[-1000:]} {done.stdout.strip()[-300:]}"
        assert done.returncode == 0, f"{' '.join(argv)[:300]} exited with {done.returncode}: {said}"
        return done.stdout.strip()

    def kubectl(self, *args: str, input: str | None = None, timeout: float = 120) -> str:
        return self.run("kubectl", *args, input=input, timeout=timeout)

    def try_kubectl(
        self, *args: str, input: str | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        return self.try_run("kubectl", *args, input=input, timeout=timeout)

    def helm(self, *args: str, input: str | None = None, timeout: float = 300) -> str:
        return self.run("helm", *args, input=input, timeout=timeout)

    def get(self, *args: str) -> Any:
        """An object, or a List of them."""
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def apply(self, *objects: Object, namespace: str = "default") -> str:
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self.kubectl("apply", "--namespace", namespace, "-f", "-", input=json.dumps(items))

    # -- parts

    def stop(self, part: str) -> None:
        """Kill a component, or pull a node's plug; it is started again after the test at the latest."""
        self._touched = True
        bare(self.root, "stop", part)

    def start(self, part: str) -> None:
        """Start it again, and wait until it answers."""
        bare(self.root, "start", part)

    def mend(self) -> None:
        """Start whatever does not run after a test that stopped something, and wait until all is well."""
        if self._touched:
            bare(self.root, "start")
            self._touched = False

    def status(self) -> dict[str, int]:
        """{component: host PID} of all that runs."""
        lines = [line.split() for line in bare(self.root, "status").splitlines()]
        return {line[1]: int(line[0]) for line in lines if line[0].isdigit()}


class BareCluster(ApiServer):
    """A whole cluster with two real nodes."""

    nodes = ("node-1", "node-2")

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._loaded: set[tuple[Path, float]] = set()

    def load(self, *archives: Path) -> None:
        """Import image archives into every node, each once."""
        new = {(path.resolve(), path.stat().st_mtime) for path in archives} - self._loaded
        if new:
            bare(self.root, "load", *(path for path, _ in new))
            self._loaded |= new

    def enter(self, machine: str, *argv: str, input: str | None = None, timeout: float = 120) -> str:
        """What a program prints that runs in the namespaces of a node or of ``control-plane``."""
        return bare(self.root, "enter", machine, *argv, input=input, timeout=timeout).strip()

    @contextmanager
    def forward(self, target: str) -> Iterator[int]:
        """A port of 127.0.0.1 that leads to a pod's address or NodePort (``10.200.0.11:30080``) meanwhile."""
        (port,) = free_ports(1)
        words = [sys.executable, str(TOOL), "--root", str(self.root), "forward", str(port), target]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            until(f"port {port}", lambda: process.poll() is not None or _connects(port), 20)
            assert process.poll() is None, f"forward {target} exited with {process.returncode}"
            yield port
        finally:
            process.kill()
            process.wait()

    def node_is_ready(self, node: str) -> bool:
        conditions = self.get("node", node)["status"]["conditions"]
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def until(what: str, check: Callable[[], object], seconds: float = 120) -> float:
    """Wait for ``check()`` to be true, taking failed assertions and missing keys for "not yet"; seconds waited."""
    start, last = time.monotonic(), ""
    while True:
        try:
            if check():
                return time.monotonic() - start
        except (AssertionError, LookupError, OSError, json.JSONDecodeError) as error:
            last = f": {error}"
        if time.monotonic() - start > seconds:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}{last}")
        time.sleep(0.2)


def _connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False
