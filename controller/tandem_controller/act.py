"""Carries decisions out. Everything may be done twice: the next look decides again from what is there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import zmq

from tandem.errors import TandemError
from tandem.kube.client import Kube, Object
from tandem.kube.errors import Conflict, Forbidden, NotFound
from tandem.kube.paths import EVENTS, JOBS, NETWORK_POLICIES, NODES, PAIRRUNS, SECRETS, SERVICES, Resource
from tandem.pairing.nodes import node_from, tolerated_taints
from tandem.pairrun import names
from tandem.pairrun.status import AttemptStatus, PairRunStatus, timestamp
from tandem.vocabulary import Role
from tandem_controller import manifests, marks, observed
from tandem_controller.manifests import Attempt
from tandem_controller.observed import Observed
from tandem_controller.parts import Parts
from tandem_controller.verdicts import Stored

log = logging.getLogger("tandem.controller")
APPLIED: dict[str, Resource] = {"Job": JOBS, "Service": SERVICES, "NetworkPolicy": NETWORK_POLICIES}


class Actor:
    """Does one action at a time for one PairRun."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.kube: Kube = parts.kube

    def do(self, action: observed.Action, seen: Observed, status: PairRunStatus) -> bool:
        """Do one thing; returns whether the next look will see something new at once.

        Raises:
            KubeError: the API server refused, or did not answer.
            DatabaseError: PostgreSQL did not answer, or a newer leader has written (`Fenced`).
        """
        match action:
            case observed.MakeChildren(number):
                self._make(seen, _attempt(status, number))
            case observed.SetDeadline(number, limit):
                for role in Role:
                    path = JOBS.path(seen.namespace, names.child_name(seen.name, seen.uid, number, role))
                    with suppress(NotFound):  # it is made anew, or its attempt ends
                        self.kube.patch(path, {"spec": {"activeDeadlineSeconds": limit}}, manager=names.FIELD_MANAGER)
            case observed.RemoveChildren(number):
                self._remove(seen, number)
            case observed.StoreAttempt(number):
                self.parts.verdicts.store(_stored(seen, _attempt(status, number)))
                self.parts.facts.refresh([seen.run_id])
            case observed.CloseAttempt(number, reason):
                self.parts.verdicts.close(seen.run_id, number, reason, _images(_attempt(status, number)) or None)
            case observed.StoreImages(number):
                self.parts.verdicts.images(seen.run_id, number, _images(_attempt(status, number)))
            case observed.Judge():
                self.parts.verdicts.judge(seen.run_id)
                self.parts.facts.refresh([seen.run_id])
                return True
            case observed.Event():
                self._tell(seen, action)
            case observed.MarkNodes(nodes):
                self._mark(seen, nodes, _attempt(status, status.attempt).started_at)
            case observed.UnmarkNodes(nodes, suspect, verdict):
                self._unmark(seen, nodes, suspect, verdict)
            case observed.Release():
                self._finalizers(seen, [f for f in _finalizers_of(seen.obj) if f != names.FINALIZER])
            case observed.DeleteSelf():
                self.kube.delete(PAIRRUNS.path(seen.namespace, seen.name), uid=seen.uid)
        return False

    # -- children ----------------------------------------------------------------------------------

    def _make(self, seen: Observed, told: AttemptStatus) -> None:
        """Everything of an attempt, the Jobs last: their pods need the rest."""
        attempt = manifest_source(seen, told)
        self._keys(attempt)
        for body in (manifests.service(attempt), *manifests.network_policies(attempt, self.parts.settings.worker)):
            self._apply(body)
        # A Job's template is fixed; the node's taints, and with them the tolerations, are not: one that is there stays.
        there = {job.role for job in seen.jobs if job.attempt == told.number}
        for role in (role for role in Role if role not in there):
            self._apply(manifests.job(attempt, role, self.parts.settings))

    def _keys(self, attempt: Attempt) -> None:
        """Both sides' link keys, made once: a second pair of keys would cut a running pair apart."""
        pairs = {role: zmq.curve_keypair() for role in Role}
        bodies = {
            role: manifests.link_secret(attempt, role, pairs[role], pairs[peer][0])
            for role, peer in ((Role.REFERENCE, Role.SUSPECT), (Role.SUSPECT, Role.REFERENCE))
        }
        first, second = Role
        try:
            self.kube.create(SECRETS.path(attempt.namespace), bodies[first])
        except Conflict:
            if self.kube.exists(SECRETS.path(attempt.namespace, attempt.name(second))):
                return
            # One alone is left of a try that was cut short: no pod has it yet.
            self.kube.delete(SECRETS.path(attempt.namespace, attempt.name(first)))
            self.kube.create(SECRETS.path(attempt.namespace), bodies[first])
        try:
            self.kube.create(SECRETS.path(attempt.namespace), bodies[second])
        except Conflict:
            self.kube.delete(SECRETS.path(attempt.namespace, attempt.name(second)))
            self.kube.create(SECRETS.path(attempt.namespace), bodies[second])

    def _remove(self, seen: Observed, number: int) -> None:
        """Jobs with their pods, keys, Service, as many as may be. NetworkPolicies stay as long as a stuck pod may."""
        sides = [names.child_name(seen.name, seen.uid, number, role) for role in Role]
        paths = [JOBS.path(seen.namespace, name) for name in sides]
        paths += [SECRETS.path(seen.namespace, name) for name in sides]
        paths.append(SERVICES.path(seen.namespace, names.child_name(seen.name, seen.uid, number)))
        refused: Forbidden | None = None
        for path in paths:
            try:
                self.kube.delete(path)
            except Forbidden as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _apply(self, body: manifests.Manifest) -> None:
        meta = body["metadata"]
        path = APPLIED[body["kind"]].path(meta["namespace"], meta["name"])
        self.kube.apply(path, body, manager=names.FIELD_MANAGER)

    # -- people ------------------------------------------------------------------------------------

    def _tell(self, seen: Observed, event: observed.Event) -> None:
        """An Event on the PairRun. Its name is made of what it says, so that saying it twice makes one."""
        stamp = timestamp(seen.now)
        mark = hashlib.sha256(f"{seen.uid}{event.reason}{event.message}{stamp}".encode()).hexdigest()[:16]
        body = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": f"{seen.name[:200]}.{mark}", "namespace": seen.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION, "kind": names.KIND, "name": seen.name, "namespace": seen.namespace,
                "uid": seen.uid,
            },
            "reason": event.reason[:128], "message": event.message[:1024],
            "type": "Warning" if event.warning else "Normal", "count": 1,
            "source": {"component": names.FIELD_MANAGER}, "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": names.FIELD_MANAGER, "firstTimestamp": stamp, "lastTimestamp": stamp,
        }  # fmt: skip
        try:
            self.kube.create(EVENTS.path(seen.namespace), body)
        except TandemError as error:
            # An event is a courtesy: the status says the same.
            log.warning("%s/%s: the event %s could not be written: %s", seen.namespace, seen.name, event.reason, error)

    # -- node marks --------------------------------------------------------------------------------

    def _mark(self, seen: Observed, nodes: tuple[str, ...], since: str) -> None:
        """The finalizer first: whatever happens then, the marks come off before the object goes."""
        if names.FINALIZER not in _finalizers_of(seen.obj):
            self._finalizers(seen, [*_finalizers_of(seen.obj), names.FINALIZER])
        for name in nodes:
            with suppress(NotFound):  # the node left the cluster, and its marks with it
                meta = self.kube.get(NODES.path(None, name))["metadata"]
                if (body := marks.session(str(seen.run_id), seen.namespace, since, meta)) is not None:
                    self._patch_node(name, body)

    def _unmark(self, seen: Observed, nodes: tuple[str, ...], suspect: str, verdict: str) -> None:
        """Looks at each node as it is now: the watch may not have seen a mark yet that has to go."""
        run_id = str(seen.run_id)
        for name in nodes:
            with suppress(NotFound):
                node = self.kube.get(NODES.path(None, name))
                said = verdict if name == suspect and marks.tells(run_id, node["metadata"]) else ""
                if (body := marks.session_over(run_id, said, node["metadata"])) is not None:
                    node = self._patch_node(name, body)
                if said:
                    before = (node.get("status") or {}).get("conditions") or []
                    self._patch_node(name, marks.condition(said, seen.status.message, seen.now, before), "status")

    def _patch_node(self, node: str, body: Object | list[Object], sub: str | None = None) -> Object:
        return self.kube.patch(NODES.path(None, node, sub), body, manager=names.FIELD_MANAGER)

    def _finalizers(self, seen: Observed, wanted: list[str]) -> None:
        body = {"metadata": {"finalizers": wanted, "resourceVersion": seen.obj["metadata"].get("resourceVersion")}}
        current = self.parts.caches.pairrun(f"{seen.namespace}/{seen.name}")
        if current is not None:
            body["metadata"]["resourceVersion"] = current["metadata"].get("resourceVersion")
        with suppress(NotFound):
            self.parts.caches.put_pairrun(self.kube.patch(PAIRRUNS.path(seen.namespace, seen.name), body))


