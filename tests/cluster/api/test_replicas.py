"""Two controllers at once, as real processes on one API server and one PostgreSQL: one acts, the other takes over."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cluster.api.hands import Hands, forever
from cluster.api.replicas import replica
from cluster.handle import until
from tandem.db import queries
from tandem.db.engine import connect
from tandem.kube.paths import LEASES, PAIRRUNS
from tandem.pairrun import names
from tandem.vocabulary import Role

pytestmark = pytest.mark.needs("api-server")


def holder(pair: Hands) -> str:
    lease = pair.kube.get(LEASES.path(pair.namespace, names.LEASE))
    return str(lease["spec"]["holderIdentity"])


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_leader_that_is_lost_mid_run_is_followed_by_the_other_and_nothing_is_done_twice(
    pair: Hands, tmp_path: Path, how: str
) -> None:
    """Killed, it never comes back. Frozen, it wakes up behind the other's back, believes in its term, and must end
    before it does anything. Either way: one attempt, one pair of Jobs, the right verdict, stored once."""
    with replica(pair, tmp_path / "one") as one:
        until("the first to lead", lambda: one.leads)
        with replica(pair, tmp_path / "two") as two:
            until("the second to stand by", lambda: two.probe("/readyz")[0] == 200)
            pair.create()
            pair.start()
            pair.wait_for(names.RUNNING, "True")
            assert not two.leads
            assert f"-{one.process.pid}-" in holder(pair)
            jobs = {job["metadata"]["uid"] for job in pair.jobs()}
            one.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            until("the second to lead", lambda: two.leads)
            assert f"-{two.process.pid}-" in holder(pair)
            if how == "frozen":
                one.process.send_signal(signal.SIGCONT)
                assert one.process.wait(60) == 1
            pair.finish(tmp_path)
            pair.wait_for(names.FINISHED, "True", "Match")
            assert two.probe("/healthz")[0] == 200
            assert {job["metadata"]["uid"] for job in pair.jobs()} == jobs
            status = pair.status()
            assert ([a.number for a in status.attempts], status.verdict) == ([1], "match")
            finished = pair.get()["metadata"]["resourceVersion"]
            forever(lambda: pair.get()["metadata"]["resourceVersion"] == finished, 2.0)
    engine = connect(pair.database)
    records = queries.load_run(engine, pair.run_id())
    engine.dispose()
    assert (records.run.verdict, [a.attempt for a in records.attempts]) == ("match", [1])


def test_a_leader_that_is_asked_to_end_gives_the_lease_up_at_once(pair: Hands, tmp_path: Path) -> None:
    """As in a rolling update: the other leads long before the Lease would have run out; live pairs go on."""
    values = {"leaseSeconds": 60}
    with replica(pair, tmp_path / "one", **values) as one:
        until("the first to lead", lambda: one.leads)
        with replica(pair, tmp_path / "two", **values) as two:
            pair.create()
            pair.start()
            pair.wait_for(names.RUNNING, "True")
            assert one.end() == 0
            assert until("the second to lead", lambda: two.leads, 40) < 40
            assert pair.status().attempt == 1
            pair.exit(Role.SUSPECT, 1, "killed")
            pair.kube.delete(PAIRRUNS.path(pair.namespace, "check"))
            assert two.end() == 0
