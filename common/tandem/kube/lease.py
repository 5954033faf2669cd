"""Which replica acts: leader election on a coordination.k8s.io Lease, with a fencing token.

`kubernetes.leaderelection` (37.0) was read for this and does not hold up: its requests have no time limit, an error
below HTTP ends its thread, and it never counts the Lease's transitions. The rules here are those of client-go: a
candidate judges a Lease by its own clock, from when it last saw it change, never by the times written in it; the leader
stops acting (`Election.leads` turns False) well before anybody else may start.

The token is larger for every new holder, also after the Lease was deleted: the first one is the time in milliseconds,
each change of holder adds one. It goes into every write to the database (`tandem.db.fence`), which refuses an old
leader that was suspended and still believes in its lease.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from tandem.errors import TandemError
from tandem.kube.client import Kube, Object
from tandem.kube.errors import KubeError, NotFound
from tandem.kube.paths import LEASES

TOKEN = "tandem.dev/fencing-token"  # noqa: S105 - a number, no secret
"""Annotation of the Lease."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a candidate last saw change."""

    mark: tuple[str, str, str]
    """Holder, renew time and resource version."""
    at: float
    """On the candidate's own monotonic clock."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a Lease, and what it would then be."""

    action: Literal["create", "take", "renew", "wait"]
    seen: Seen | None
    token: int = 0
    body: Object | None = None


def decide(
    lease: Object | None, me: str, seen: Seen | None, *, now: float, wall: float, lease_s: float, floor: int = 0
) -> Choice:
    """What a candidate does next. Pure.

    Args:
        lease: as the API server has it; None if it has none.
        me: name of this candidate, unique per process.
        seen: what the last call returned.
        now: monotonic seconds of this process.
        wall: UTC seconds since the epoch, for what is written.
        lease_s: how long a lease lasts from its last renewal.
        floor: a new token is larger than this: the largest that anybody is known to have used.
    """
    if lease is None:
        token = max(int(wall * 1000), floor + 1)
        return Choice("create", None, token, _body(None, me, wall, lease_s, token, 0, wall))
    meta, spec = lease.get("metadata") or {}, lease.get("spec") or {}
    holder = str(spec.get("holderIdentity") or "")
    mark = (holder, str(spec.get("renewTime") or ""), str(meta.get("resourceVersion") or ""))
    if seen is None or seen.mark != mark:
        seen = Seen(mark, now)
    token = _token(meta)
    if holder == me:
        since = _seconds(spec.get("acquireTime")) or wall
        changes = int(spec.get("leaseTransitions") or 0)
        return Choice("renew", seen, token, _body(lease, me, wall, lease_s, token, changes, since))
    if holder and now - seen.at < _duration(spec, lease_s):
        return Choice("wait", seen)
    # An unreadable token is no reason to begin anew below one that was used.
    token = max(token + 1, floor + 1, 0 if token else int(wall * 1000))
    return Choice(
        "take", seen, token, _body(lease, me, wall, lease_s, token, int(spec.get("leaseTransitions") or 0) + 1, wall)
    )


