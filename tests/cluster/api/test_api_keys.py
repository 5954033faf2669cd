"""An Idempotency-Key in a cluster is its PairRun: it lives as long."""

from __future__ import annotations

from typing import Any

import pytest

from api_server import Served
from cluster.api.test_api import Cluster, api, cluster
from cluster.api.test_kube import with_crd
from tandem.kube.paths import PAIRRUNS

__all__ = ["api", "cluster", "with_crd"]
pytestmark = pytest.mark.needs("api-server")
KEY = {"Idempotency-Key": "one"}


def test_a_key_is_free_again_once_its_pairrun_is_gone(api: Served, cluster: Cluster) -> None:
    """Cancelled, or deleted after its time to live: until then also another order meets it."""
    order = {"node": cluster.sick, "spec": {"steps": 20}}
    first = api.client.post("/v1/runs", json=order, headers=KEY)
    assert api.client.post("/v1/runs", json=order, headers=KEY).json()["run"] == first.json()["run"]
    assert api.client.post(f"{first.headers['location']}/cancel").status_code == 202
    assert cluster.pairruns() == []
    again = api.client.post("/v1/runs", json=order, headers=KEY)
    assert (again.status_code, again.headers.get("idempotent-replayed")) == (202, None)
    assert again.json()["run"] != first.json()["run"]
    assert len(cluster.pairruns()) == 1


def test_a_pairrun_that_goes_while_its_key_is_looked_for(
    api: Served, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name was taken, and then it is gone: the order is a new run, and nothing is wrong with the cluster."""
    order = {"node": cluster.sick, "spec": {"steps": 20}}
    first = api.client.post("/v1/runs", json=order, headers=KEY).json()
    get, went = cluster.kube.get, []

    def too_late(path: str, *args: Any, **more: Any) -> Any:
        if path == PAIRRUNS.path(cluster.namespace, first["name"]) and not went:
            cluster.kube.delete(path)
            went.append(path)
        return get(path, *args, **more)

    monkeypatch.setattr(cluster.kube, "get", too_late)
    again = api.client.post("/v1/runs", json=order, headers=KEY)
    assert (again.status_code, len(went)) == (202, 1)
    assert again.json()["run"] != first["run"]
    assert len(cluster.pairruns()) == 1
