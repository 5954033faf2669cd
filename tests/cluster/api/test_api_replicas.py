"""Two replicas of the API on one namespace: what one began is known to the other at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from api_server import is_problem
from cluster.api.test_api import Cluster, cluster
from cluster.api.test_kube import with_crd
from cluster.handle import until
from tandem.ids import new_run_id
from tandem_api.launch.cluster import AWAITED_S, ClusterLauncher

__all__ = ["cluster", "with_crd"]
pytestmark = pytest.mark.needs("api-server")


def test_what_one_replica_begins_the_other_knows_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Service sends the next request to either, before that one's watch has told of the PairRun: it tells late here,
    as on a busy cluster. Its run, its events, and that it is to end."""
    changed = ClusterLauncher._changed

    def late(self: ClusterLauncher, *args: Any) -> None:
        time.sleep(0.1)
        changed(self, *args)

    token = cluster.token("editor")
    writes = {"burst": 100}
    with cluster.serve(token, writes=writes) as one:
        monkeypatch.setattr(ClusterLauncher, "_changed", late)
        with cluster.serve(token, writes=writes) as two:
            for client in (one.client, two.client):
                until("the PairRuns to be listed", lambda client=client: client.get("/readyz").status_code == 200)
            for n in range(20):
                made = one.client.post("/v1/runs", json={"node": cluster.sick, "spec": {"steps": 20}})
                assert made.status_code == 202
                path = made.headers["location"]
                if n % 3 == 0:
                    answer = two.client.get(path)
                elif n % 3 == 1:
                    with two.client.stream("GET", f"{path}/events") as answer:
                        pass
                else:
                    answer = two.client.post(f"{path}/cancel")
                assert answer.status_code in (200, 202), (n, answer.status_code)


def test_a_new_run_that_nobody_began_is_looked_for_only_a_while(cluster: Cluster) -> None:
    """And an old one not at all."""
    with cluster.serve(cluster.token("editor")) as api:
        until("the PairRuns to be listed", lambda: api.client.get("/readyz").status_code == 200)
        for age, least, most in ((0.0, AWAITED_S, AWAITED_S + 10), (3600.0, 0.0, AWAITED_S)):
            began = time.monotonic()
            answer = api.client.get(f"/v1/runs/{new_run_id(time.time() - age, bytes(10))}")
            is_problem(answer, 404, "not-found")
            assert least <= time.monotonic() - began < most
