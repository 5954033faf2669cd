"""One PairRun, from what is seen to what is done: gather, plan, one status write, then the actions.

The caches may be behind; the status write fails then (its resourceVersion is old), and the key comes again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from tandem.db.fence import Fenced
from tandem.errors import DatabaseError, SpecError
from tandem.kube.errors import Conflict, Forbidden, KubeError, NotFound
from tandem.kube.paths import PAIRRUNS, SECRETS, Resource
from tandem.pairing.choose import World
from tandem.pairrun import names
from tandem.pairrun.spec import PairRunSpec, read_spec
from tandem.pairrun.status import PairRunStatus, seconds
from tandem.vocabulary import Kind, Role
from tandem_controller import parse, world
from tandem_controller.act import Actor
from tandem_controller.marks import session_of
from tandem_controller.observed import Decision, Event, Job, Observed, Pod, Release, UnmarkNodes
from tandem_controller.parts import Parts
from tandem_controller.plan import plan

log = logging.getLogger("tandem.controller")
CLAIMS = Resource("/api/v1", "persistentvolumeclaims")
CONFIG_MAPS = Resource("/api/v1", "configmaps")
REMEMBERED_S = 10.0
"""How long it is taken for true that an object which pods need is there, or is not."""
POD_MADE_S = 5.0
"""How long after the start of an attempt a Job without a pod is nothing to ask about."""
PASSES = 3
"""How often one reconcile looks again at once, after it changed something that the next look depends on."""


class Reconciler:
    """Reconciles one key at a time; several threads may each have one."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.actor = Actor(parts)
        self._pairing = threading.Lock()
        self._seen: dict[str, tuple[float, bool]] = {}
        """Path of an object that pods need -> when it was asked for, and whether it was there."""
        self._failures: dict[str, dict[str, str]] = {}
        """By key: what could not be done lately."""

    def reconcile(self, key: str) -> float | None:
        """Bring one PairRun forward; returns after how many seconds to look again, None for at the next event.

        Raises:
            Fenced: a newer leader has written: this process must end.
            KubeError: the API server refused or did not answer; the key comes again later.
        """
        for _ in range(PASSES):
            obj = self.parts.caches.pairrun(key)
            if obj is None:
                self._failures.pop(key, None)
                return None
            with self._choosing(obj):
                seen, decision = decide(self._observe(key, obj), self.parts.snapshot)
                written = self._write(seen, decision)
            if not self._act(key, seen, decision, written):
                return self._again_after(key, decision)
        return 0.5

    def _again_after(self, key: str, decision: Decision) -> float | None:
        """What was refused is tried again: nobody tells when a right is granted."""
        if not self._failures.get(key):
            return decision.requeue_s
        soon = float(self.parts.settings.pairing_seconds)
        return soon if decision.requeue_s is None else min(decision.requeue_s, soon)

    def _choosing(self, obj: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """One at a time where nodes may be chosen: the next choice must see what this one claimed."""
        return self._pairing if _needs_a_pair(self.parts.caches.status(obj)) else nullcontext()

    # -- seeing ------------------------------------------------------------------------------------

    def _observe(self, key: str, obj: Mapping[str, Any]) -> Observed:
        parts = self.parts
        uid = str(obj["metadata"]["uid"])
        spec, error = _spec(obj)
        nodes = parts.nodes.of(parts.caches.nodes())
        run_id = names.run_id_of(uid, str(obj["metadata"]["creationTimestamp"]))
        pods = [pod for raw in parts.caches.pods_of(uid) if (pod := parse.pod_from(raw)) is not None]
        if _ends_soon(parts.caches.status(obj), pods):
            parts.facts.refresh([run_id])  # whether the end is stored decides what that end was
        seen = Observed(
            now=parts.clock(), obj=obj, spec=spec, spec_error=error, world=World(nodes=nodes, usage={}),
            policy=parts.policy, settings=parts.settings,
            facts=parts.facts.of(run_id), pods=pods,
            jobs=self._jobs(obj, pods),
            node_ready={node.name: node.ready for node in nodes}, failures=self._failures.get(key, {}),
            sessions=_sessions(parts.caches.nodes()),
        )  # fmt: skip
        if spec is None or not _needs_a_pair(seen.status):
            return seen
        missing: list[str] = []
        gathered = seen.world
        try:
            gathered = world.gather(
                nodes, parts.caches.pairruns(), uid, spec, seen.status, parts.snapshot.usage,
                parts.verdicts.compared_with, parts.caches.status,
            )  # fmt: skip
            missing = self._missing(seen, spec)
        except DatabaseError as failure:
            missing = [f"which references were used before cannot be told: {failure}"]
        except KubeError as failure:
            missing = [str(failure)]
        return replace(seen, world=gathered, missing=missing)

    def _jobs(self, obj: Mapping[str, Any], pods: Sequence[Pod]) -> list[Job]:
        """A PairRun's Jobs; those of an attempt that should have started by now with why they have no pod."""
        meta, parts = obj["metadata"], self.parts
        jobs = [job for raw in parts.caches.jobs_of(meta["uid"]) if (job := parse.job_from(raw)) is not None]
        status = parts.caches.status(obj)
        last = status.attempts[-1] if status.attempts else None
        if last is None or last.running_at is not None or last.ended_at is not None:
            return jobs
        if parts.clock() - (seconds(last.started_at) or 0.0) < POD_MADE_S:
            return jobs
        there = {pod.role for pod in pods if pod.attempt == last.number}
        return [
            replace(job, refused=parts.refusals.of(meta["namespace"], job.name))
            if job.attempt == last.number and job.role not in there and not job.failed
            else job
            for job in jobs
        ]

    def _missing(self, seen: Observed, spec: PairRunSpec) -> list[str]:
        """What the pods will need and the namespace lacks: a pod would wait for it for ever, and tell events only."""
        wanted = [(SECRETS, self.parts.settings.database.name, "the database's Secret")]
        for volume in spec.template.volumes:
            if volume.persistent_volume_claim is not None:
                wanted.append((CLAIMS, volume.persistent_volume_claim, f"volume {volume.name}"))
            if volume.config_map is not None:
                wanted.append((CONFIG_MAPS, volume.config_map, f"volume {volume.name}"))
        found = []
        for resource, name, what in wanted:
            if not self._exists(resource.path(seen.namespace, name)):
                found.append(f"{what}: {resource.plural}/{name} does not exist in {seen.namespace}: create it")
        return found

    def _exists(self, path: str) -> bool:
        """Whether an object is there, as of a few seconds ago: many PairRuns that wait ask for the same one."""
        now = time.monotonic()
        asked, there = self._seen.get(path, (float("-inf"), False))
        if now - asked > REMEMBERED_S:
            there = self.parts.kube.exists(path)
            self._seen[path] = (now, there)
        return there

    # -- doing -------------------------------------------------------------------------------------

    def _write(self, seen: Observed, decision: Decision) -> bool:
        """Write the status if it changed. What it claims is seen by the next pairing at once."""
        if decision.status == seen.status and seen.obj.get("status"):
            return False
        body = {**seen.obj, "status": decision.status.to_object()}
        path = PAIRRUNS.path(seen.namespace, seen.name, "status")
        try:
            self.parts.caches.put_pairrun(self.parts.kube.replace(path, body))
        except NotFound:
            self.parts.caches.drop_pairrun(seen.uid)
            return False
        self.parts.metrics.status_writes.inc()
        if decision.status.holds(names.FINISHED) and not seen.status.holds(names.FINISHED):
            self.parts.metrics.finished(seen.spec.kind if seen.spec is not None else Kind.SUSPECT, decision.status)
        return True

    def _act(self, key: str, seen: Observed, decision: Decision, written: bool) -> bool:
        """Do what was decided, in order; whether it is worth looking again at once.

        What is refused is remembered until the like of it is done: not every action is decided again at each look.
        """
        before = self._failures.get(key, {})
        failures = dict(before)
        undone: set[str] = set()
        again = False
        for action in decision.actions:
            if isinstance(action, Event) and not written:
                continue
            name = type(action).__name__
            if isinstance(action, Release) and UnmarkNodes.__name__ in undone:
                continue  # the finalizer is what brings the marks off
            if name not in undone:
                failures.pop(name, None)
            try:
                again |= self.actor.do(action, seen, decision.status)
            except Fenced:
                raise
            except DatabaseError as error:
                log.warning("%s: %s: %s", key, name, error)
                # Whether the database is away, which holds every run, or refuses this one's rows alone.
                self.parts.facts.refresh([seen.run_id])
                if self.parts.facts.error is None:
                    failures[name] = str(error)
                    undone.add(name)
            except Conflict as error:
                log.info("%s: %s: %s", key, name, error)
                undone.add(name)
                again = True
            except KubeError as error:
                if isinstance(error, Forbidden) or error.status == 422:
                    failures[name] = str(error)
                    undone.add(name)
                    log.warning("%s: %s: %s", key, name, error)
                else:
                    raise
        self._failures[key] = failures
        return again or failures != before


def decide(seen: Observed, snapshot: world.PodSnapshot) -> tuple[Observed, Decision]:
    """Plan; where nodes were chosen by what ran on them a while ago, look at these now, and plan again.

    Returns:
        What the decision was made from, and the decision.
    """
    decision = plan(seen)
    looked: set[str] = set()
    while unsure := set(snapshot.stale(_newly_chosen(seen, decision))) - looked:
        looked |= unsure
        try:
            seen = replace(seen, world=replace(seen.world, usage=snapshot.look_at(sorted(unsure))))
        except KubeError as failure:
            seen = replace(seen, missing=[str(failure)])
        decision = plan(seen)
    return seen, decision


def _spec(obj: Mapping[str, Any]) -> tuple[PairRunSpec | None, str]:
    try:
        return read_spec(obj.get("spec") or {}), ""
    except SpecError as error:
        return None, str(error)


def _sessions(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Nodes that carry the mark of a session -> the run that it is of."""
    found = ((str(node["metadata"]["name"]), session_of(node["metadata"])) for node in nodes)
    return {name: run for name, run in found if run is not None}


def _ends_soon(status: PairRunStatus, pods: Sequence[Pod]) -> bool:
    """Whether the current attempt ran, and one of its sides works no longer."""
    last = status.attempts[-1] if status.attempts else None
    if last is None or last.ended_at is not None or last.running_at is None:
        return False
    return {pod.role for pod in pods if pod.attempt == last.number and pod.running} != set(Role)


def _newly_chosen(seen: Observed, decision: Decision) -> tuple[str, ...]:
    """Nodes of the attempt that a decision starts, if it starts one."""
    if decision.status.attempt == seen.status.attempt:
        return ()
    last = decision.status.attempts[-1]
    return last.suspect.node, last.reference.node


def _needs_a_pair(status: PairRunStatus) -> bool:
    """Whether nodes may have to be chosen now; gathering what that takes is not free."""
    if status.holds(names.FINISHED):
        return False
    return not status.attempts or status.attempts[-1].ended_at is not None
