"""The benchmarks' own arithmetic, and that their page is the one that their results make."""

from __future__ import annotations

import ast
import os
import random
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import bench
import pytest
from bench import page, results
from bench.fused import LOSS
from bench.options import Options
from bench.replica import Replica
from bench.results import Row, row
from bench.rows import BENCHES, sketch, whole
from bench.rows.memory import kept_bytes
from bench.rows.sketch import Told
from bench.stats import Estimate, quantile, ratios, shuffled_blocks
from bench.turns import WARMUP, State, Step, cpus, take_turns, walls
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.spec import resolve
from tandem_worker.chain import Op, Plan, TensorSpec
from tandem_worker.model.plan import make_plan

NUMBERS = st.floats(-1e6, 1e6)


@pytest.mark.parametrize("name", sorted(m.name for m in walk_packages(bench.__path__, "bench.")))
def test_every_part_of_a_benchmark_can_be_imported(name: str) -> None:
    """What a benchmark runs as a process is a module too, never a text that only breaks when it is measured."""
    module = import_module(name)
    assert module.__file__ is not None
    assert not re.search(r"""["']-c["']""", Path(module.__file__).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted({target.partition(":")[0] for target in BENCHES.values()}))
def test_every_bound_that_a_benchmark_names_is_that_of_a_row(name: str) -> None:
    """A bound that no row has any more is kept by nobody, whatever the stored results still say."""
    source = import_module(name).__file__
    assert source is not None
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    named = {
        target.id
        for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name) and target.id.startswith("BOUND")
    }  # fmt: skip
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    makers = [each for each in functions if "row" in _called(each)]
    assert makers, "it makes no row"
    used = {node.id for each in makers for node in ast.walk(each) if isinstance(node, ast.Name)}
    assert named <= used


def _called(function: ast.AST) -> set[str]:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {called.id for called in calls if isinstance(called, ast.Name)}


def test_the_controllers_benchmark_starts_its_process(tmp_path: Path) -> None:
    """As far as it comes without a cluster: it reads its settings and looks for the kubeconfig."""
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none"), "KUBERNETES_SERVICE_HOST": ""}
    settings = {"namespace": "tandem", "worker": {"image": "tandem-worker:1"}}
    with pytest.raises(RuntimeError, match="did not start") as raised:
        Replica(environment, tmp_path / "replica", "postgresql://nobody@127.0.0.1:1/none", settings)
    assert "SetupError" in str(raised.value)
    assert "kubeconfig" in str(raised.value)


@given(st.lists(NUMBERS, min_size=1, max_size=80), st.floats(0.01, 0.99))
def test_bounds_enclose_the_value_and_come_from_the_sample(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert found.low in values
    assert found.high in values
    assert found.runs == len(values)
    assert min(values) <= found.value <= max(values)
    if q == 0.5:
        assert found.low <= found.value <= found.high


@given(st.lists(NUMBERS, min_size=5, max_size=40), st.floats(-100, 100))
def test_a_shift_of_all_values_shifts_the_bounds(values: list[float], shift: float) -> None:
    before, after = quantile(values), quantile([v + shift for v in values])
    assert after.low == before.low + shift
    assert after.high == before.high + shift


@pytest.mark.parametrize(("n", "rank"), [(5, 1), (7, 1), (8, 2), (10, 2), (11, 3), (16, 5), (20, 6), (30, 11)])
def test_the_median_bound_is_that_of_the_sign_test(n: int, rank: int) -> None:
    """Ranks from tables of the sign test, one-sided, 5 % (Conover, Practical Nonparametric Statistics, table A3)."""
    found = quantile([float(i) for i in range(1, n + 1)])
    assert (found.low, found.high) == (rank, n + 1 - rank)


@pytest.mark.parametrize("q", [0.5, pytest.param(0.99, marks=pytest.mark.slow)])
def test_each_bound_is_wrong_at_most_one_time_in_twenty(q: float) -> None:
    """Of uniform samples, whose q-quantile is q. 4,000 samples: a true rate of 5 % stays below 6.1 % (three sigma)."""
    rng, n, samples = random.Random(1), 60 if q == 0.5 else 500, 1500
    wrong = Counter[str]()
    for _ in range(samples):
        found = quantile([rng.random() for _ in range(n)], q)
        wrong["low"] += found.low > q
        wrong["high"] += found.high < q
    limit = 0.05 + 3 * (0.05 * 0.95 / samples) ** 0.5
    assert wrong["low"] / samples <= limit
    assert wrong["high"] / samples <= limit


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        quantile([])
    with pytest.raises(ValueError, match="NaN"):
        quantile([1.0, float("nan")])
    with pytest.raises(ValueError, match="usable"):
        ratios([{"a": 1.0, "b": 0.0}], "a", "b")
    with pytest.raises(ValueError, match="usable"):
        ratios([{"a": 1.0}], "a", "b")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20), st.floats(0.01, 100))
