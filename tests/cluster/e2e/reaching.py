"""What a pod reaches, tried from inside it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cluster.e2e.installation import NAMESPACE, Tandem

PROGRAM = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reaches(where):
    try:
        socket.create_connection(tuple(where), 3).close()
        return True
    except OSError:
        return False
name, targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(16) as pool:
    found = dict(zip(targets, pool.map(reaches, targets.values())))
try:
    found["dns"] = bool(name and socket.getaddrinfo(name, None))
except OSError:
    found["dns"] = False
print(json.dumps(found))
"""


def reached(tandem: Tandem, pod: str, name: str, targets: Mapping[str, tuple[str, int]]) -> set[str]:
    """Those of the targets that take a connection, and ``dns`` if a name is found.

    Args:
        tandem: the installation.
        pod: one with Python, from which it is tried.
        name: to look up; empty: none, since a pod without DNS takes its time.
        targets: {what: (address, port)}.
    """
    words = ["exec", "--namespace", NAMESPACE, pod, "--", "python", "-c", PROGRAM, json.dumps([name, targets])]
    found: dict[str, bool] = json.loads(tandem.cluster.kubectl(*words))
    return {what for what, yes in found.items() if yes}


LISTENER = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""


@contextmanager
def listening(tandem: Tandem, pod: str, port: int) -> Iterator[None]:
    """Somebody listens on a port of a pod meanwhile: whether it is reached is then a matter of the network alone."""
    words = ["kubectl", "exec", "--namespace", NAMESPACE, pod, "--", "python", "-c", LISTENER, str(port)]
    with subprocess.Popen(words, env=tandem.cluster.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "listening"
            yield
        finally:
            process.kill()


def address(tandem: Tandem, kind: str, name: str) -> str:
    """The address of a pod or a Service of the installation."""
    found = tandem.cluster.get(kind, name, "--namespace", NAMESPACE)
    return str(found["status"]["podIP"] if kind == "pod" else found["spec"]["clusterIP"])


def component(tandem: Tandem, name: str) -> dict[str, Any]:
    """The pod of a Deployment of the installation."""
    selector = f"app.kubernetes.io/component={name}"
    (found,) = tandem.cluster.get("pods", "--namespace", NAMESPACE, "-l", selector)["items"]
    return dict(found)


def of_the_cluster(tandem: Tandem) -> dict[str, tuple[str, int]]:
    """The API server, by its Service and by its address, and a kubelet."""
    cluster = tandem.cluster
    service = cluster.get("service", "kubernetes", "--namespace", "default")["spec"]["clusterIP"]
    slices = cluster.get("endpointslices", "--namespace", "default", "-l", "kubernetes.io/service-name=kubernetes")
    server = slices["items"][0]
    addresses = cluster.get("node", tandem.reference)["status"]["addresses"]
    return {
        "api server": (service, 443),
        "api server's address": (server["endpoints"][0]["addresses"][0], server["ports"][0]["port"]),
        "a kubelet": (next(a["address"] for a in addresses if a["type"] == "InternalIP"), 10250),
    }
