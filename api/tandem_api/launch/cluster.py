"""Runs of a cluster: each is a PairRun. The controller does the rest; PostgreSQL may be away meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from tandem.errors import SpecError
from tandem.ids import made_at
from tandem.kube.client import Kube, Object
from tandem.kube.errors import Conflict, Forbidden, KubeError, NotFound
from tandem.kube.informer import Informer
from tandem.kube.paths import NODES, PAIRRUNS
from tandem.kube.world import world
from tandem.pairing.candidates import Candidate, of_world
from tandem.pairing.policy import Policy
from tandem.pairrun import names
from tandem.pairrun.spec import read_spec
from tandem.pairrun.status import read_status, seconds
from tandem.pairrun.workload import from_run_spec
from tandem.vocabulary import Kind
from tandem_api.launch.launcher import Condition, Launch, Order, State, check, ended, key_reused
from tandem_api.problems import Problem, away, invalid, log, not_found

ANNOTATION_ORDER = "tandem.dev/api-order"
"""Digest of the order that a PairRun was made for: the same key with another order is refused."""
ANNOTATION_BY = "tandem.dev/launched-by"
"""Who asked the API for it."""
CANDIDATES_S = 5.0
"""How long the list of candidates is kept: it reads every node and pod."""
RESYNC_S = 600.0
TRIES = 3
"""How often an order is sent whose name is taken, and whose PairRun is gone when it is asked for."""
NEW_S, AWAITED_S, ASKED_S = 30.0, 2.0, 0.02
"""A run that began so lately, by either clock, may have come from another replica: it is waited for so long, and looked
for each so often.
"""


class ClusterLauncher:
    """Args:
    kube: with the right to list, watch, get, create and delete PairRuns, and to list nodes and pods.
    namespace: where PairRuns are made.
    policy: what is read from nodes.
    clock: monotonic seconds.
    wall: UTC seconds since the epoch.
    """

    mode = "cluster"

    def __init__(
        self, kube: Kube, namespace: str, policy: Policy, *, clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._kube, self._namespace, self._policy, self._clock, self._wall = kube, namespace, policy, clock, wall
        self._lock = threading.Lock()
        self._by_run: dict[UUID, Object] = {}
        self._informer = Informer(
            kube, PAIRRUNS.path(namespace), self._changed, resync_s=RESYNC_S,
            on_error=lambda line: log.warning("PairRuns: %s", line),
        )  # fmt: skip
        self._started = False
        self._candidates: list[Candidate] = []
        self._candidates_at: float | None = None
        self._listing = asyncio.Lock()

    async def start(self) -> None:
        if not self._started:
            self._started = True
            self._informer.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._informer.stop)

    def wrong(self) -> str | None:
        if not self._informer.synced:
            return "the cluster's PairRuns were not listed yet"
        return "the cluster does not answer" if self._informer.error else None

    # -- orders --------------------------------------------------------------------------------------

    async def launch(self, order: Order, *, by: str, key: str | None) -> tuple[Launch, bool]:
        check(order, self.mode)
        body = pairrun(order, self._namespace, by=by, key=key)
        await self._check_nodes(order)
        for _ in range(TRIES):
            try:
                made = await asyncio.to_thread(self._kube.create, PAIRRUNS.path(self._namespace), body)
            except Conflict:
                try:
                    path = PAIRRUNS.path(self._namespace, body["metadata"]["name"])
                    made = await asyncio.to_thread(self._kube.get, path)
                except NotFound:
                    continue  # it went in between, and with it the key
                except KubeError as error:
                    raise _refused(error) from None
                there = (made["metadata"].get("annotations") or {}).get(ANNOTATION_ORDER)
                if there != body["metadata"]["annotations"][ANNOTATION_ORDER]:
                    raise key_reused() from None
                return launch_of(made), False
            except KubeError as error:
                raise _refused(error) from None
            self._put(made)
            return launch_of(made), True
        raise away("the key's PairRun comes and goes", "cluster-away")

    async def cancel(self, run_id: UUID) -> Launch:
        await self.known(run_id)
        with self._lock:
            found = self._by_run.get(run_id)
        if found is None:
            raise not_found(f"PairRun of run {run_id}")
        launch = launch_of(found)
        if launch.state in (State.FINISHED, State.FAILED):
            raise ended(launch)
        path = PAIRRUNS.path(self._namespace, launch.name)
        try:
            await asyncio.to_thread(self._kube.delete, path, uid=str(found["metadata"]["uid"]))
        except Conflict:
            raise not_found(f"PairRun of run {run_id}") from None
        except KubeError as error:
            raise _refused(error) from None
        return launch

    def find(self, run_id: UUID) -> Launch | None:
        with self._lock:
            found = self._by_run.get(run_id)
        return None if found is None else launch_of(found)

    async def known(self, run_id: UUID) -> Launch | None:
        until = self._clock() + AWAITED_S
        while (found := self.find(run_id)) is None:
            if abs(self._wall() - made_at(run_id)) > NEW_S or self._clock() > until:
                return None
            await asyncio.sleep(ASKED_S)
        return found

    def open(self) -> list[Launch]:
        with self._lock:
            objects = sorted(self._by_run.items(), reverse=True)
        found = (launch_of(obj) for _, obj in objects)
        return [launch for launch in found if launch.state in (State.PENDING, State.RUNNING)]

    async def candidates(self) -> list[Candidate]:
        async with self._listing:
            if self._candidates_at is None or self._clock() - self._candidates_at > CANDIDATES_S:
                asked = self._clock()
                told = lambda line: log.warning("candidates: %s", line)
                self._candidates = of_world(await self._call(world, self._kube, told), self._policy)
                self._candidates_at = asked
            return self._candidates

    # -- below ---------------------------------------------------------------------------------------

    async def _check_nodes(self, order: Order) -> None:
        """A name that no node has is told now, not by a PairRun that waits for ever."""
        for field in ("node", "reference"):
            if (name := getattr(order, field)) is not None:
                try:
                    await asyncio.to_thread(self._kube.get, NODES.path(name=name))
                except NotFound:
                    raise invalid(f"body.{field}", f"there is no node {name} in this cluster") from None
                except Forbidden:
                    return  # whoever may not look leaves it to the controller
                except KubeError as error:
                    raise _refused(error) from None

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *args)
        except KubeError as error:
            raise _refused(error) from None

    def _changed(self, key: str, before: Object | None, now: Object | None) -> None:  # noqa: ARG002
        if now is not None:
            self._put(now)
        elif before is not None:
            with self._lock:
                self._by_run.pop(run_id_of(before), None)

    def _put(self, obj: Object) -> None:
        with self._lock:
            self._by_run[run_id_of(obj)] = obj


def pairrun(order: Order, namespace: str, *, by: str, key: str | None) -> Object:
    """The object that an order asks for.

    Its name comes from the user and their key alone, so that a second order with the same key meets the object
    of the first.

    Raises:
        Problem: 422: a field has no equal there.
    """
    spec: dict[str, Any] = {"kind": str(order.spec.kind)}
    if order.node is not None:
        spec["suspect"] = {"nodeName": order.node}
    if order.reference is not None:
        spec["reference"] = {"nodeName": order.reference}
    if order.cluster is not None:
        spec |= order.cluster.model_dump(mode="json", by_alias=True, exclude_unset=True)
    try:
        spec["workload"] = from_run_spec(order.spec)
        read_spec(spec)
    except SpecError as error:
        raise invalid("body.spec", str(error)) from None
    if order.spec.kind is Kind.SWAP and order.node is None:
        raise invalid("body.node", "a swap needs the node that ran before")
    stem = "run" if key is not None else (order.node or str(order.spec.kind))[:200].strip("-.")
    mark = hashlib.sha256(f"{by}\0{key}".encode() if key is not None else os.urandom(16)).hexdigest()
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": f"{stem}-{mark[:24] if key is not None else mark[:6]}",
            "namespace": namespace,
            "annotations": {ANNOTATION_ORDER: order.digest, ANNOTATION_BY: by[:1024]},
        },
        "spec": spec,
    }


def run_id_of(obj: Mapping[str, Any]) -> UUID:
    meta = obj["metadata"]
    return names.run_id_of(str(meta["uid"]), str(meta["creationTimestamp"]))


def launch_of(obj: Object) -> Launch:
    """How a PairRun stands, as its status says."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, read_status(obj.get("status"))
    workload = spec.get("workload") or {}
    finished, running = status.condition(names.FINISHED), status.holds(names.RUNNING)
    state = State.PENDING
    if finished is not None and finished.status == "True":
        state = State.FINISHED if status.verdict else State.FAILED
    elif running or status.attempts:
        state = State.RUNNING
    paired = status.condition(names.PAIRED)
    waits = paired.message or paired.reason if paired is not None and paired.status != "True" else ""
    return Launch(
        run_id=run_id_of(obj),
        name=str(meta["name"]),
        state=state,
        created_at=seconds(meta.get("creationTimestamp")) or 0.0,
        kind=str(spec.get("kind") or Kind.SUSPECT),
        workload=str(workload.get("name") or "submodule"),
        model=str(workload.get("model") or "tiny"),
        node=status.suspect.node if status.suspect else (spec.get("suspect") or {}).get("nodeName"),
        reference=status.reference.node if status.reference else (spec.get("reference") or {}).get("nodeName"),
        spec=spec,
        reason=status.reason or (paired.reason if waits and paired is not None else ""),
        message=status.message or waits,
        conditions=tuple(
            Condition(c.type, c.status, c.reason, c.message, seconds(c.last_transition_time)) for c in status.conditions
        ),
        synthetic="fault" in workload,
    )


def _refused(error: KubeError) -> Problem:
    """What the API server's refusal is to a client of ours."""
    if error.status in (400, 422):
        return invalid("body", error.message)
    if isinstance(error, NotFound):
        log.warning("%s", error)
        return away("the cluster has no PairRuns: is Tandem's chart installed?", "cluster-away")
    log.warning("%s", error)
    if error.status == 403 and "quota" in error.message:
        return Problem(403, "quota", error.message)
    return away("the cluster cannot be asked now", "cluster-away")