def test_what_disturbs_a_whole_block_cancels(values: list[float], factor: float) -> None:
    blocks = [{"a": 2 * v * factor**i, "b": v * factor**i} for i, v in enumerate(values[:5])]
    assert ratios(blocks, "a", "b") == pytest.approx([2.0] * len(blocks))


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 1000))
def test_every_kind_has_its_turn_in_every_block(kinds: int, blocks: int, seed: int) -> None:
    made = shuffled_blocks(range(kinds), blocks, seed)
    assert [sorted(block) for block in made] == [list(range(kinds))] * blocks
    assert made == shuffled_blocks(range(kinds), blocks, seed)


def test_the_order_within_blocks_differs() -> None:
    assert len({tuple(block) for block in shuffled_blocks("abcd", 40, 0)}) > 10


@pytest.mark.parametrize(
    ("low", "high", "bound", "sense", "ok"),
    [
        (1.00, 1.20, 1.03, "at most", True),
        (1.04, 1.20, 1.03, "at most", False),
        (0.40, 0.60, 0.50, "at least", True),
        (0.40, 0.49, 0.50, "at least", False),
        (0.40, 0.49, None, "at most", None),
    ],
)
def test_a_row_falls_short_only_beyond_its_whole_range(
    low: float, high: float, bound: float | None, sense: results.Sense, ok: bool | None
) -> None:
    made = row("sync.x", "x", Estimate((low + high) / 2, low, high, 9), {}, bound=bound, sense=sense)
    assert made.ok is ok


def test_measuring_one_bench_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.save(results.replace([], "chain", [_row("chain.step", 1.0)]), path)
    results.save(results.replace(results.load(path), "sync", [_row("sync.full", 2.0)]), path)
    results.save(results.replace(results.load(path), "chain", [_row("chain.step", 3.0)]), path)
    assert [(r.name, r.value) for r in results.load(path)] == [("sync.full", 2.0), ("chain.step", 3.0)]


def test_the_page_is_made_from_the_results() -> None:
    """Stale: run `python -m bench --page`."""
    assert page.PAGE.read_text(encoding="utf-8") == page.render(results.load())


def test_every_stored_row_belongs_to_a_bench() -> None:
    assert {r.name.split(".")[0] for r in results.load()} <= set(BENCHES)


def _row(name: str, value: float) -> Row:
    return row(name, "x", Estimate(value, value, value, 1), {})


# -- turns, and what they tell --------------------------------------------------------------------


@pytest.mark.parametrize(("enough_from", "most", "blocks"), [(4, 3, 4), (8, 3, 8), (99, 3, 12), (99, 1, 4)])
def test_turns_go_on_until_they_tell_what_they_are_to_tell(enough_from: int, most: int, blocks: int) -> None:
    ran = {"a": 0, "b": 0}

    def step(kind: str) -> Step:
        def one(state: State, _: int) -> State:
            ran[kind] += 1
            return state

        return one

    found = take_turns({k: step(k) for k in ran}, {"a": {}, "b": {}}, 4, 0, lambda t: len(t) >= enough_from, most)
    assert len(found) == len(walls(found)) == len(cpus(found)) == blocks
    assert ran == {"a": blocks + WARMUP, "b": blocks + WARMUP}
    assert all(turn.wall >= 0 and turn.cpu >= 0 for block in found for turn in block.values())


