"""Ports of this machine that lead into a cluster, by `kubectl port-forward` as the docs say."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.handle import ApiServer


@contextmanager
def forwarded(cluster: ApiServer, namespace: str, target: str, port: int) -> Iterator[int]:
    """A port of 127.0.0.1 that leads to one of a Service or pod.

    Args:
        cluster: whose kubectl and kubeconfig.
        namespace: of the target.
        target: as ``service/tandem-api``.
        port: the target's.
    """
    words = ["kubectl", "port-forward", "--namespace", namespace, target, f":{port}"]
    forward = subprocess.Popen(
        words, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert forward.stdout is not None
        line = forward.stdout.readline()
        found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+) ->", line)
        assert found, f"kubectl port-forward {target}: {line}"
        yield int(found[1])
    finally:
        forward.kill()
        forward.communicate()