def released(lease: Object, wall: float) -> Object:
    """The Lease without a holder: the next candidate need not wait."""
    spec = {**(lease.get("spec") or {}), "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro(wall)}
    return {**lease, "spec": spec}


class Election:
    """Takes part in an election until it is stopped.

    Args:
        kube: the cluster.
        name: of the Lease.
        me: name of this candidate, unique per process.
        on_lead: called with the token, in a thread of its own, when this candidate begins to lead.
        on_lost: called once when it no longer does, without having been stopped: the process must end.
        namespace: of the Lease; default: that of ``kube``.
        lease_s: how long a lease lasts from its last renewal. The leader gives up after two thirds of it without a
            renewal, and tries every sixth.
        floor: asked before a new token is made; see `decide`. Errors count as 0.
        on_error: told of every failed try in one line.
        clock: monotonic seconds.
        wall: UTC seconds since the epoch.
    """

    def __init__(
        self,
        kube: Kube,
        name: str,
        me: str,
        on_lead: Callable[[int], None],
        on_lost: Callable[[str], None],
        *,
        namespace: str | None = None,
        lease_s: float = 15.0,
        floor: Callable[[], int] = lambda: 0,
        on_error: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kube, self._name, self._me = kube, name, me
        self._namespace = namespace or kube.namespace
        self._on_lead, self._on_lost, self._floor, self._on_error = on_lead, on_lost, floor, on_error
        self._clock, self._wall = clock, wall
        self._lease_s = lease_s
        self.renew_s, self.retry_s = lease_s * 2 / 3, lease_s / 6
        self._path = LEASES.path(self._namespace, name)
        self._seen: Seen | None = None
        self._last_heard = clock()
        self._held_until = -1.0
        self._token = 0
        self._refused: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    @property
    def leads(self) -> bool:
        """Whether this candidate may act now: its last renewal is less than two thirds of a lease old. Any thread."""
        return self._clock() < self._held_until

    @property
    def quiet_s(self) -> float:
        """Seconds since the API server last said anything of the Lease, a refusal included. Any thread."""
        return self._clock() - self._last_heard

    @property
    def token(self) -> int:
        """The fencing token of this candidate's term; 0 before its first."""
        return self._token

    @property
    def refused(self) -> str | None:
        """Why this candidate cannot take part, as the API server said last (a right is missing); None: it can. Any
        thread.
        """
        return self._refused

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End, and give the Lease up, so that another candidate need not wait for it. Stop acting first."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        led = False
        while not self._stopping.is_set():
            try:
                self.attempt()
            except TandemError as error:
                self._on_error(str(error))
            except Exception as error:  # a Lease that somebody edited, for example: the election goes on
                self._on_error(f"the Lease {self._name} cannot be used ({type(error).__name__}: {error})")
            if self.leads and not led:
                led = True
                threading.Thread(target=self._on_lead, args=(self._token,), name="lead", daemon=True).start()
            if led and not self.leads:
                self._on_lost(f"the Lease {self._namespace}/{self._name} was not renewed in {self.renew_s:.0f} s")
                return
            pause = self.retry_s * (1.0 if led else 0.8 + 0.4 * random.random())
            if led:
                pause = min(pause, max(self._held_until - self._clock(), 0.0))
            self._stopping.wait(pause)
        self._release(led)

    def attempt(self) -> None:
        """One try to take or to renew the Lease.

        Raises:
            KubeError: the API server did not answer in time, refused, or somebody else was faster.
        """
        try:
            self._try()
        except KubeError as error:
            if error.status in (401, 403):
                self._refused = str(error)
            raise
        self._refused = None

    def _try(self) -> None:
        # What counts is when the request was sent: others judge by when they see it, which is later.
        began = self._clock()
        # A try that outlasts the term is of no use, and must not keep this thread from saying so.
        limit = max(0.1, min(self.retry_s, self._held_until - began if self._held_until > began else self.retry_s))
        try:
            lease: Object | None = self._kube.get(self._path, timeout_s=limit)
        except NotFound:
            lease = None
        except KubeError as error:
            if error.status:  # it answers, if only no
                self._last_heard = self._clock()
            raise
        self._last_heard = self._clock()
        choice = self._decide(lease, began, self._token)
        if choice.action in ("create", "take") and self._held_until < 0:
            choice = self._decide(lease, began, max(self._token, self._asked_floor()))
        self._seen = choice.seen
        if choice.body is None:
            self._held_until = min(self._held_until, began)
            return
        if choice.action in ("create", "take") and self._held_until > 0:
            # This term is over, whoever ended it: a second one would be another leader.
            self._held_until = -1.0
            return
        if choice.action == "create":
            self._kube.create(LEASES.path(self._namespace), self._named(choice.body), timeout_s=limit)
        else:
            self._kube.replace(self._path, choice.body, timeout_s=limit)
        self._token = choice.token
        self._held_until = began + self.renew_s

    def _decide(self, lease: Object | None, now: float, floor: int) -> Choice:
        return decide(
            lease, self._me, self._seen, now=now, wall=self._wall(), lease_s=self._lease_s, floor=floor
        )  # fmt: skip

    def _asked_floor(self) -> int:
        try:
            return self._floor()
        except TandemError as error:
            self._on_error(str(error))
            return 0

    def _named(self, body: Object) -> Object:
        return {**body, "metadata": {**body["metadata"], "name": self._name, "namespace": self._namespace}}

    def _release(self, led: bool) -> None:
        self._held_until = -1.0
        if not led:
            return
        try:
            lease = self._kube.get(self._path, timeout_s=self.retry_s)
            if (lease.get("spec") or {}).get("holderIdentity") == self._me:
                self._kube.replace(self._path, released(lease, self._wall()), timeout_s=self.retry_s)
        except TandemError as error:
            self._on_error(f"the Lease {self._name} was not given up: {error}")


def _body(lease: Object | None, me: str, wall: float, lease_s: float, token: int, changes: int, since: float) -> Object:
    meta = dict((lease or {}).get("metadata") or {})
    meta["annotations"] = {**(meta.get("annotations") or {}), TOKEN: str(token)}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": meta,
        "spec": {
            "holderIdentity": me,
            "leaseDurationSeconds": max(1, round(lease_s)),
            "acquireTime": _micro(since),
            "renewTime": _micro(wall),
            "leaseTransitions": changes,
        },
    }


def _token(meta: Object) -> int:
    text = str((meta.get("annotations") or {}).get(TOKEN) or "")
    return int(text) if text.isdecimal() and text.isascii() else 0


def _duration(spec: Object, default: float) -> float:
    """What the holder promised to renew within; another replica may have another setting."""
    value: Any = spec.get("leaseDurationSeconds")
    return float(value) if isinstance(value, (int, float)) and value > 0 else default


def _micro(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _seconds(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
