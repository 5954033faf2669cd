"""What pairing looks at, gathered: nodes from the watch, other runs' claims, and what is free right now."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tandem.kube.client import Kube
from tandem.kube.paths import PODS
from tandem.pairing.choose import World
from tandem.pairing.claims import StatusOf, claims, served
from tandem.pairing.nodes import Node, PodUse, node_from, pod_use_from
from tandem.pairrun.spec import PairRunSpec
from tandem.pairrun.status import PairRunStatus
from tandem.vocabulary import Kind
from tandem_controller.ending import tried

SNAPSHOT_S = 2.0
"""How old a list of all pods may be; what this controller placed since is known from the claims."""


class PodSnapshot:
    """What runs on the cluster's nodes. A list now and then costs less than a watch of every pod. Thread-safe."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._usage: dict[str, list[PodUse]] = {}

    def usage(self) -> Mapping[str, list[PodUse]]:
        """Pods by node.

        Raises:
            KubeError: the list cannot be had.
        """
        with self._lock:
            if self._clock() - self._at > SNAPSHOT_S:
                running = "status.phase!=Succeeded,status.phase!=Failed"
                found: dict[str, list[PodUse]] = defaultdict(list)
                for obj in self._kube.list(PODS.path(), field_selector=running).items:
                    if (pod := pod_use_from(obj)) is not None:
                        found[pod.node].append(pod)
                self._usage, self._at = found, self._clock()
            return self._usage


class Nodes:
    """Nodes as pairing sees them, read once per version of the object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, tuple[Any, Node]] = {}

    def of(self, objects: Iterable[Mapping[str, Any]]) -> list[Node]:
        """Nodes from their objects."""
        with self._lock:
            read = {}
            for obj in objects:
                name, version = obj["metadata"]["name"], obj["metadata"].get("resourceVersion")
                known = self._read.get(name)
                read[name] = known if known is not None and known[0] == version else (version, node_from(obj))
            self._read = read
            return [node for _, node in read.values()]


def gather(
    nodes: list[Node],
    pairruns: Sequence[Mapping[str, Any]],
    uid: str,
    spec: PairRunSpec,
    status: PairRunStatus,
    usage: Callable[[], Mapping[str, list[PodUse]]],
    compared_with: Callable[[], Mapping[str, frozenset[str]]],
    status_of: StatusOf,
) -> World:
    """Everything that choosing a pair for one run needs.

    Raises:
        KubeError: the pods cannot be listed.
        DatabaseError: a swap is asked for, and nobody knows which references were used before.
    """
    before = compared_with() if spec.kind is Kind.SWAP else {}
    return World(
        nodes=nodes, usage=usage(), claims=claims(pairruns, uid, status_of), tried=tried(status),
        used_before=before, served=served(pairruns, status_of),
    )  # fmt: skip
