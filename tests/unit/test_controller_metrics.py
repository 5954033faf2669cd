"""The controller's metrics: bounded labels, and series that go with the object."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from clusters import Run, started
from tandem.pairrun.status import PairRunStatus
from tandem_controller.metrics import STATES, Metrics, state_of


def test_situation_27_labels_are_bounded_and_series_go_with_the_object() -> None:
    """However many PairRuns there are, there are as many series; no name of a run, pod or node is among them."""
    metrics, there = Metrics(), list[PairRunStatus]()
    metrics.observe(lambda: len(there), lambda: there)

    def lines() -> list[str]:
        return [line for line in generate_latest(metrics.registry).decode().splitlines() if not line.startswith("#")]

    empty = lines()
    for _ in range(50):
        there.append(started().look().status)
    full = lines()
    assert [line.rsplit(" ", 1)[0] for line in full] == [line.rsplit(" ", 1)[0] for line in empty]
    assert 'tandem_controller_runs{state="running"} 50.0' in full
    assert not any(word in line for line in full for word in ("check", "sick", "well"))
    there.clear()
    assert lines() == empty


def waiting() -> Run:
    run = Run()
    run.world = type(run.world)(nodes=[], usage={})
    run.plan()
    return run


def ended(verdict: str) -> Run:
    run = started()
    run.judge(verdict)
    run.plan(after=1)
    return run


def suspended() -> Run:
    run = started()
    run.obj["spec"]["suspend"] = True
    run.plan(after=1)
    run.plan(after=1)
    return run


def starting() -> Run:
    run = Run()
    run.plan()
    return run


@pytest.mark.parametrize(
    ("run", "state"),
    [
        (waiting(), "waiting"),
        (starting(), "starting"),
        (started(), "running"),
        (suspended(), "suspended"),
        (ended("match"), "match"),
        (ended("mismatch"), "mismatch"),
        (ended("inconclusive"), "inconclusive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_run_is_in_one_state(run: Run, state: str) -> None:
    assert state in STATES
    assert state_of(run.look().status) == state
