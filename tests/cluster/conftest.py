"""Real parts of Kubernetes for tests: ``api_server`` for those in api/, ``cluster`` for those in e2e/."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.bare.build import default_cache
from cluster.bare.images import base_image
from cluster.handle import ApiServer, BareCluster
from cluster.sessions import booted
from plugins.parts import need

_up: list[ApiServer] = []


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """etcd and kube-apiserver, for the whole session: tests use namespaces of their own."""
    need("api-server")
    with booted("--nodes", "0") as root:
        handle = ApiServer(root)
        _up.append(handle)
        yield handle
        _up.remove(handle)


@pytest.fixture(scope="session")
def cluster() -> Iterator[BareCluster]:
    """Two real nodes with the image busybox:1, for the whole session: tests use namespaces of their own."""
    need("cluster")
    with booted("--nodes", "2") as root:
        handle = BareCluster(root)
        handle.load(base_image(default_cache(), "busybox.tar"))
        _up.append(handle)
        yield handle
        _up.remove(handle)


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    """What one test has stopped must not fail the next."""
    yield
    for handle in _up:
        handle.mend()