@given(st.floats(0.9, 1.1), st.floats(0.8, 1.0))
def test_a_slowdown_that_is_seen_lies_beyond_the_bound(value: float, share: float) -> None:
    found = Estimate(value, value * share, value / share, 9)
    seen = 1 + float(whole._seen(found, whole.BOUND)["seen_from"].split()[0]) / 100
    assert seen * found.low / found.value == pytest.approx(whole.BOUND, abs=1e-3)


def test_models_that_trained_apart_are_part_of_the_sketchs_error() -> None:
    """Else its largest error would be that of made differences alone, and none would say so."""
    made = [Told(1e-3, 0.004, 0.006, True)] * 3
    right, lost = Told(1e-3, 0.009, 0.008, True), Told(1e-3, 0.5, 0.4, False)
    named = {r.name: r for r in sketch.rows(Options(), {"a": [right] * 3 + [lost], "b": [right] * 4}, made)}
    assert (named["sketch.error"].value, named["sketch.error_trained"].value) == (pytest.approx(0.9),) * 2
    assert (named["sketch.error"].runs, named["sketch.error_trained"].runs) == (10, 7)
    assert named["sketch.stored"].value == 75
    assert named["sketch.error_untold"].value == 50
    rows = {r.name: r for r in sketch.rows(Options(), {"a": [lost] * 4, "b": [right] * 4}, made)}
    assert (rows["sketch.stored"].value, rows["sketch.error_trained"].runs) == (0, 4)
    with pytest.raises(ValueError, match="no estimate"):
        sketch.rows(Options(), {"a": [lost] * 4, "b": [lost] * 4}, made)
    with pytest.raises(ValueError, match="no estimate"):
        sketch.rows(Options(), {"a": [right], "b": [Told(1e-6, 0.0, 0.001, True)]}, made)


# -- the bound of the memory ----------------------------------------------------------------------


def _plan(window_sites: list[int], *, drains: tuple[int, ...] = ()) -> Plan:
    """A line of ops of 100-byte slots, each with its number of outputs; the first output feeds the next op."""
    from tandem.sites import Site
    from tandem.vocabulary import Module, Phase

    ops, slots, read = [], {"start": TensorSpec((25,), "float32")}, "start"
    for index, outputs in enumerate(window_sites):
        names = tuple(f"{index}.{i}" for i in range(outputs))
        slots |= dict.fromkeys(names, TensorSpec((25,), "float32"))
        sites = tuple(Site(index, Phase.FWD, Module.FFN, 0, "out", (25,), "float32") for _ in names)
        ops.append(Op(index, "p", (read,), ("x",), names, sites, drain=index in drains))
        read = names[0]
    return Plan(tuple(ops), (), slots, frozenset(), (), tp=2)


@pytest.mark.parametrize(
    ("sites", "drains", "window", "buffers"),
    [
        ([1, 1, 1, 1], (), 1, 2),  # one program: its input and its output
        ([1, 1, 1, 1], (), 3, 4),  # a chain shares what is between
        ([5, 1], (), 1, 6),  # a program with more sites than the window runs alone
        ([1, 1, 1, 1], (2,), 4, 3),  # nothing is kept across a drain
    ],
)
def test_kept_bytes(sites: list[int], drains: tuple[int, ...], window: int, buffers: int) -> None:
    assert kept_bytes(_plan(sites, drains=drains), window) == buffers * 100 * 2


@settings(max_examples=20)
@given(st.integers(1, 100))
def test_a_wider_window_never_keeps_less(window: int) -> None:
    model, training = resolve(Options(preset="tiny").spec())
    plan = make_plan(model, training, 2)
    assert kept_bytes(plan, window) <= kept_bytes(plan, window + 1)
    assert LOSS in plan.slots
