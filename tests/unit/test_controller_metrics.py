"""The controller's metrics: bounded labels, and series that go with the object."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from clusters import NOW, Run, started
from prometheus import lint
from tandem.pairrun.status import PairRunStatus, timestamp
from tandem_controller.metrics import REASONS, STATES, Metrics, state_of


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


def told(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in generate_latest(metrics.registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_how_long_runs_wait_and_stand_still() -> None:
    run, wait = started(), waiting()
    metrics = Metrics(clock=lambda: NOW + 500)
    metrics.observe(lambda: 3, lambda: [run.look().status, wait.look().status])
    found = told(metrics)
    assert found["tandem_controller_queue_depth"] == 3
    assert found['tandem_controller_oldest_run_seconds{state="waiting"}'] == 500
    assert found['tandem_controller_oldest_run_seconds{state="running"}'] > 0
    assert found['tandem_controller_oldest_run_seconds{state="backoff"}'] == 0
    assert found["tandem_controller_oldest_progress_seconds"] > 0
    (reason,) = [name for name in found if name.startswith("tandem_controller_unpaired_runs")]
    assert found[reason] == 1
    moved = run.look().status.model_copy(update={"progress_at": timestamp(NOW + 490)})
    metrics = Metrics(clock=lambda: NOW + 500)
    metrics.observe(lambda: 0, lambda: [moved])
    assert told(metrics)["tandem_controller_oldest_progress_seconds"] == 10


def test_verdicts_are_counted_from_zero_and_reasons_are_bounded() -> None:
    metrics = Metrics()
    before = told(metrics)
    assert before['tandem_controller_runs_finished_total{kind="null",verdict="mismatch"}'] == 0
    metrics.finished("null", PairRunStatus(verdict="mismatch", reason="completed"))
    for number in range(3 * REASONS):
        metrics.finished("suspect", PairRunStatus(verdict="inconclusive", reason=f"r{number}: from a hostile worker"))
    found = told(metrics)
    assert found['tandem_controller_runs_finished_total{kind="null",verdict="mismatch"}'] == 1
    assert found['tandem_controller_runs_finished_total{kind="suspect",verdict="inconclusive"}'] == 3 * REASONS
    reasons = [name for name in found if name.startswith("tandem_controller_runs_inconclusive_total")]
    assert len(reasons) <= REASONS + 2
    assert sum(found[name] for name in reasons) == 3 * REASONS
    assert not any("hostile" in name for name in reasons)
    alerted = 'tandem_controller_runs_inconclusive_total{reason="reference_differs"}'
    assert found[alerted] == 0
    metrics.finished("suspect", PairRunStatus(verdict="inconclusive", reason="reference_differs"))
    assert told(metrics)[alerted] == 1, "no suspect's words push out what an alert waits for"


@pytest.mark.needs("prometheus")
def test_promtool_has_nothing_against_it() -> None:
    metrics = Metrics()
    metrics.observe(lambda: 0, lambda: [started().look().status, waiting().look().status])
    assert lint(generate_latest(metrics.registry)) == ""


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
