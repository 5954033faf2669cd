"""What runs on the nodes: seldom listed whole, and never believed of a node that is about to be chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import Run, kinds, node, spec, started, told, world
from tandem.kube.client import Kube, Listing
from tandem.kube.errors import Forbidden
from tandem.pairing.choose import World
from tandem.pairrun import names
from tandem.pairrun.status import read_status
from tandem.vocabulary import Role
from tandem_controller.ending import tried
from tandem_controller.reconcile import decide
from tandem_controller.world import FRESH_S, PodSnapshot, gather

PATIENCE_S = 7.5


class Cluster:
    """Pods on nodes, and every list that was asked for."""

    def __init__(self) -> None:
        self.pods: dict[str, str] = {}
        """Pod -> node; each takes six of eight CPUs."""
        self.asked: list[str] = []
        self.now = 0.0
        self.slow_s = 0.0
        self.refuses = False

    def list(self, path: str, *, field_selector: str) -> Listing:
        """As `Kube.list`."""
        self.asked.append(field_selector)
        self.now += self.slow_s
        if self.refuses and "nodeName" in field_selector:
            raise Forbidden(403, "Forbidden", "no", "list", "pods", None)
        wanted = dict(part.split("=", 1) for part in field_selector.split(",") if "!=" not in part)
        node = wanted.get("spec.nodeName")
        return Listing([pod(name, on) for name, on in self.pods.items() if node in (None, on)], "1")

    def snapshot(self) -> PodSnapshot:
        return PodSnapshot(cast(Kube, self), PATIENCE_S, lambda: self.now)


def pod(name: str, on: str) -> dict[str, Any]:
    container = {"resources": {"requests": {"cpu": "6"}}}
    return {
        "metadata": {"namespace": "other", "name": name}, "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": "Running"},
    }  # fmt: skip


def waiting(snapshot: PodSnapshot, *references: str) -> Run:
    """A new run that sees these nodes, and of their pods what the snapshot says."""
    pods = [use for uses in snapshot.usage().values() for use in uses]
    nodes = world(node("sick", cordoned=True), *map(node, references), pods=pods)
    return Run({"resources": {"cpu": "4"}}, nodes)


def test_those_that_wait_share_a_list_however_often_they_ask() -> None:
    cluster = Cluster()
    snapshot = cluster.snapshot()
    for _ in range(300):
        snapshot.usage()
        cluster.now += 0.1
    assert len(cluster.asked) == pytest.approx(30 / PATIENCE_S, abs=1)


def test_a_node_that_filled_up_since_the_list_is_not_chosen() -> None:
    cluster = Cluster()
    snapshot = cluster.snapshot()
    run = waiting(snapshot, "well-1", "well-2")
    cluster.pods["late"] = "well-1"
    cluster.now = PATIENCE_S - 1
    seen, decision = decide(run.look(), snapshot)
    assert decision.status.reference is not None
    assert decision.status.reference.node == "well-2"
    assert [p.name for p in seen.world.usage["well-1"]] == ["late"]
    assert sorted(cluster.asked[1:]) == [
        f"spec.nodeName={name},status.phase!=Succeeded,status.phase!=Failed" for name in ("sick", "well-1", "well-2")
    ]
    cluster.pods["later"] = "well-2"  # a moment ago it was free: another run's claim is what tells
    assert snapshot.stale(["well-2"]) == []


def test_where_all_filled_up_nothing_is_started() -> None:
    cluster = Cluster()
    snapshot = cluster.snapshot()
    run = waiting(snapshot, "well-1", "well-2")
    cluster.pods |= {"a": "well-1", "b": "well-2"}
    cluster.now = PATIENCE_S - 1
    _, decision = decide(run.look(), snapshot)
    assert kinds(decision) == []
    found = decision.status.condition(names.PAIRED)
    assert found is not None
    assert (found.reason, decision.status.attempt) == ("NoReference", 0)
    assert "other/a" in found.message


def test_a_look_that_is_refused_starts_nothing_and_is_named() -> None:
    cluster = Cluster()
    snapshot = cluster.snapshot()
    run = waiting(snapshot, "well-1")
    cluster.now, cluster.refuses = PATIENCE_S - 1, True
    _, decision = decide(run.look(), snapshot)
    found = decision.status.condition(names.PAIRED)
    assert found is not None
    assert (found.reason, decision.status.attempt) == ("InputMissing", 0)
    assert "not allowed to list pods" in found.message


@pytest.mark.parametrize("slow_s", [0.0, 10 * FRESH_S])
def test_a_decision_ends_however_slow_the_api_server_is(slow_s: float) -> None:
    """Each node is looked at once for one decision, and what is fresh is not looked at again."""
    cluster = Cluster()
    snapshot = cluster.snapshot()
    run = waiting(snapshot, "well-1", "well-2", "well-3")
    cluster.now, cluster.slow_s = PATIENCE_S - 1, slow_s
    _, decision = decide(run.look(), snapshot)
    assert decision.status.attempt == 1
    assert len(cluster.asked) == 3


# -- what else a choice is made from -------------------------------------------------------------------------


def gathered(run: Run, *others: Run, kind: str = "suspect", compared: dict[str, frozenset[str]] | None = None) -> World:
    """What pairing sees, from the PairRuns as the cluster holds them."""
    asked: list[int] = []

    def compared_with() -> dict[str, frozenset[str]]:
        asked.append(1)
        return compared or {}

    seen = run.look()
    found = gather(
        list(run.world.nodes), [run.obj, *(other.obj for other in others)], run.obj["metadata"]["uid"],
        spec(kind=kind), seen.status, dict, compared_with, lambda obj: read_status(obj.get("status")),
    )  # fmt: skip
    assert len(asked) == (kind == "swap")
    return found


def other_run(name: str, nodes: World) -> Run:
    run = Run(nodes=nodes)
    run.obj["metadata"] |= {"name": name, "uid": f"0a1b2c3d-0000-4000-8000-{name.encode().hex():>012}"}
    return run


def test_situation_25_attempts_that_said_nothing_are_counted_by_reference() -> None:
    """A suspension and an attempt that reached its end count against no node; the cap is kept by the whole loop."""
    run = Run({"retry": {"maxAttempts": 5, "maxAttemptsPerNode": 1, "backoffSeconds": 0}})
    run.world = world(node("sick", cordoned=True), node("well"), node("well-2"))
    assert gathered(run).tried == {}
    run.plan()
    first = run.look().status.attempts[0].reference.node
    run.start()
    run.stored(1)
    run.plan(after=1)
    run.change(Role.SUSPECT, phase="Failed", reason="Evicted")
    run.exit(Role.REFERENCE, 42, told("dead_peer"))
    run.obj["spec"]["retry"]["backoffSeconds"] = 3600  # the next attempt is not begun by the look that ends this one
    run.plan(after=1)
    assert run.look().status.attempts[0].ended_at is not None
    tried = gathered(run).tried
    assert tried == {first: 1}
    run.stored(1, state="closed")
    run.world = replace(run.world, tried=tried)
    status = run.plan(after=3601).status
    assert status.attempt == 2
    assert status.reference is not None
    assert status.reference.node == ({"well", "well-2"} - {first}).pop()
    assert [p.reason for p in status.passed_over if p.node == first] == ["AttemptsUsed"]


@pytest.mark.parametrize(
    ("reason", "count"), [("suspended", 0), ("completed", 0), ("parity:jaxlib", 0), ("evicted", 1)]
)
def test_only_an_attempt_that_the_next_may_better_counts_against_its_reference(reason: str, count: int) -> None:
    run = started()
    last = run.look().status.attempts[0].model_copy(update={"ended_at": "2027-01-15T08:10:00Z", "reason": reason})
    status = run.look().status.model_copy(update={"attempts": [last]})
    assert tried(status) == ({"well": 1} if count else {})
    live = last.model_copy(update={"ended_at": None})
    assert tried(status.model_copy(update={"attempts": [live]})) == {}


def test_a_node_that_served_less_comes_first() -> None:
    """Counted over every PairRun that is still there, finished ones included; the node of a run counts once."""
    nodes = world(node("sick", cordoned=True), node("well-1"), node("well-2"))
    one = other_run("one", world(node("sick", cordoned=True), node("well-1")))
    one.plan()
    assert one.look().status.reference is not None
    one.judge("match")
    one.plan()
    run = other_run("mine", nodes)
    seen = gathered(run, one)
    assert seen.served == {"well-1": 1}
    run.world = replace(seen, nodes=nodes.nodes, usage=nodes.usage)
    status = run.plan().status
    assert status.reference is not None
    assert status.reference.node == "well-2"


def test_situation_8_a_swap_takes_no_reference_that_was_used_before() -> None:
    nodes = world(node("sick", cordoned=True), node("well-1"), node("well-2"))
    run = Run({"kind": "swap", "suspect": {"nodeName": "sick"}}, nodes)
    seen = gathered(run, kind="swap", compared={"sick": frozenset({"well-1"})})
    assert seen.used_before == {"sick": {"well-1"}}
    run.world = replace(seen, usage=nodes.usage)
    status = run.plan().status
    assert status.reference is not None
    assert status.reference.node == "well-2"
    assert [p.reason for p in status.passed_over if p.node == "well-1"] == ["UsedBefore"]
    assert gathered(run).used_before == {}


@given(st.lists(st.tuples(st.sampled_from(["fill", "free", "wait", "pair"]), st.integers(0, 2), st.floats(0, 9))))
def test_no_pair_is_ever_placed_where_there_was_no_room(steps: list[tuple[str, int, float]]) -> None:
    """Pods come and go between any two looks; what was started fits what was there at most FRESH_S before."""
    cluster = Cluster()
    snapshot = cluster.snapshot()
    free_at: dict[str, float] = {}
    for what, index, wait in steps:
        name = f"well-{index}"
        match what:
            case "fill":
                free_at[name] = cluster.now if name not in cluster.pods.values() else free_at[name]
                cluster.pods[name] = name
            case "free":
                cluster.pods.pop(name, None)
            case "wait":
                cluster.now += wait
            case "pair":
                _, decision = decide(waiting(snapshot, "well-0", "well-1", "well-2").look(), snapshot)
                if decision.status.reference is not None:
                    chosen = decision.status.reference.node
                    assert chosen not in cluster.pods or cluster.now - free_at[chosen] <= FRESH_S
