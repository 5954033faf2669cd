"""What the watches have seen, by PairRun; and the controller's own last writes, which they may not have seen yet."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tandem.kube.client import Kube, Object
from tandem.kube.informer import Informer, key_of, without_managed_fields
from tandem.kube.paths import JOBS, NODES, PAIRRUNS, PODS
from tandem.pairrun import names
from tandem.pairrun.status import PairRunStatus, read_status
from tandem_controller import parse
from tandem_controller.settings import Settings


class Enqueue(Protocol):
    """Takes the key of a PairRun that has changed; ``new``: nobody has looked at it yet."""

    def __call__(self, key: str, *, new: bool = False) -> None: ...


EVERY_RUN = "*"
"""Key that stands for all live PairRuns: a queue holds it once, however many nodes changed."""
MANAGED = f"app.kubernetes.io/managed-by={names.FIELD_MANAGER}"


class Caches:
    """PairRuns, their Jobs and pods, and all nodes."""

    def __init__(self, kube: Kube, settings: Settings, enqueue: Enqueue, on_error: Callable[[str], None]) -> None:
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._own: dict[str, Object] = {}
        """By key: objects as this controller wrote them, until the watch has caught up."""
        self._keys: dict[str, str] = {}
        """UID -> key of a PairRun."""
        self._statuses: dict[str, tuple[Any, PairRunStatus]] = {}
        """UID -> version of a PairRun, and its status as that version has it."""
        self._children: dict[str, dict[str, set[str]]] = {"jobs": defaultdict(set), "pods": defaultdict(set)}
        common: dict[str, Any] = {"resync_s": float(settings.resync_seconds), "on_error": on_error}
        namespace = settings.namespace
        self._pairruns = Informer(kube, PAIRRUNS.path(namespace), self._pairrun_changed, **common)
        self._jobs = Informer(
            kube, JOBS.path(namespace), self._child("jobs", parse.owner_uid), label_selector=MANAGED, **common
        )
        self._pods = Informer(
            kube, PODS.path(namespace), self._child("pods", parse.pair_uid), label_selector=MANAGED, **common
        )
        self._nodes = Informer(kube, NODES.path(), self._node_changed, slim=_slim_node, **common)

    @property
    def informers(self) -> tuple[Informer, ...]:
        return (self._pairruns, self._jobs, self._pods, self._nodes)

    # -- reading -----------------------------------------------------------------------------------

    def pairrun(self, key: str) -> Object | None:
        """The newest known version of a PairRun; None if it is gone."""
        seen = self._pairruns.get(key)
        with self._lock:
            own = self._own.get(key)
            if own is None or seen is None or own["metadata"]["uid"] != seen["metadata"]["uid"]:
                return seen
            return own if _version(own) > _version(seen) else seen

    def pairruns(self) -> list[Object]:
        """All of them, each in its newest known version."""
        found = (self.pairrun(key_of(obj)) for obj in self._pairruns.list())
        return [obj for obj in found if obj is not None]

    def status(self, obj: Mapping[str, Any]) -> PairRunStatus:
        """The status of a PairRun, read once per version: every pairing looks at all of them."""
        meta = obj["metadata"]
        key, version = str(meta["uid"]), meta.get("resourceVersion")
        with self._lock:
            known = self._statuses.get(key)
        if known is not None and known[0] == version:
            return known[1]
        status = read_status(obj.get("status"))
        with self._lock:
            self._statuses[key] = (version, status)
        return status

    def nodes(self) -> Sequence[Object]:
        return self._nodes.list()

    def pods_of(self, uid: str) -> list[Object]:
        """Pods of a PairRun's attempts."""
        return self._of("pods", self._pods, uid)

    def jobs_of(self, uid: str) -> list[Object]:
        """Jobs of a PairRun's attempts."""
        return self._of("jobs", self._jobs, uid)

    def _of(self, kind: str, informer: Informer, uid: str) -> list[Object]:
        with self._lock:
            keys = sorted(self._children[kind].get(uid, ()))
        return [obj for key in keys if (obj := informer.get(key)) is not None]

    # -- writing -----------------------------------------------------------------------------------

    def put_pairrun(self, obj: Object) -> None:
        """The controller wrote it."""
        with self._lock:
            self._own[key_of(obj)] = without_managed_fields(obj)

    def drop_pairrun(self, uid: str) -> None:
        """It is gone."""
        with self._lock:
            self._own = {key: obj for key, obj in self._own.items() if obj["metadata"]["uid"] != uid}

    # -- changes -----------------------------------------------------------------------------------

    def _pairrun_changed(self, key: str, before: Object | None, now: Object | None) -> None:
        with self._lock:
            own = self._own.get(key)
            if own is not None and (now is None or _version(now) >= _version(own)):
                del self._own[key]
            if now is not None:
                self._keys[now["metadata"]["uid"]] = key
            else:
                self._keys = {uid: k for uid, k in self._keys.items() if k != key}
                self._statuses = {uid: known for uid, known in self._statuses.items() if uid in self._keys}
        self._enqueue(key, new=before is None)

    def _child(self, kind: str, uid_of: Callable[[Object], str | None]) -> Callable[..., None]:
        def changed(key: str, before: Object | None, now: Object | None) -> None:
            obj = now or before
            uid = uid_of(obj) if obj is not None else None
            if uid is None:
                return
            with self._lock:
                if now is None:
                    self._children[kind][uid].discard(key)
                    if not self._children[kind][uid]:
                        del self._children[kind][uid]
                else:
                    self._children[kind][uid].add(key)
                owner = self._keys.get(uid)
            if owner is not None:
                self._enqueue(owner)

        return changed

    def _node_changed(self, _name: str, before: Object | None, now: Object | None) -> None:
        """Heartbeats change nothing that a pairing or an attempt looks at; the rest may concern every run."""
        if before is not None and now is not None and _telling(before) == _telling(now):
            return
        self._enqueue(EVERY_RUN)


def _version(obj: Object) -> int:
    """Opaque by contract, and a whole number in every API server; what is none counts as oldest."""
    text = str(obj["metadata"].get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0


def _slim_node(obj: Object) -> Object:
    """A node without the list of images that lie on it, which is most of it."""
    (obj.get("status") or {}).pop("images", None)
    return without_managed_fields(obj)


def _telling(node: Object) -> Any:
    """What of a node decisions depend on."""
    meta, spec, status = (node.get(part) or {} for part in ("metadata", "spec", "status"))
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or []}
    return (
        meta.get("labels"), meta.get("deletionTimestamp"), spec.get("unschedulable"), spec.get("taints"), conditions,
        status.get("allocatable"), status.get("capacity"), status.get("nodeInfo"),
    )  # fmt: skip
