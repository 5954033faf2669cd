"""The instrument check: what counts as an event, how a frequency is judged, and what the page says."""

from __future__ import annotations

import json
import random
import re
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from db_samples import fault, mismatch
from sample_runs import sample_run
from tandem.cli.app import main
from tandem.faults.files import load_profile
from tandem.installed import NOT_USED, here
from tandem.paper.check import CHECKS, paper, published, same, unusable
from tandem.paper.events import CONFIDENCE, ENOUGH_EVENTS, ClassTotals, Measured, clustered, measured
from tandem.records import ClassCounts, DriftRecord, GradientRecord, RunRecords
from tandem.report.page import write
from tandem.report.paper import headline, render, text_lines
from tandem.statistics.bounds import interval
from tandem.vocabulary import Workload

STEP = 1000


def steps(mismatched: list[int], elements: int = STEP) -> list[ClassTotals]:
    return [ClassTotals(n, elements, m) for n, m in enumerate(mismatched, start=1)]


@pytest.mark.parametrize(
    ("mismatched", "events", "clusters"),
    [
        ([0, 0, 0], 0, [(1000, 0), (1000, 0), (1000, 0)]),
        ([0, 5, 0], 1, [(1000, 0), (1000, 5), (1000, 0)]),
        ([3, 4, 0], 1, [(2000, 7), (1000, 0)]),
        ([3, 0, 4], 1, [(3000, 7)]),
        ([3, 0, 0, 4], 2, [(1000, 3), (1000, 0), (1000, 0), (1000, 4)]),
        ([0, 1, 0, 1, 0, 1], 1, [(1000, 0), (5000, 3)]),
    ],
)
def test_an_event_is_a_spike_whatever_its_size(mismatched: list[int], events: int, clusters: list[object]) -> None:
    got, number = clustered(steps(mismatched))
    assert number == events
    assert [c[:2] for c in got] == clusters
    assert [c[2] for c in got] == [c[1] > 0 for c in got]


@given(st.lists(st.integers(0, STEP), min_size=1, max_size=60), st.randoms())
def test_nothing_is_lost_in_clusters(mismatched: list[int], order: random.Random) -> None:
    all_steps = steps(mismatched)
    got, events = clustered(all_steps)
    assert sum(c[0] for c in got) == STEP * len(mismatched)
    assert sum(c[1] for c in got) == sum(mismatched)
    assert sum(c[2] for c in got) == events
    one = measured(all_steps)
    order.shuffle(all_steps)
    assert measured(all_steps) == one
    assert one.low <= one.frequency <= one.high


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Spikes of random size in a tenth of the steps: 99 % intervals miss the true frequency in about 1 of 100 runs."""
    rng = random.Random(3)
    missed = 0
    for _ in range(300):
        run = [round(rng.expovariate(1 / 50)) + 1 if rng.random() < 0.1 else 0 for _ in range(400)]
        missed += not measured(steps(run, 10_000)).holds(0.1 * 51.0 / 10_000)
    assert missed <= 12


def test_elements_of_a_spike_do_not_narrow_the_interval() -> None:
    m = measured(steps([100, 0, 0, 0] * 50, 100_000))
    low, high = interval(m.mismatched, m.elements, CONFIDENCE)
    assert m.high - m.low > 5 * (high - low)


def with_classes(mismatched: dict[str, int], every: int, count: int, *, verdict: str = "mismatch") -> RunRecords:
    """A run in which each class has that many elements wrong in every so many steps."""
    records = sample_run(verdict=verdict, synthetic=True)
    example = records.steps[-1]
    made = [
        msgspec.structs.replace(
            example,
            step=n,
            classes={
                name: ClassCounts(4, 32768, 4 if n and n % every == 0 else 0, wrong if n and n % every == 0 else 0)
                for name, wrong in mismatched.items()
            },
        )
        for n in range(count + 1)
    ]
    return msgspec.structs.replace(records, steps=made, mismatches=[], faults=[])


CHECK = {(c.profile, c.workload): c for c in CHECKS}
NODE_11 = CHECK["node-11", Workload.SUBMODULE]
RIGHT = {"fwd/attn/out": 9470, "fwd/ffn/out": 737, "bwd/attn/dx": 2199, "bwd/ffn/dx": 35}
"""Of 32,768 elements, in every tenth step: node 11's frequencies."""


