"""Real parts of Kubernetes for tests: ``api_server`` for those in api/, ``cluster`` for those in e2e/."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.bare.build import default_cache
from cluster.bare.images import base_image
from cluster.handle import ApiServer, BareCluster
from cluster.outside import Outside, how, kind
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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCluster | Outside]:
    """Two real nodes, for the whole session: tests use namespaces of their own. TANDEM_E2E says whose they are."""
    need("cluster")
    folder = tmp_path_factory.mktemp("outside")
    if how() == "kubeconfig":
        yield Outside(folder / "run", Path(os.environ["KUBECONFIG"]))
        return
    if how() == "kind":
        with kind(folder) as handle:
            yield handle
        return
    with booted("--nodes", "2") as root:
        bare = BareCluster(root)
        bare.load(base_image(default_cache(), "busybox.tar"))
        _up.append(bare)
        yield bare
        _up.remove(bare)


@pytest.fixture(scope="session")
def machines(cluster: BareCluster | Outside) -> BareCluster:
    """The same cluster, where its machines and components are ours to switch off."""
    need("machines")
    assert isinstance(cluster, BareCluster)
    return cluster


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    """What one test has stopped must not fail the next."""
    yield
    for handle in _up:
        handle.mend()
