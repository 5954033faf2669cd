"""How far a training may run ahead of its comparison, by the memory that there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import host_memory
from tandem.spec import RunSpec, resolve
from tandem_worker.drift import measure
from tandem_worker.drift.room import MOST, USABLE, Room, state_bytes
from tandem_worker.model.plan import make_plan
from tandem_worker.model.whole import STEP, make_whole_plan

GIB = 1 << 30


@pytest.mark.parametrize(
    ("state", "working", "free", "ahead"),
    [
        (2 * GIB, GIB, 14 * GIB, 1),
        (2 * GIB, GIB, 13 * GIB, 0),  # seven are needed, and only half of what is free is counted on
        (2 * GIB, 3 * GIB, 14 * GIB, 0),
        (2 * GIB, GIB, 2 * GIB, 0),  # not even one step fits: the run is tried all the same
        (2 * GIB, GIB, 0, 0),
        (1000, 1000, 4 * GIB, 1),
        (2 * GIB, GIB, None, 1),
    ],
)
def test_a_step_runs_ahead_where_its_state_fits_too(state: int, working: int, free: int | None, ahead: int) -> None:
    assert Room(state, working, free, "host").ahead == ahead


@given(st.integers(1, 2**45), st.integers(0, 2**45), st.integers(0, 2**47))
def test_what_runs_ahead_fits_and_more_memory_never_means_less(state: int, working: int, free: int) -> None:
    room = Room(state, working, free, "device")
    assert 0 <= room.ahead <= MOST
    assert room.ahead == 0 or room.needed(room.ahead) <= USABLE["device"] * free
    assert Room(state, working, free + state, "device").ahead >= room.ahead
    assert Room(state + 1, working, free, "device").ahead <= room.ahead


def test_a_state_is_parameters_moments_and_copies() -> None:
    spec = RunSpec(workload="training")
    model, training = resolve(spec)
    plan = make_whole_plan(make_plan(model, training, 2), model, spec.workload)
    masters = sum(plan.slots[s].nbytes for s in plan.persistent if s.startswith("master."))
    assert state_bytes(plan) == masters * 7 // 2, "three in fp32, one in bf16"


def chain(platform: str, *stats: dict[str, int] | None) -> Any:
    devices = [SimpleNamespace(platform=platform, memory_stats=lambda s=s: s) for s in stats]
    spec = RunSpec(workload="training")
    model, training = resolve(spec)
    return SimpleNamespace(
        plan=make_whole_plan(make_plan(model, training, 2), model, spec.workload),
        programs={STEP: SimpleNamespace(working_bytes=7)},
        mesh=SimpleNamespace(devices=SimpleNamespace(flat=devices)),
    )


def test_a_device_counts_for_its_own_rank_and_the_fullest_decides() -> None:
    stats = [{"bytes_limit": 100, "bytes_in_use": 30}, {"bytes_limit": 100, "bytes_in_use": 20}]
    whole = chain("gpu", *stats)
    assert measure.look(whole, 1) == Room(state_bytes(whole.plan), 7, 70, "device")
    assert measure.look(whole, 2).free == 20, "half of the device is the other side's"
    assert measure.look(chain("gpu", stats[0], None), 1).free is None
    assert measure.look(chain("tpu", stats[0], {}), 1).free is None
    assert measure.look(chain("gpu", {"bytes_limit": 10, "bytes_in_use": 30}), 1).free == 0


def test_on_cpu_all_ranks_share_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "available_memory", lambda: 1000)
    whole = chain("cpu", None, None)
    assert measure.look(whole, 2) == Room(2 * state_bytes(whole.plan), 14, 500, "host")


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    5 kB\n"}, 5 * 1024),
        ({"/proc/meminfo": "MemAvailable: 5 kB\n", "memory.max": "max\n", "memory.current": "100\n"}, 5 * 1024),
        ({"/proc/meminfo": "MemAvailable: 5 kB\n", "memory.max": "3000\n", "memory.current": "1000\n"}, 2000),
        (
            {
                "/proc/meminfo": "MemAvailable: 5 kB\n", "memory.max": "3000\n", "memory.current": "1000\n",
                "memory.stat": "anon 200\ninactive_file 700\n",
            },
            2700,
        ),
        ({"/proc/meminfo": "MemAvailable: 5 kB\n", "memory.max": "900\n", "memory.current": "1000\n"}, 0),
    ],
)  # fmt: skip
def test_available_memory_is_the_kernels_or_what_a_cgroup_leaves(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int
) -> None:
    monkeypatch.setattr(host_memory, "_read", lambda path: files.get(path, files.get(path.rsplit("/", 1)[-1], "")))
    assert host_memory.available_memory() == available
