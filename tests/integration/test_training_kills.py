"""A training whose worker is killed goes on from the last checkpoint that both sides hold, to the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervised import Home, new_home
from tandem.records import RunRecords
from tandem.vocabulary import Cause, ControlName, Role, Verdict
from tandem_worker.drift.saved import read_saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FAULT = """
name = "one bit, once"
[[fault]]
kind = "flip"
bits = [14]
elements = 1
phase = "fwd"
module = "ffn"
layers = [1]
tensor = "out"
ranks = [0]
steps = [3]
repeat = "once"
"""
"""The sides train apart from step 3 on: each must go on from its own checkpoint."""
EVERY, MORE = 4, 6


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as home:
        yield home


def train(home: Home, folder: Path, **more: Any) -> RunRecords:
    """A training to its end."""
    pair = home.pair(**spec(home, folder) | more)
    code = pair.end()
    assert code == 1, f"{pair.outcome} {pair.stderr()}"
    assert pair.run_id is not None
    return home.records(pair.run_id)


def spec(home: Home, folder: Path) -> dict[str, Any]:
    fault = home.folder / "fault.toml"
    fault.write_text(FAULT)
    return {
        "workload": "training", "checkpoints": folder, "self_replays": 2, "replays": 1, "fault": fault,
        "exact_every": 1000, "peer_timeout": 10,
    }  # fmt: skip


def saved(folder: Path, role: Role) -> list[int]:
    """Steps of the whole checkpoints of one side."""
    marks = (folder / role).glob("*/orbax.checkpoint")
    return sorted(int(mark.parent.name) for mark in marks if mark.parent.name.isdecimal())


@pytest.mark.parametrize("role", Role)
def test_a_worker_killed_in_a_training(home: Home, tmp_path: Path, role: Role) -> None:
    broken = home.pair(
        **spec(home, tmp_path / "parts"), checkpoint_every=EVERY, steps=None, duration=3600
    )  # fmt: skip
    broken.wait_for(lambda event: event.step > 2 * EVERY)
    os.kill(broken.workers[role], signal.SIGKILL)
    assert broken.end() == 2, f"{broken.outcome} {broken.stderr()}"
    assert broken.outcome == {"verdict": "inconclusive", "reason": f"{role}_died"}
    common = max(set(saved(tmp_path / "parts", Role.REFERENCE)) & set(saved(tmp_path / "parts", Role.SUSPECT)))
    assert common % EVERY == 0

    last = common + MORE
    resumed = train(home, tmp_path / "parts", checkpoint_every=EVERY, steps=last, resume=True)
    assert resumed.run.verdict == Verdict.MISMATCH
    (row,) = [c for c in resumed.controls if c.name is ControlName.RESUMED]
    assert (row.step, row.ok, row.detail["began"]) == (common, True, broken.run_id.hex if broken.run_id else "")
    assert f"resumed from step {common}" in (resumed.run.sentence or "")
    assert [s.step for s in resumed.steps] == [0, *range(common + 1, last + 1)]
    assert {(m.step, m.cause) for m in resumed.mismatches} == {(0, Cause.DERIVED)}

    whole = train(home, tmp_path / "whole", steps=last)
    for side in Role:
        mine, theirs = (read_saved(tmp_path / name / side / str(last)).digests for name in ("parts", "whole"))
        assert mine == theirs
    reference, suspect = (read_saved(tmp_path / "parts" / side / str(last)).digests for side in Role)
    assert reference != suspect
    losses = {s.step: (s.loss_reference, s.loss_suspect) for s in whole.steps}
    assert all(losses[s.step] == (s.loss_reference, s.loss_suspect) for s in resumed.steps if s.step)