def test_a_frequency_is_read_back_only_with_enough_events() -> None:
    found = paper({NODE_11: with_classes(RIGHT, 10, 1500)}, quick=False)
    of_11 = [line for line in found.lines if line.node == "node 11"]
    assert [line.status for line in of_11] == ["read back"] * 4
    assert all(line.events == 150 and line.fitted for line in of_11)
    few = paper({NODE_11: with_classes(RIGHT, 10, 10 * ENOUGH_EVENTS - 1)}, quick=True)
    assert [line.status for line in few.lines if line.node == "node 11"] == ["too few events"] * 4
    assert not found.missed
    assert not few.missed


def test_what_is_not_there_is_missed() -> None:
    wrong = RIGHT | {"bwd/ffn/dx": 70}
    found = paper({NODE_11: with_classes(wrong, 10, 1500)}, quick=False)
    assert [line.quantity for line in found.missed] == ["mismatch frequency bwd/ffn"]
    clean = CHECK["node-2", Workload.SUBMODULE]
    quiet = paper({clean: with_classes(dict.fromkeys(RIGHT, 0), 10, 200, verdict="match")}, quick=False)
    assert [line.status for line in quiet.lines if line.node == "node 2"] == ["read back"] * 4
    loud = paper({clean: with_classes(RIGHT, 10, 200)}, quick=False)
    assert len(loud.missed) == 4


