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

FRESH_S = 2.0
"""How old a look at a node that is about to be chosen may be; what this controller placed since is in the claims."""
RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


class PodSnapshot:
    """What runs on the cluster's nodes: a list of all pods now and then, and a fresh one of each node that is chosen.

    A list costs less than a watch of every pod. An old one can only delay a pairing: it makes none. Thread-safe.

    Args:
        kube: the cluster.
        patience_s: how old the list of all pods may be, seconds.
        clock: monotonic, seconds.
    """

    def __init__(self, kube: Kube, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._patience_s, self._clock = kube, max(patience_s, FRESH_S), clock
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._looked: dict[str, float] = {}
        """Node -> when it alone was looked at, after the list of all."""
        self._usage: Mapping[str, list[PodUse]] = {}

    def usage(self) -> Mapping[str, list[PodUse]]:
        """Pods by node.

        Raises:
            KubeError: the list cannot be had.
        """
        with self._lock:
            if (now := self._clock()) - self._at > self._patience_s:
                self._usage, self._at, self._looked = self._list(RUNNING), now, {}
            return self._usage

    def stale(self, nodes: Iterable[str]) -> list[str]:
        """Those of the nodes whose pods must be looked at again before one is chosen."""
        with self._lock:
            now = self._clock()
            return [node for node in nodes if now - self._looked.get(node, self._at) > FRESH_S]

    def look_at(self, nodes: Iterable[str]) -> Mapping[str, list[PodUse]]:
        """Pods by node, these nodes' as they are now.

        Raises:
            KubeError: a list cannot be had.
        """
        with self._lock:
            for node in nodes:
                now = self._clock()
                found = self._list(f"spec.nodeName={node},{RUNNING}").get(node, [])
                self._usage, self._looked[node] = {**self._usage, node: found}, now
            return self._usage

    def _list(self, selector: str) -> dict[str, list[PodUse]]:
        found: dict[str, list[PodUse]] = defaultdict(list)
        for obj in self._kube.list(PODS.path(), field_selector=selector).items:
            if (pod := pod_use_from(obj)) is not None:
                found[pod.node].append(pod)
        return dict(found)


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
