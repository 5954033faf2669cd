"""The API server on plain dicts, by path. Thin: every request has time limits, every refusal is one of `errors`.

The models of the package ``kubernetes`` are left alone: they refuse unknown fields, and a controller must pass on what
it does not know. Its generic client gives TLS, the kubeconfig's ways to authenticate, and fresh tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from tandem.errors import SetupError
from tandem.kube.config import Access, access
from tandem.kube.errors import NotFound, Unreachable, error_from, of_status

Object = dict[str, Any]
Operations = list[Object]
"""A JSON patch."""
CONNECT_S = 5.0
READ_S = 30.0
"""How long an ordinary request may take to answer."""
WATCH_S = 240
"""How long the server keeps one watch open; then it is made anew."""
QUIET_S = 30.0
"""Beyond that, how long a watch may be silent before it counts as half-open."""
PAGE = 500
_APPLY = "application/apply-patch+yaml"
_JSON_PATCH = "application/json-patch+json"


@dataclass(frozen=True, slots=True)
class Listing:
    """A whole collection, from one snapshot."""

    items: list[Object]
    resource_version: str
    """Where a watch goes on."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a watch."""

    kind: str
    """``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``."""
    object: Object


class Kube:
    """A cluster. Any thread may use it.

    Args:
        reached: the cluster; see `connect`.
        namespace: where objects live unless a path says otherwise; default: the context's.
        timeout_s: how long an ordinary request may take to answer.
    """

    def __init__(self, reached: Access, namespace: str | None = None, *, timeout_s: float = READ_S) -> None:
        self._api = reached.api
        self.namespace = namespace or reached.namespace
        self.timeout_s = timeout_s

    @classmethod
    def connect(
        cls, *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
    ) -> Self:
        """The cluster that kubectl would talk to, in a pod without kubeconfig the pod's own; nothing is sent yet.

        Raises:
            SetupError: no configuration, no such context, or it cannot be read.
        """
        return cls(access(kubeconfig, context), namespace)

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._api.configuration.host)

    # -- requests ------------------------------------------------------------------------------------

    def get(self, path: str, *, timeout_s: float | None = None) -> Object:
        """One object.

        Raises:
            KubeError: as every request here; `NotFound`, `Forbidden` and `Unreachable` among them.
        """
        return self._request("GET", path, timeout_s=timeout_s)

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            self.get(path)
        except NotFound:
            return False
        return True

    def list(self, path: str, *, label_selector: str | None = None, field_selector: str | None = None) -> Listing:
        """A whole collection, read in pages of one snapshot."""
        query: dict[str, Any] = {"limit": PAGE, **_selectors(label_selector, field_selector)}
        items: list[Object] = []
        while True:
            page = self._request("GET", path, query)
            kind, version = str(page.get("kind", "")).removesuffix("List"), page.get("apiVersion")
            for item in page.get("items") or []:
                # In a list the server leaves both out of the items.
                item.setdefault("kind", kind)
                item.setdefault("apiVersion", version)
                items.append(item)
            meta = page.get("metadata") or {}
            if not (token := meta.get("continue")):
                return Listing(items, str(meta.get("resourceVersion") or ""))
            query["continue"] = token

    def create(self, path: str, body: Object, *, dry_run: bool = False, timeout_s: float | None = None) -> Object:
        """Make an object in the collection at ``path``.

        Raises:
            Conflict: it exists already.
        """
        return self._request("POST", path, _dry(dry_run), body, timeout_s=timeout_s)

    def apply(self, path: str, body: Object, *, manager: str, force: bool = True, dry_run: bool = False) -> Object:
        """Server-side apply of an object at its own path; fields that ``body`` leaves out and ``manager`` owned go.

        Raises:
            Conflict: others own fields of it, and ``force`` is off.
        """
        query = {"fieldManager": manager, "force": force, **_dry(dry_run)}
        return self._request("PATCH", path, query, body, content=_APPLY)

    def replace(self, path: str, body: Object, *, timeout_s: float | None = None) -> Object:
        """Write an object as it is; with a resource version in it only if nobody wrote meanwhile.

        Raises:
            Conflict: somebody did.
        """
        return self._request("PUT", path, {}, body, timeout_s=timeout_s)

    def patch(self, path: str, body: Object | Operations, *, manager: str | None = None) -> Object:
        """A merge patch (a dict) or a JSON patch (a list of operations)."""
        content = _JSON_PATCH if isinstance(body, list) else "application/merge-patch+json"
        return self._request("PATCH", path, {"fieldManager": manager} if manager else {}, body, content=content)

    def patch_status(
        self, path: str, status: Object, *, resource_version: str | None = None, manager: str | None = None
    ) -> Object:
        """Replace the whole status of the object at ``path``.

        Args:
            path: of the object, without ``/status``.
            status: all of it; what it leaves out is removed.
            resource_version: only if the object still has this version.
            manager: name of the writer.

        Raises:
            Conflict: it has another version.
        """
        operations: Operations = [{"op": "add", "path": "/status", "value": status}]
        if resource_version is not None:
            operations.append({"op": "replace", "path": "/metadata/resourceVersion", "value": resource_version})
        return self.patch(f"{path}/status", operations, manager=manager)

    def delete(
        self,
        path: str,
        *,
        propagation: str = "Background",
        uid: str | None = None,
        resource_version: str | None = None,
        grace_s: int | None = None,
    ) -> None:
        """Have an object deleted; one that is not there already is fine.

        Args:
            path: of the object.
            propagation: ``Background``, ``Foreground`` or ``Orphan``.
            uid: only if it is still this one.
            resource_version: only if it still has this version.
            grace_s: of a pod; 0 removes it from the API at once.

        Raises:
            Conflict: it is another, or has another version.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        conditions = {"uid": uid, "resourceVersion": resource_version}
        if given := {name: value for name, value in conditions.items() if value is not None}:
            options["preconditions"] = given
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        with suppress(NotFound):
            self._request("DELETE", path, {}, options)

    def watch(
        self,
        path: str,
        resource_version: str,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        seconds: int = WATCH_S,
        quiet_s: float = QUIET_S,
        opened: Callable[[Any], None] | None = None,
    ) -> Generator[Event]:
        """Events of a collection after ``resource_version``, until the server ends the stream (after ``seconds``).

        The server sends a bookmark about once a minute; nothing at all for ``seconds + quiet_s`` counts as a broken
        connection.

        Args:
            path: of the collection.
            resource_version: of a `Listing` or an event.
            label_selector: as kubectl takes it.
            field_selector: the same.
            seconds: after which the server ends the stream.
            quiet_s: how long the client waits beyond that.
            opened: called with the raw response, which another thread may break with `interrupt`.

        Raises:
            Gone: the version is too old: list again.
            KubeError: the stream could not be opened, or broke.
        """
        query: dict[str, Any] = {
            "watch": True, "allowWatchBookmarks": True, "resourceVersion": resource_version,
            "timeoutSeconds": seconds, **_selectors(label_selector, field_selector),
        }  # fmt: skip
        response = self._send("GET", path, query, None, "application/json", seconds + quiet_s)
        raw = response.response
        try:
            if response.status != 200:
                raise error_from(response.status, raw.data, "GET", path, watching=True)
            if opened is not None:
                opened(raw)
            for line in self._lines(raw):
                event = json.loads(line)
                if event.get("type") == "ERROR":
                    raise of_status(event.get("object") or {}, path)
                yield Event(str(event.get("type")), event.get("object") or {})
        except ValueError as error:
            raise Unreachable(f"the stream holds what is no event: {error}", self.server) from None
        finally:
            # What is left of the stream belongs to nobody: the connection cannot be used again.
            with suppress(Exception):
                raw.close()

    # -- below ---------------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        *,
        content: str = "application/json",
        timeout_s: float | None = None,
    ) -> Object:
        response = self._send(method, path, query or {}, body, content, timeout_s or self.timeout_s)
        try:
            data = response.response.data
        except self._broken() as error:
            raise Unreachable(_line(error), self.server) from None
        if not 200 <= response.status <= 299:
            raise error_from(response.status, data, method, path)
        try:
            values = json.loads(data)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise Unreachable("the answer is no JSON object: is there a proxy in between?", self.server)
        return values

    def _send(self, method: str, path: str, query: Mapping[str, Any], body: Any, content: str, read_s: float) -> Any:
        try:
            request = self._api.param_serialize(
                method, path, query_params=dict(query), body=body,
                header_params={"Accept": "application/json", "Content-Type": content}, auth_settings=["BearerToken"],
            )  # fmt: skip
            return self._api.call_api(*request, _request_timeout=(min(CONNECT_S, read_s), read_s))
        except self._broken() as error:
            raise Unreachable(_line(error), self.server) from None
        except self._unusable() as error:
            raise SetupError(f"the credentials of {self.server} cannot be used ({_line(error)})") from None

    def _lines(self, raw: Any) -> Iterator[bytes]:
        """Whole lines of a stream."""
        rest = b""
        try:
            for chunk in raw.stream(amt=None, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line for line in lines if line.strip())
        except self._broken() as error:
            raise Unreachable(_line(error), self.server) from None

    @staticmethod
    def _broken() -> tuple[type[Exception], ...]:
        """What the package and the library below it raise when there is no answer."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        return (ApiException, HTTPError)

    @staticmethod
    def _unusable() -> tuple[type[Exception], ...]:
        """What is raised when credentials cannot be renewed: a token file that is gone, a plugin that fails."""
        from kubernetes.config import ConfigException

        return (OSError, ValueError, ConfigException)


def interrupt(raw: Any) -> None:
    """Break a watch from another thread: its reader sees the stream end. Never raises."""
    import socket

    with suppress(Exception):
        raw.connection.sock.shutdown(socket.SHUT_RDWR)


def _selectors(label: str | None, field: str | None) -> dict[str, str]:
    found = {"labelSelector": label, "fieldSelector": field}
    return {name: value for name, value in found.items() if value}


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}


def _line(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    text = " ".join(str(reason if reason else error).split())
    return text[:200] or type(error).__name__
