"""The profiles of the paper's nodes give what was published, measured and not eyeballed.

Frequencies of all cells come from `bench.calibrate`: the very programs, injector and bits of a pair on preset tiny, fed
with kept inputs, 1,500 steps (node 1: 6,600, since 5e-7 is rare), at least 100 independent fault events a cell. A real
pair over the link then counts the same elements, step by step, and a real gradient run the same noise.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bench.calibrate import Bed, Setting, frequencies, noise
from tests.pairs import clean_end, found, run_pair, truth

from tandem.faults.files import load_profile
from tandem.faults.profile import FaultProfile
from tandem.paper.check import CHECKS, ONSET, ONSET_TOLERANCE, WCNTS_TOLERANCE, paper, published
from tandem.paper.events import ENOUGH_EVENTS, of_run
from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.statistics.noise import ratio
from tandem.vocabulary import Cause, Phase, SyncMode, Workload

pytestmark = pytest.mark.slow
STEPS = {"node-1": 6600, "node-10": 1500, "node-11": 1500}
NOISE_STEPS = 200
"""As `tandem paper` runs: the largest ratio of a run grows with its length."""
SETTINGS: dict[str, Any] = {"self_replays": 2, "replays": 1, "replay_budget": 0}


def shipped(name: str) -> FaultProfile:
    return load_profile(Path(name))


@cache
def bed() -> Bed:
    names = ("node-1", "node-4", "node-6", "node-10", "node-11", "node-13")
    return Bed(Setting(), [shipped(name) for name in names])


@pytest.mark.parametrize("name", STEPS)
def test_frequencies_are_the_published_ones_within_the_sampling_interval_of_events(name: str) -> None:
    known = next(n for n in published.NODES if n.name == name.replace("-", " ")).frequency
    for column, m in frequencies(bed(), shipped(name), STEPS[name]).items():
        value = known[column]
        assert value is not None
        assert m.events >= ENOUGH_EVENTS, (column, m.line())
        assert m.holds(value), (column, value, m.line())
        assert m.high - m.low < value, "an interval as wide as the value would prove little"


@pytest.mark.parametrize("name", ["node-10", "node-11"])
def test_a_real_pair_counts_the_same(name: str) -> None:
    """Element by element where faults act on what is compared; within the interval where operands spread."""
    steps, recipe = 60, shipped(name)
    outcome = run_pair(RunSpec(steps=steps, fault="x.toml", **SETTINGS), recipe)
    clean_end(outcome)
    measured, driven = of_run(outcome.records), frequencies(bed(), recipe, steps)
    known = next(n for n in published.NODES if n.name == name.replace("-", " ")).frequency
    for column, m in measured.items():
        assert m.elements == driven[column].elements
        assert m.events == driven[column].events
        if column[0] is Phase.BWD:
            assert m.mismatched == pytest.approx(driven[column].mismatched, rel=0.01)  # a zero times 1.5 is no change
        else:
            # how far an operand spreads depends on the state
            assert m.mismatched == pytest.approx(driven[column].mismatched, rel=0.2)
        value = known[column]
        assert value is not None
        assert m.holds(value), (column, m.line())
    injected = truth(outcome.records)
    assert injected
    assert injected.items() <= found(outcome.records).items()


def test_the_worst_noise_is_the_published_one_and_in_its_order() -> None:
    worst = {name: max(noise(bed(), shipped(name), NOISE_STEPS)) for name in ("node-11", "node-1", "node-4")}
    for name, value in worst.items():
        assert value == pytest.approx(published.WCNTS[name.replace("-", " ")], rel=WCNTS_TOLERANCE), worst
    assert worst["node-11"] > worst["node-1"] > worst["node-4"]


def test_a_real_gradient_run_measures_the_same_noise() -> None:
    steps, recipe = 60, shipped("node-11")
    outcome = run_pair(RunSpec(workload=Workload.GRADIENT, steps=steps, fault="x.toml", **SETTINGS), recipe)
    clean_end(outcome)
    whole = {g.step: ratio(g.noise, g.signal) for g in outcome.records.gradients if not g.leaf}
    measured = np.array([whole.get(step) or 0.0 for step in range(1, steps + 1)])
    driven = np.array(noise(bed(), recipe, steps))
    assert np.array_equal(measured > 0, driven > 0)
    noisy = driven > 0
    apart = np.abs(measured[noisy] / driven[noisy] - 1)
    assert apart[0] < 1e-6
    # one program rounds otherwise than many, and the parameters go apart
    assert np.median(apart) < 0.1


def test_node_6_has_a_loss_spike_that_wrecks_the_weights() -> None:
    """In a real training, and as the check's page tells it: the weights are elsewhere when the spike is over."""
    (check,) = [c for c in CHECKS if (c.profile, c.workload) == ("node-6", Workload.TRAINING)]
    recipe, spec = shipped("node-6"), check.spec(quick=True)
    outcome = run_pair(spec, recipe)
    clean_end(outcome)
    records = outcome.records
    losses = [(s.loss_reference, s.loss_suspect) for s in sorted(records.steps, key=lambda s: s.step) if s.step]
    good, bad = (np.array(side, float) for side in zip(*losses, strict=True))
    assert len(losses) == check.quick
    assert np.array_equal(good[:40], bad[:40])
    assert bad[40:].max() > 1.5 * good[0] > good[40:].max(), "worse than before any training"
    verdict = decide(records)
    records.run = msgspec.structs.replace(records.run, verdict=verdict.verdict, reason=verdict.reason)
    (line,) = [x for x in paper({check: records}, quick=True).lines if "loss spike" in x.quantity]
    assert (line.status, line.steps) == ("read back", check.quick), line
    assert line.measured in range(41, 49)
    (end,) = [d for d in records.drifts if (d.step, d.part, d.method) == (check.quick, "", "exact")]
    assert end.drift is not None
    assert end.drift / end.norm > 0.05


