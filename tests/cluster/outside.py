"""Clusters that the tests did not build program by program: whatever KUBECONFIG names, and kind where Docker exists.

Their machines are not ours to switch off: tests that do so need the part ``machines`` and are skipped, by name.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.handle import ApiServer

HOW = "TANDEM_E2E"
"""Variable that says which cluster the tests get: ``bare`` (built here, the default), ``kind`` or ``kubeconfig``."""
IMAGES = "TANDEM_E2E_IMAGES"
"""For ``kubeconfig``: where its nodes pull from, such as ``ghcr.io/me``; tandem-controller, tandem-api and
tandem-worker must be there, with the tag that TANDEM_E2E_TAG names (``test``)."""
ROOT = Path(__file__).resolve().parents[2]
KIND_CONFIG = Path(__file__).with_name("kind.yaml")
KIND_NAME = "tandem-test"


def how() -> str:
    """``bare``, ``kind`` or ``kubeconfig``.

    Raises:
        ValueError: the variable holds something else.
    """
    chosen = os.environ.get(HOW) or "bare"
    if chosen not in ("bare", "kind", "kubeconfig"):
        raise ValueError(f"{HOW} is {chosen!r}: use bare, kind or kubeconfig")
    return chosen


class Outside(ApiServer):
    """A cluster that exists; two of its nodes become suspect and reference."""

    def __init__(self, root: Path, kubeconfig: Path) -> None:
        super().__init__(root)
        self.kubeconfig = kubeconfig
        self.environment["KUBECONFIG"] = str(kubeconfig)
        found = workers(self.get("nodes")["items"])
        assert len(found) >= 2, f"the cluster has {len(found)} Ready nodes that take pods: these tests need two"
        self.nodes = (found[0], found[1])

    def images(self) -> dict[str, Any]:
        """Chart values by which the nodes find the images."""
        where, tag = os.environ.get(IMAGES, ""), os.environ.get("TANDEM_E2E_TAG", "test")
        assert where, f"{IMAGES} is not set: push Tandem's three images with the tag {tag}, and say where to"
        return {
            "image": {"pullPolicy": "IfNotPresent"},
            "controller": {"image": {"repository": f"{where}/tandem-controller", "tag": tag}},
            "api": {"image": {"repository": f"{where}/tandem-api", "tag": tag}},
            "worker": {"image": {"repository": f"{where}/tandem-worker", "tag": tag}},
        }

    def gives_disks(self) -> bool:
        """Whether a claim gets a volume by itself."""
        mark = "storageclass.kubernetes.io/is-default-class"
        classes = self.get("storageclasses")["items"]
        return any((c["metadata"].get("annotations") or {}).get(mark) == "true" for c in classes)


class Kind(Outside):
    """A cluster of kind, with images built by Docker and loaded into its nodes."""

    def images(self) -> dict[str, Any]:
        for target in ("controller", "api", "worker"):
            tag = f"localhost/tandem-{target}:test"
            dockerfile = str(ROOT / "deploy" / "Dockerfile")
            self.run("docker", "build", "-f", dockerfile, "--target", target, "-t", tag, str(ROOT), timeout=1800)
            self.run("kind", "load", "docker-image", tag, "--name", KIND_NAME, timeout=600)
        return {
            "image": {"pullPolicy": "IfNotPresent"},
            "controller": {"image": {"repository": "localhost/tandem-controller", "tag": "test"}},
            "api": {"image": {"repository": "localhost/tandem-api", "tag": "test"}},
            "worker": {"image": {"repository": "localhost/tandem-worker", "tag": "test"}},
        }


@contextmanager
def kind(folder: Path) -> Iterator[Kind]:
    """A cluster of kind; removed afterwards."""
    kubeconfig = folder / "kubeconfig"
    words = ["--name", KIND_NAME, "--kubeconfig", str(kubeconfig)]
    try:
        _run("kind", "create", "cluster", *words, "--config", str(KIND_CONFIG), "--wait", "5m")
        yield Kind(folder / "run", kubeconfig)
    finally:
        _run("kind", "delete", "cluster", *words)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{' '.join(argv)} exited with {done.returncode}: {done.stderr[-1000:]}"


def workers(nodes: list[dict[str, Any]]) -> list[str]:
    """Names of the Ready nodes that take ordinary pods, sorted."""
    names = []
    for node in nodes:
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
        spec = node.get("spec", {})
        closed = spec.get("unschedulable") or any(t["effect"] != "PreferNoSchedule" for t in spec.get("taints", []))
        if ready and not closed:
            names.append(node["metadata"]["name"])
    return sorted(names)
