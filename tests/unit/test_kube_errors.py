"""Errors of the API server and paths: each one line that names verb and resource."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.kube.errors import (
    Conflict,
    Forbidden,
    Gone,
    KubeError,
    NotFound,
    Unreachable,
    error_from,
    of_status,
    target,
)
from tandem.kube.paths import JOBS, LEASES, NODES, PAIRRUNS, PODS


def status(code: int, reason: str, message: str) -> bytes:
    return json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message}).encode()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PODS.path(), ("pods", None, None)),
        (PODS.path("tandem"), ("pods", "tandem", None)),
        (PODS.path("tandem", "a", "log"), ("pods/log", "tandem", "a")),
        (NODES.path(name="n1"), ("nodes", None, "n1")),
        (JOBS.path("tandem", "j"), ("jobs.batch", "tandem", "j")),
        (LEASES.path("tandem", "l"), ("leases.coordination.k8s.io", "tandem", "l")),
        (PAIRRUNS.path("tandem", "p", "status"), ("pairruns/status.tandem.dev", "tandem", "p")),
        ("/api/v1/namespaces/tandem", ("namespaces", None, "tandem")),
    ],
)
def test_a_path_says_what_it_means_as_rbac_names_it(path: str, expected: tuple[str, str | None, str | None]) -> None:
    assert target(path) == expected


@pytest.mark.parametrize(
    ("method", "path", "options", "verb", "resource"),
    [
        ("GET", PODS.path("ns", "a"), {}, "get", "pods"),
        ("GET", PODS.path("ns"), {}, "list", "pods"),
        ("GET", PODS.path("ns"), {"watching": True}, "watch", "pods"),
        ("POST", JOBS.path("ns"), {}, "create", "jobs.batch"),
        ("PUT", LEASES.path("ns", "l"), {}, "update", "leases.coordination.k8s.io"),
        ("PATCH", PAIRRUNS.path("ns", "p", "status"), {}, "patch", "pairruns/status.tandem.dev"),
        ("DELETE", PODS.path("ns", "a"), {}, "delete", "pods"),
    ],
)
def test_what_is_forbidden_names_the_verb_and_the_resource(
    method: str, path: str, options: dict[str, Any], verb: str, resource: str
) -> None:
    error = error_from(403, status(403, "Forbidden", "nope"), method, path, **options)
    assert isinstance(error, Forbidden)
    assert (error.verb, error.resource, error.namespace) == (verb, resource, "ns")
    assert f"{verb} {resource} in namespace ns" in str(error)


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (401, "Unauthorized", KubeError),
        (404, "NotFound", NotFound),
        (409, "AlreadyExists", Conflict),
        (410, "Expired", Gone),
        (422, "Invalid", KubeError),
        (429, "TooManyRequests", KubeError),
        (500, "InternalError", KubeError),
    ],
)
def test_every_refusal_is_one_line_with_its_status_and_reason(code: int, reason: str, kind: type[KubeError]) -> None:
    error = error_from(code, status(code, reason, "two\nlines"), "GET", PODS.path("ns", "a"))
    assert type(error) is kind
    assert (error.status, error.reason, error.message) == (code, reason, "two lines")
    assert "\n" not in str(error)


@pytest.mark.parametrize("body", [b"", b"<html>bad\ngateway</html>", b"[1]", b'"x"', b"\xff\xfe", b"{"])
def test_a_proxy_that_answers_anything_is_still_one_line(body: bytes) -> None:
    error = error_from(502, body, "GET", PODS.path())
    assert error.status == 502
    assert "\n" not in str(error)


def test_an_error_inside_a_stream() -> None:
    assert isinstance(of_status({"code": 410, "reason": "Expired", "message": "too old"}, PODS.path()), Gone)
    assert of_status({}, PODS.path()).status == 500


def test_no_answer_names_the_server() -> None:
    assert "https://api:6443 does not answer (timed out)" in str(Unreachable("timed out", "https://api:6443"))
