"""What goes wrong with the API server, each as one line with the cause and the mend. Pure."""

from __future__ import annotations

import json
from typing import Any

from tandem.errors import SetupError

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class KubeError(SetupError):
    """The API server refused, failed, or could not be reached.

    Attributes:
        status: HTTP status; 0 if there was no answer.
        reason: CamelCase word of the API server, such as ``AlreadyExists``; ``Unreachable`` if there was no answer.
        message: what it said, one line.
    """

    def __init__(self, status: int, reason: str, message: str, text: str = "") -> None:
        super().__init__(text or message)
        self.status, self.reason, self.message = status, reason, message


class Conflict(KubeError):  # noqa: N818 - named as the API server names them
    """The object changed meanwhile, or exists already (``reason`` says which)."""


class NotFound(KubeError):  # noqa: N818
    """No such object, or no such kind."""


class Gone(KubeError):  # noqa: N818
    """The resource version is too old to go on from: list again."""


class Forbidden(KubeError):  # noqa: N818
    """The rights do not suffice.

    Attributes:
        verb: what was tried, as RBAC names it.
        resource: on what, as RBAC names it (``pods/log``, ``pairruns.tandem.dev``).
        namespace: where; None for cluster-scoped objects.
    """

    def __init__(self, status: int, reason: str, message: str, verb: str, resource: str, namespace: str | None) -> None:
        where = f"in namespace {namespace}" if namespace else "in the whole cluster"
        text = f"not allowed to {verb} {resource} {where}: have that verb granted ({message})"
        super().__init__(status, reason, message, text)
        self.verb, self.resource, self.namespace = verb, resource, namespace


class Unreachable(KubeError):  # noqa: N818
    """There was no answer, or none in time."""

    def __init__(self, message: str, server: str) -> None:
        text = f"the API server at {server} does not answer ({message}): check the network and the kubeconfig's context"
        super().__init__(0, "Unreachable", message, text)


def target(path: str) -> tuple[str, str | None, str | None]:
    """Resource as RBAC names it, namespace and name of an API path; a collection has no name."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    namespace = None
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    resource = rest[0] if rest else path
    name = rest[1] if len(rest) > 1 else None
    if len(rest) > 2:
        resource += f"/{rest[2]}"
    if group:
        resource += f".{group}"
    return resource, namespace, name


def error_from(status: int, body: bytes | str, method: str, path: str, *, watching: bool = False) -> KubeError:
    """The error of an answer that is none of success.

    Args:
        status: HTTP status.
        body: of the answer: a ``Status`` object, or whatever a proxy in between says.
        method: of the request.
        path: of the request.
        watching: the request was a watch.
    """
    reason, message = _told(body)
    resource, namespace, name = target(path)
    verb = _VERBS.get(method, "get" if name else "watch" if watching else "list")
    message = message or f"HTTP status {status}"
    what = f"{resource} {name}" if name else resource
    if status == 401:
        return KubeError(
            status, reason, message, f"the credentials were refused ({message}): log in to the cluster again"
        )
    if status == 403:
        return Forbidden(status, reason or "Forbidden", message, verb, resource, namespace)
    kinds: dict[int, type[KubeError]] = {404: NotFound, 409: Conflict, 410: Gone}
    return kinds.get(status, KubeError)(status, reason, message, f"{verb} {what}: {message}")


def of_status(status: dict[str, Any], path: str) -> KubeError:
    """The error of a ``Status`` object inside a stream."""
    code = status.get("code")
    return error_from(code if isinstance(code, int) else 500, json.dumps(status), "GET", path, watching=True)


def _told(body: bytes | str) -> tuple[str, str]:
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        return "", " ".join(text.split())[:200]
    return str(values.get("reason") or ""), " ".join(str(values.get("message") or "").split())[:1000]