@pytest.mark.parametrize(
    ("found", "logged", "code"), [([3], [3], 0), ([2], [3], 1), ([], [3], 1), ([3], [], 1), ([], [], 0)]
)
def test_what_is_not_what_the_injector_logged_is_no_check_that_passed(
    found: list[int], logged: list[int], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frequencies may be read back all the same: their intervals are wide, the log is exact."""
    records = with_classes(RIGHT, 10, 1500)
    run_id = records.run.run_id
    records.mismatches = [msgspec.structs.replace(mismatch(run_id, 1), mismatched=n) for n in found]
    records.faults = [msgspec.structs.replace(fault(run_id, 1), changed=n) for n in logged]
    told = paper({NODE_11: records}, quick=False)
    assert (not told.missed, len(told.unequal)) == (True, code)
    assert ("1 run NOT EQUAL to the injector's log" in headline(told)) == bool(code)
    assert ('class="verdict v-mismatch"' in render(told)) == bool(code)
    monkeypatch.setattr("tandem.cli.paper._measure_all", lambda specs, *_, **__: dict.fromkeys(specs, records))
    monkeypatch.setattr("tandem.cli.paper.database_url", nullcontext)
    with pytest.raises(SystemExit) as stop:
        main(["paper", "--profile", "node-11", "--quick"])
    assert stop.value.code == code
    assert ("NOT EQUAL" in capsys.readouterr().out) == bool(code)


def test_an_inconclusive_run_measures_nothing() -> None:
    records = with_classes(RIGHT, 10, 1500, verdict="inconclusive")
    assert unusable(records)
    found = paper({NODE_11: records}, quick=False)
    assert not found.measured
    assert all("inconclusive" in line.why for line in found.lines if line.node == "node 11")
    assert not same(NODE_11, records, {})


@pytest.mark.parametrize(
    ("classes", "verdict", "code", "told"),
    [
        (RIGHT, "mismatch", 0, "read back"),
        (dict.fromkeys(RIGHT, 0), "match", 1, "missed"),
        (RIGHT, "inconclusive", 2, "inconclusive"),
    ],
)
def test_the_exit_code_and_the_page_tell_what_failed(
    classes: dict[str, int], verdict: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    records = with_classes(classes, 10, 1500, verdict=verdict)
    monkeypatch.setattr("tandem.cli.paper._measure_all", lambda specs, *_, **__: dict.fromkeys(specs, records))
    monkeypatch.setattr("tandem.cli.paper.database_url", nullcontext)
    with pytest.raises(SystemExit) as stop:
        main(["paper", "--profile", "node-11", "--quick", "-o", str(tmp_path / "p.html"), "--json"])
    assert stop.value.code == code
    page = (tmp_path / "p.html").read_text()
    assert "Instrument check" in page
    assert told in page
    assert ('class="verdict v-mismatch"' in page) == (code == 1)


@pytest.mark.parametrize("field", [None, "tandem", "image", "python", "jax", "jaxlib", "cpu", "faults"])
def test_a_run_of_other_code_is_not_measured_already(field: str | None) -> None:
    records = with_classes(RIGHT, 10, 1500)
    parity = here() | {"faults": load_profile(Path("node-11")).digest}
    for cpu in ({}, {"cpu": NOT_USED}):
        made = parity | cpu | ({field: "another"} if field else {})
        records.attempts = [msgspec.structs.replace(records.attempts[0], parity=made)]
        assert same(NODE_11, records, here()) == (field is None)


def noisy(worst: float, steps: int = 200) -> RunRecords:
    records = with_classes({}, 10, steps)
    rows = [
        GradientRecord(
            run_id=records.run.run_id, attempt=1, step=step, leaf="", noise=worst / step, signal=1.0, suspect=1.0,
            cosine=0.99, elements=1000, mismatched=10,
        )
        for step in (1, 2, 3)
    ]  # fmt: skip
    return msgspec.structs.replace(records, gradients=rows)


@pytest.mark.parametrize(
    ("values", "missed"),
    [((0.051, 0.037, 0.019), 0), ((0.05, 0.04, 0.02), 0), ((0.051, 0.037, 0.03), 1), ((0.03, 0.037, 0.019), 2)],
)
def test_wcnts_and_its_order(values: tuple[float, float, float], missed: int) -> None:
    names = ("node-11", "node-1", "node-4")
    done = {CHECK[name, Workload.GRADIENT]: noisy(value) for name, value in zip(names, values, strict=True)}
    found = paper(done, quick=False)
    assert len(found.missed) == missed
    assert [line.measured for line in found.lines if line.quantity == "WCNTS"] == list(values)


def test_a_shorter_run_can_show_too_large_a_wcnts_and_no_right_one() -> None:
    """Its largest ratio is that of fewer steps than the profile was fitted on."""
    short = {
        CHECK["node-11", Workload.GRADIENT]: noisy(0.051, 40),
        CHECK["node-1", Workload.GRADIENT]: noisy(0.001, 40),
    }
    short[CHECK["node-4", Workload.GRADIENT]] = noisy(0.03, 40)
    found = [line for line in paper(short, quick=False, most=40).lines if "WCNTS" in line.quantity]
    assert [line.status for line in found] == ["too few events", "too few events", "missed", "too few events"]
    assert [line.measured for line in found[:3]] == [0.051, 0.001, 0.03]
    assert "fitted on 200 steps" in found[0].why


def trained(losses: dict[int, tuple[float, float]], drifts: dict[int, float], steps: int) -> RunRecords:
    """A training whose losses (reference, suspect) are 5 and whose drift is 0 but where given."""
    records = with_classes({}, 10, steps)
    both = [losses.get(s.step, (5.0, 5.0)) for s in records.steps]
    made = [
        msgspec.structs.replace(s, loss_reference=reference, loss_suspect=suspect)
        for s, (reference, suspect) in zip(records.steps, both, strict=True)
    ]
    rows = [
        DriftRecord(
            run_id=records.run.run_id, attempt=1, step=step, arm="suspect", part="", method="exact", drift=drift,
            norm=10.0, error=0.0,
        )
        for step, drift in drifts.items()
    ]  # fmt: skip
    return msgspec.structs.replace(records, steps=made, drifts=rows)


@pytest.mark.parametrize(
    ("losses", "first", "status"),
    [
        ({43: (5.0, 9.0), 44: (5.0, 9.0)}, 43, "read back"),
        ({}, None, "missed"),
        ({20: (5.0, 9.0)}, 20, "missed"),
        ({43: (9.0, 9.0)}, 43, "missed"),
    ],
    ids=["there", "none", "too early", "on both sides"],
)
def test_node_6s_loss_spike(losses: dict[int, tuple[float, float]], first: int | None, status: str) -> None:
    check = CHECK["node-6", Workload.TRAINING]
    found = paper({check: trained(losses, {40: 0.01, 50: 2.5}, 50)}, quick=True)
    (line,) = [x for x in found.lines if x.node == "node 6" and "loss spike" in x.quantity]
    assert (line.measured, line.status, line.steps) == (first, status, 50)
    assert "drift / norm 0.25" in line.why


@pytest.mark.parametrize(("first", "status"), [(450, "read back"), (470, "read back"), (3, "missed"), (None, "missed")])
def test_node_13s_drift_begins_where_published(first: int | None, status: str) -> None:
    check = CHECK["node-13", Workload.TRAINING]
    drifts = {} if first is None else {first: 0.01, 480: 3.0}
    found = paper({check: trained({}, drifts, 480)}, quick=False)
    (line,) = [x for x in found.lines if x.node == "node 13" and "drift in training" in x.quantity]
    assert (line.published, line.measured, line.status) == (450, first, status)


def test_the_published_fine_tuning_table_is_on_the_page() -> None:
    """As the paper has it: accuracy and disagreement with the healthy run, in percent."""
    table = {
        "healthy": (90.79, None, 37.22, None), "healthy, other seed": (89.50, 6.70, 38.83, 56.75),
        "node 1": (90.53, 5.15, 36.78, 42.24), "node 6": (0.00, 100, 36.92, 36.82),
    }  # fmt: skip
    lines = {(x.node, x.quantity): x for x in paper({}, quick=True).lines}
    seen = 0
    for node, values in table.items():
        for number, value in enumerate(values):
            task, kind = (
                ("CosmosQA", "MathQA")[number // 2],
                ("accuracy", "disagreement with the healthy run")[number % 2],
            )
            line = lines.get((node, f"fine-tuning {kind} on {task}"))
            assert (line is None) == (value is None)
            if line is not None and value is not None:
                seen += 1
                assert (line.published, line.published_text, line.status) == (value, f"{value:.2f} %", "not measured")
                assert "tandem run --workload finetune" in line.why
    assert seen == sum(x.quantity.startswith("fine-tuning") for x in lines.values())


@pytest.mark.parametrize("most", [None, 1, 12, 42, 300, 10_000])
@pytest.mark.parametrize("quick", [False, True])
def test_a_run_is_cut_to_what_was_asked_or_left_out_with_its_reason(quick: bool, most: int | None) -> None:
    for check in CHECKS:
        steps, why = check.length(quick=quick, most=most), check.why_left_out(quick=quick, most=most)
        full = check.quick if quick else check.steps
        assert steps == (min(full, most or full) if min(full, most or full) >= check.least else 0)
        assert bool(why) == (steps == 0)
        if steps:
            assert check.spec(quick=quick, most=most).steps == steps
    assert "42 steps" in CHECK["node-6", Workload.SUBMODULE].why_left_out(quick=False, most=12)


def whole() -> dict[object, object]:
    done: dict[object, object] = dict.fromkeys(CHECKS, "left out of the quick check")
    done[NODE_11] = with_classes(RIGHT, 10, 1500)
    return done


def test_the_page_says_what_it_is_and_leaves_nothing_out(tmp_path: Path) -> None:
    found = paper(whole(), quick=True)  # type: ignore[arg-type]
    text, page = "\n".join(text_lines(found)), render(found)
    for words in (text, page):
        assert "Instrument check" in words
        assert "not a reproduction of the hardware" in words
        assert "fitted" in words
        assert "fine-tuning accuracy" in words
    for node in published.NODES:
        assert text.count(f"{node.name} ") >= 4
    assert headline(found).startswith("4 values read back")
    assert not re.search(r"https?://|<script|url\(", page)
    out = write(render(found), tmp_path / "p.html")
    assert out.read_text() == page
    assert json.loads(json.dumps(msgspec.to_builtins(found)))["label"] == found.label


def test_a_value_line_of_few_events_says_so() -> None:
    assert "1 event, 5 elements, 3 steps" in measured(steps([0, 5, 0])).line()
    assert Measured(0, 0, 0, 0, 0.0, 1.0).frequency == 0.0


def test_every_check_names_a_shipped_profile_and_a_spec() -> None:
    for check in CHECKS:
        assert check.spec(quick=False).steps == check.steps
        if check.quick:
            assert check.spec(quick=True).steps == check.quick


def test_an_unknown_profile_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["paper", "--profile", "node-12"])
    assert stop.value.code == 64
    assert "choose from node-1, node-2" in capsys.readouterr().err