def manifest_source(seen: Observed, told: AttemptStatus) -> Attempt:
    """What the manifests of an attempt are made of: the same whenever it is asked."""
    assert seen.spec is not None
    node = next((n for n in seen.world.nodes if n.name == told.suspect.node), node_from({"metadata": {}}))
    return Attempt(
        pairrun=seen.name, uid=seen.uid, namespace=seen.namespace, run_id=seen.run_id, number=told.number,
        spec=seen.spec, run=seen.spec.run.model_copy(update={"tp": told.ranks}),
        nodes={Role.SUSPECT: told.suspect.node, Role.REFERENCE: told.reference.node}, device=told.device,
        devices=told.devices, node_devices=told.node_devices,
        tolerated=tolerated_taints(node, seen.policy), device_taints=seen.policy.device_taints,
    )  # fmt: skip


def _stored(seen: Observed, told: AttemptStatus) -> Stored:
    assert seen.spec is not None
    return Stored(
        run_id=seen.run_id, number=told.number, pairrun=seen.name, uid=seen.uid,
        run=seen.spec.run.model_copy(update={"tp": told.ranks}), reference=told.reference.node,
        suspect=told.suspect.node, devices=told.ranks, images=_images(told),
    )  # fmt: skip


def _attempt(status: PairRunStatus, number: int) -> AttemptStatus:
    return next(a for a in status.attempts if a.number == number)


def _images(told: AttemptStatus) -> dict[str, str]:
    sides = {Role.REFERENCE: told.reference, Role.SUSPECT: told.suspect}
    return {str(role): side.image for role, side in sides.items() if side.image}


def _finalizers_of(obj: Mapping[str, Any]) -> list[str]:
    return list((obj.get("metadata") or {}).get("finalizers") or [])