def test_the_anatomys_shares_are_those_of_a_runs_rows() -> None:
    """What later work found of the elements that differ, read back from the records: half nullified, 1.01 % NaN."""
    outcome = run_pair(RunSpec(steps=12, fault="x.toml", sync=SyncMode.DIGEST, **SETTINGS), shipped("anatomy"))
    clean_end(outcome)
    rows = [m for m in outcome.records.mismatches if m.cause is Cause.COMPUTE and m.tensor in ("out", "dx")]
    assert {(m.phase, m.module) for m in rows} == set(published.COLUMNS)
    found = sum(m.mismatched or 0 for m in rows)
    assert found > 2000
    for share, counted in ((0.5, [m.nullified for m in rows]), (0.0101, [m.nonfinite for m in rows])):
        measured = sum(n or 0 for n in counted) / found
        assert abs(measured - share) < 4 * (share * (1 - share) / found) ** 0.5 + 0.02 * share, (share, measured, found)


def test_node_13_does_nothing_before_its_onset() -> None:
    recipe = shipped("node-13")
    assert recipe.acting(ONSET - 1) == ()
    assert len(recipe.acting(ONSET)) == len(recipe.fault)


def test_node_13s_first_mismatch_is_at_its_onset() -> None:
    """By the injector in the compiled programs: each step with and without its faults, from one state."""
    recipe, state = shipped("node-13"), bed().trained(1)

    def bits(slots: dict[str, Any]) -> dict[str, bytes]:
        return {name: np.asarray(value).tobytes() for name, value in bed().persistent(slots).items()}

    steps = range(ONSET - 10, ONSET + 11)
    differ = [n for n in steps if bits(bed().step(state, n)) != bits(bed().step(state, n, recipe))]
    assert differ
    assert ONSET <= differ[0] <= ONSET + ONSET_TOLERANCE
