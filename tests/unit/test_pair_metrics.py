"""What a reference tells Prometheus: bounded, without names of runs, and never a reason for a run to fail."""

from __future__ import annotations

import re
import socket
import urllib.error
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from prometheus import lint, scrape
from tandem.progress import ProgressEvent
from tandem.records import ClassCounts, StepRecord
from tandem.vocabulary import ControlName, Module, Phase, Role
from tandem_worker.link.state import Activity
from tandem_worker.lockstep.ledger import Ledger
from tandem_worker.lockstep.tally import RunTally
from tandem_worker.metrics import Look, PairCollector, PairLabels, export

RUN = UUID("01a22926-561b-72b1-aca5-96239d3c4608")
LABELS = PairLabels("sick", "well", "submodule", "suspect", synthetic=False)
PAIR = {"node": "sick", "reference": "well", "workload": "submodule", "kind": "suspect", "synthetic": "false"}
EVERYWHERE = frozenset((phase, module) for phase in Phase for module in Module)


def step(number: int, duration: float = 0.5, **classes: ClassCounts) -> StepRecord:
    return StepRecord(
        run_id=RUN, attempt=1, step=number, rows=0, duration_s=duration, busy_s=duration / 2, link_bytes=100,
        full_bytes=1000, finished_at=1000.0 + number,
        classes={"fwd/ffn/out": ClassCounts(2, 200, 1, 7), "fwd/ffn/reduced": ClassCounts(1, 100, 0, 0), **classes},
    )  # fmt: skip


def told(look: Look) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(PairCollector(LABELS, lambda: look))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def of(name: str, **labels: str) -> str:
    """A series of the pair, as it is written: its labels sorted."""
    inner = ",".join(f'{key}="{value}"' for key, value in sorted((PAIR | labels).items()))
    return f"tandem_pair_{name}{{{inner}}}"


def looked(total: RunTally, phase: str = "step", **event: Any) -> Look:
    return Look(ProgressEvent(phase=phase, **event), Activity.COMPUTING, 1010.0, total, {}, EVERYWHERE)


def test_what_was_compared_is_counted_by_phase_and_module() -> None:
    total = RunTally()
    for number in range(3):
        total.add_step(step(number))
    found = told(looked(total, window_used=5, window_limit=32, records_put=9, records_acknowledged=4))
    place = {"role": "suspect", "phase": "fwd", "module": "ffn"}
    assert found[of("sites_compared_total", **place)] == 9
    assert found[of("elements_compared_total", **place)] == 900
    assert found[of("sites_mismatched_total", **place)] == 3
    assert found[of("elements_mismatched_total", **place)] == 21
    assert found[of("steps_total")] == 2
    assert found[of("link_bytes_total")] == 300
    assert found[of("full_exchange_bytes_total")] == 3000
    assert found[of("busy_seconds_total")] == 0.5
    assert found[of("step_seconds_sum")] == 1.0
    assert found[of("step_seconds_count")] == 2
    assert found[of("last_step_age_seconds")] == 8
    assert found[of("window_sites")] == 5
    assert found[of("records_waiting")] == 5


def test_steps_are_counted_by_their_time_and_the_initial_parameters_are_no_step() -> None:
    total = RunTally()
    for number, duration in enumerate((50.0, 0.01, 0.011, 999.0, 5000.0)):
        total.add_step(step(number, duration))
    found = told(looked(total))

    def within(bound: str) -> float:
        return found[of("step_seconds_bucket", le=bound)]

    assert [within(b) for b in ("0.01", "0.03", "300.0", "1000.0", "+Inf")] == [1, 2, 2, 3, 4]


@pytest.mark.parametrize("phase", ["starting", "compiling 3/14", "handshake", "controls", "closing", "delivering"])
def test_no_step_is_late_before_the_first_and_after_the_last(phase: str) -> None:
    assert not [name for name in told(looked(RunTally(), phase)) if "last_step" in name]


def test_every_counter_begins_at_zero_so_that_the_first_finding_is_an_increase() -> None:
    found = told(looked(RunTally(), "starting"))
    assert len([name for name in found if name.startswith("tandem_pair_sites_mismatched")]) == len(EVERYWHERE)
    assert of("control_failures_total", role="reference", control="self_replay_end") in found
    assert {value for name, value in found.items() if name.partition("{")[0].endswith("_total")} == {0}


def test_situation_27_series_are_bounded_whatever_happens_and_name_no_run() -> None:
    total = RunTally()
    every = {f"{p}/{m}/{f}": ClassCounts(1, 1, 1, 1) for p in Phase for m in Module for f in ("out", "dw", "param")}
    total.add_step(step(1, **every))
    before = told(looked(total))
    for number in range(2, 50):
        total.add_step(step(number, **every))
    found = told(replace(looked(total), failures={(ControlName.TRANSPORT, Role.SUSPECT): 3}))
    assert set(found) == set(before)
    assert len(found) <= 120
    labels = {label for name in found for label in re.findall(r'(\w+)="', name)}
    assert labels == {
        "node", "reference", "workload", "kind", "synthetic", "role", "phase", "module", "control", "activity", "le",
        "version",
    }  # fmt: skip
    assert not any(str(RUN) in name for name in found)


def test_failed_controls_are_counted_by_side() -> None:
    ledger = Ledger(type("Sink", (), {"put": lambda *_: None})(), RUN, 1, 10, lambda: 0.0)
    ledger.control(ControlName.SELF_REPLAY_START, Role.REFERENCE, 1, "ffn", True)
    ledger.control(ControlName.SELF_REPLAY_START, Role.SUSPECT, 1, "ffn", False)
    ledger.control(ControlName.SELF_REPLAY_START, Role.SUSPECT, 1, "attn", False)
    found = told(replace(looked(RunTally()), failures=ledger.failures))
    assert found[of("control_failures_total", role="suspect", control="self_replay_start")] == 2
    assert found[of("control_failures_total", role="reference", control="self_replay_start")] == 0


@pytest.mark.needs("prometheus")
def test_promtool_has_nothing_against_it() -> None:
    total = RunTally()
    total.add_step(step(1))
    registry = CollectorRegistry()
    registry.register(PairCollector(LABELS, lambda: looked(total)))
    assert lint(generate_latest(registry)) == ""


def serving(look: Callable[[], Look], log: list[str]) -> int | None:
    return export(0, LABELS, look, log.append, "127.0.0.1")


def test_a_port_that_is_taken_is_one_line_and_no_end() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert export(port, LABELS, lambda: looked(RunTally()), lines.append, "127.0.0.1") is None
    (line,) = lines
    assert line.startswith(f"no metrics: port {port} cannot be listened on")
    assert export(99_999, LABELS, lambda: looked(RunTally()), lines.append) is None


def test_a_scrape_that_fails_harms_nothing_and_the_next_one_is_answered() -> None:
    calls = iter([ValueError("torn"), None])

    def look() -> Look:
        if (error := next(calls)) is not None:
            raise error
        return looked(RunTally())

    port = serving(look, [])
    assert port is not None
    with pytest.raises((urllib.error.URLError, OSError)):
        scrape(port)
    assert b"tandem_pair_steps_total" in scrape(port)
