"""Tokens and rights of a cluster: TokenReview, then SubjectAccessReview on PairRuns, so that its RBAC rules the API."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tandem.errors import SetupError
from tandem.kube.client import Kube, Object
from tandem.kube.errors import KubeError
from tandem.pairrun.names import GROUP, PLURAL
from tandem_api.problems import away, log
from tandem_api.security.authenticate import User, unauthenticated

T = TypeVar("T")
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
REFUSED_S = 5.0
"""How long a refused token is remembered."""
MET_S = 24 * 3600.0
"""How long a token that was found good counts as met; its own end comes first."""
LARGEST = 2048
"""Answers kept of each kind."""
AT_ONCE = 16
"""Reviews under way at once."""
REVIEW_S = 5.0
"""How long the API server may take for one."""


class ClusterAuthenticator:
    """Asks the API server, and believes its answer for a while.

    Args:
        kube: with the right to create TokenReviews and SubjectAccessReviews.
        namespace: whose PairRuns the rights are about.
        audiences: of which a token must name one; empty: the API server's own.
        believed_s: how long an answer is kept; a token's own end comes first.
        clock: UTC seconds, which only a token's own end is compared with.
        monotonic: seconds that are never set back.
    """

    secret: str | None = None

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        audiences: list[str],
        *,
        believed_s: float = 30.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._namespace, self._audiences = kube, namespace, audiences
        self._believed_s, self._clock = believed_s, clock
        self._users: _Kept[User | None] = _Kept(LARGEST, monotonic)
        self._met: _Kept[bool] = _Kept(LARGEST, monotonic)
        self._rights: _Kept[bool] = _Kept(LARGEST, monotonic)
        self._gate = asyncio.Semaphore(AT_ONCE)

    def met(self, token: str) -> bool:
        return self._met.get(_digest(token))[0]

    async def authenticate(self, token: str) -> User:
        key = _digest(token)
        known, user = self._users.get(key)
        if not known:
            user = await self._review(token)
            ends = expiry(token)
            left = MET_S if ends is None else ends - self._clock()
            self._users.put(key, user, REFUSED_S if user is None else min(self._believed_s, left))
            self._met.put(key, True, 0.0 if user is None else min(MET_S, left))
        if user is None:
            raise unauthenticated()
        return user

    async def allowed(self, user: User, verb: str) -> bool:
        key = hashlib.sha256(repr((user, verb)).encode()).hexdigest()
        known, answer = self._rights.get(key)
        if not known:
            spec: dict[str, Any] = {
                "user": user.name,
                "groups": list(user.groups),
                "resourceAttributes": {
                    "group": GROUP, "resource": PLURAL, "verb": verb, "namespace": self._namespace,
                },
            }  # fmt: skip
            if user.uid:
                spec["uid"] = user.uid
            if user.extra:
                spec["extra"] = {name: list(values) for name, values in user.extra}
            status = await self._ask(ACCESS, "SubjectAccessReview", "authorization.k8s.io/v1", spec)
            answer = status.get("allowed") is True and status.get("denied") is not True
            self._rights.put(key, answer, self._believed_s if answer else REFUSED_S)
        return bool(answer)

    async def _review(self, token: str) -> User | None:
        spec: dict[str, Any] = {"token": token}
        if self._audiences:
            spec["audiences"] = self._audiences
        status = await self._ask(REVIEWS, "TokenReview", "authentication.k8s.io/v1", spec)
        if status.get("authenticated") is not True:
            return None
        # A webhook that knows nothing of audiences leaves them out: then the token is not known to be for us.
        if self._audiences and not set(self._audiences) & set(status.get("audiences") or []):
            return None
        found = status.get("user") or {}
        if not found.get("username"):
            return None
        extra = tuple(sorted((str(k), tuple(map(str, v))) for k, v in (found.get("extra") or {}).items()))
        return User(
            str(found["username"]), str(found.get("uid") or ""), tuple(map(str, found.get("groups") or [])), extra
        )

    async def _ask(self, path: str, kind: str, version: str, spec: Object) -> Object:
        body = {"apiVersion": version, "kind": kind, "metadata": {}, "spec": spec}
        try:
            async with self._gate:
                answer = await asyncio.to_thread(self._kube.create, path, body, timeout_s=REVIEW_S)
        except (KubeError, SetupError) as error:
            if isinstance(error, KubeError) and error.status in (400, 422):
                return {}  # what is no token at all
            log.warning("%s: %s", kind, error)
            raise away("the cluster cannot say now who may do what", "authentication-away") from None
        return answer.get("status") or {}


class _Kept(Generic[T]):
    """A bounded memory of answers, each with its end; the oldest goes first."""

    def __init__(self, largest: int, clock: Callable[[], float]) -> None:
        self._items: OrderedDict[str, tuple[T, float]] = OrderedDict()
        self._largest, self._clock = largest, clock

    def get(self, key: str) -> tuple[bool, T | None]:
        found = self._items.get(key)
        if found is None or found[1] <= self._clock():
            return False, None
        return True, found[0]

    def put(self, key: str, value: T, seconds: float) -> None:
        self._items.pop(key, None)
        if seconds > 0:
            self._items[key] = value, self._clock() + seconds
            while len(self._items) > self._largest:
                self._items.popitem(last=False)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def expiry(token: str) -> float | None:
    """When a JSON Web Token says that it ends (UTC seconds); None for any other token. Checks nothing."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (ValueError, KeyError, TypeError):
        return None
