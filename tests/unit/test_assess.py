"""The next run of a node's assessment, as a table and as a whole procedure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from node_runs import BEGAN, node_run
from tandem.cli import assess
from tandem.cli.app import main
from tandem.cli.assess import duration
from tandem.cli.pair import is_generated, pairrun_spec
from tandem.cli.rehearsal import counts
from tandem.errors import UsageError
from tandem.installed import here
from tandem.nodes.assess import PATIENCE, Ended, Wanted, next_run
from tandem.nodes.verdict import NodeDecision, NodeRules, NullPass, RunFacts
from tandem.spec import RunSpec
from tandem.vocabulary import CLEARED, Kind, Workload

MODEL = "small"
RULES = NodeRules(device_hours=0.5)
Outcome = Callable[[Wanted, int], str]


def run(number: int, workload: str, verdict: str = "match", **more: Any) -> RunFacts:
    fields: dict[str, Any] = {
        "run_id": UUID(int=number), "workload": workload, "kind": "suspect", "model": MODEL, "reference": "well-1",
        "suspect": "sick", "created_at": float(number), "finished_at": number + 0.5, "verdict": verdict,
        "reason": "completed" if verdict != "inconclusive" else "hung", "executables": f"exe-{workload}",
        "comparable": True, "findings": int(verdict == "mismatch"), "steps": 100, "elements": 1000,
        "device_hours": 1.0, "devices": ("gpu:0", "gpu:1"), "device_count": 2,
    }  # fmt: skip
    return RunFacts(**fields | more)


def null(workload: str) -> NullPass:
    return NullPass(f"exe-{workload}", "well-1", "well-2", 1.0, workload, MODEL)


NULLS = [null("submodule"), null("gradient")]
CASES: list[tuple[str, list[RunFacts], list[NullPass], tuple[Kind, Workload] | str]] = [
    ("nothing yet", [], [], (Kind.NULL, Workload.SUBMODULE)),
    ("a control", [], NULLS[:1], (Kind.SUSPECT, Workload.SUBMODULE)),
    ("another model's run", [run(1, "submodule", model="tiny")], NULLS, (Kind.SUSPECT, Workload.SUBMODULE)),
    ("as a reference only", [run(1, "submodule", suspect="x", reference="sick")], NULLS,
     (Kind.SUSPECT, Workload.SUBMODULE)),
    ("RQ1 done", [run(1, "submodule")], NULLS[:1], (Kind.NULL, Workload.GRADIENT)),
    ("RQ1 done, controls too", [run(1, "submodule")], NULLS, (Kind.SUSPECT, Workload.GRADIENT)),
    ("other executables than the control's", [run(1, "submodule", executables="new")], NULLS,
     (Kind.NULL, Workload.SUBMODULE)),
    ("a finding", [run(1, "submodule", "mismatch")], NULLS, (Kind.SWAP, Workload.SUBMODULE)),
    ("reproduced", [run(1, "submodule", "mismatch"), run(2, "submodule", "mismatch", kind="swap", reference="well-3")],
     NULLS, "corrupting"),
    ("one inconclusive", [run(1, "submodule", "inconclusive", findings=0)], NULLS, (Kind.SUSPECT, Workload.SUBMODULE)),
    ("inconclusive again and again", [run(n, "submodule", "inconclusive", findings=0) for n in range(1, 1 + PATIENCE)],
     NULLS, "mend that first"),
    ("not reproduced", [run(1, "submodule", "mismatch"),
                        *(run(n, "submodule", kind="swap", reference="well-3") for n in (2, 3)),
                        run(4, "gradient")], NULLS, "did not reproduce"),
    ("both done, more hours", [run(1, "submodule", device_hours=0.3), run(2, "gradient", device_hours=0.2)], NULLS,
     (Kind.SUSPECT, Workload.GRADIENT)),
    ("both done, executables of the finding without a control",
     [run(1, "submodule"), run(2, "submodule", "mismatch", executables="new")], NULLS, (Kind.NULL, Workload.SUBMODULE)),
    ("a control in which the node itself took part", [], [NullPass("exe", "sick", "x", 1.0, "submodule", MODEL)],
     (Kind.NULL, Workload.SUBMODULE)),
    ("covered", [run(1, "submodule"), run(2, "gradient")], NULLS, "clean"),
]  # fmt: skip


@pytest.mark.parametrize(("runs", "nulls", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_next(runs: list[RunFacts], nulls: list[NullPass], wanted: tuple[Kind, Workload] | str) -> None:
    found = next_run("sick", MODEL, runs, nulls, rules=RULES)
    if isinstance(wanted, str):
        assert isinstance(found, Ended)
        assert wanted in found.why
    else:
        assert isinstance(found, Wanted), found
        assert (found.kind, found.workload) == wanted


def test_a_reference_that_differed_from_itself_makes_nobody_corrupting() -> None:
    """As in the node's profile: with it, two references are one."""
    runs = [run(1, "submodule", "mismatch"), run(2, "submodule", "mismatch", kind="swap", reference="well-3")]
    found = next_run("sick", MODEL, runs, NULLS, rules=RULES, unsteady={"well-3": float("inf")})
    assert not (isinstance(found, Ended) and "corrupting" in found.why)


def test_a_model_that_clears_no_node_is_not_run_for_ever() -> None:
    runs = [run(1, "submodule", model="tiny"), run(2, "gradient", model="tiny")]
    found = next_run("sick", "tiny", runs, NULLS, rules=RULES)
    assert isinstance(found, Ended)
    assert "too small" in found.why


FEW = {"device_count": 8}


@pytest.mark.parametrize(
    ("runs", "ends"),
    [
        ([run(1, "submodule", **FEW), run(2, "gradient", **FEW)], True),
        ([run(1, "submodule", **FEW, device_hours=0.2), run(2, "gradient", **FEW, device_hours=0.2)], False),
        ([run(1, "submodule", **FEW), run(2, "gradient", **FEW, devices=("gpu:2", "gpu:3"))], False),
        ([run(1, "submodule", **FEW), run(2, "gradient", **FEW, devices=tuple(f"gpu:{n}" for n in range(8)))], False),
    ],
    ids=["again the same devices", "too few hours", "other devices each time", "all, not for long enough"],
)
def test_devices_that_no_run_reaches_are_not_waited_for(runs: list[RunFacts], ends: bool) -> None:
    """A run that covers what the ones before it covered brings the node no nearer to its verdict."""
    found = next_run("sick", MODEL, runs, NULLS, rules=RULES)
    if ends:
        assert isinstance(found, Ended)
        assert "6 of its 8 devices" in found.why
        assert "gpu:0, gpu:1" in found.why
    else:
        assert isinstance(found, Wanted)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("assess-node-1-bcdfg", True),
        ("assess-node-1-b-bcdfg", False),
        ("assess-node-1-aeiou", False),
        ("node-1-bcdfg", False),
    ],
)
def test_another_nodes_assessment_is_not_taken_for_this_ones(name: str, ours: bool) -> None:
    assert is_generated(name, "assess-node-1") is ours


def test_what_was_before_a_persons_decision_is_run_again() -> None:
    runs = [run(1, "submodule"), run(2, "gradient")]
    cleared = NodeDecision(CLEARED, "new board", "me", 10.0)
    found = next_run("sick", MODEL, runs, NULLS, [cleared], rules=RULES)
    assert isinstance(found, Wanted)
    assert (found.kind, found.workload) == (Kind.SUSPECT, Workload.SUBMODULE)


def test_a_control_that_stays_inconclusive_ends_it() -> None:
    others = [run(n, "submodule", "inconclusive", kind="null", suspect="well-1", reference="well-2") for n in (1, 2)]
    found = next_run("sick", MODEL, [], [], rules=RULES, others=others)
    assert isinstance(found, Ended)


@pytest.mark.parametrize(
    ("outcome", "ends", "kinds"),
    [
        (lambda *_: "match", "clean", ["null", "suspect", "null", "suspect", "suspect"]),
        (lambda w, _: "match" if w.kind is Kind.NULL else "mismatch", "corrupting", ["null", "suspect", "swap"]),
        (lambda *_: "inconclusive", "mend that first", ["null", "null"]),
    ],
    ids=["healthy", "bad", "broken set-up"],
)
def test_the_whole_procedure_ends(outcome: Outcome, ends: str, kinds: list[str]) -> None:
    """Each step follows from what is stored alone: run what is wanted, store it, ask again."""
    runs: list[RunFacts] = []
    others: list[RunFacts] = []
    nulls: list[NullPass] = []
    made = []
    for number in range(1, 20):
        wanted = next_run("sick", MODEL, runs, nulls, rules=RULES, others=others)
        if isinstance(wanted, Ended):
            assert ends in wanted.why
            break
        made.append(str(wanted.kind))
        verdict = outcome(wanted, number)
        if wanted.kind is Kind.NULL:
            others.append(run(number, wanted.workload, verdict, kind="null", suspect="well-1", reference="well-2"))
            nulls += [null(wanted.workload)] if verdict == "match" else []
        else:
            reference = "well-3" if wanted.kind is Kind.SWAP else "well-1"
            runs.append(
                run(number, wanted.workload, verdict, kind=str(wanted.kind), reference=reference, device_hours=0.4)
            )
    else:
        pytest.fail(f"it never ends: {made}")
    assert made == kinds


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("90m", 5400), ("4h", 14400), ("2d", 172800), ("1.5h", 5400)]
)
def test_times(text: str, seconds: float) -> None:
    assert duration(text, "--for") == seconds


@pytest.mark.parametrize("text", ["", "4", "h", "-4h", "4 hours", "0s", "nanh"])
def test_no_times(text: str) -> None:
    with pytest.raises(UsageError, match="--for"):
        duration(text, "--for")


@pytest.mark.parametrize(("more", "tp"), [([], None), (["--tp", "4"], 4)])
def test_an_assessment_in_a_cluster_asks_for_no_tp_that_was_not_given(
    monkeypatch: pytest.MonkeyPatch, more: list[str], tp: int | None
) -> None:
    """A number of ranks that nobody asked for would keep it off every node with another number of devices."""
    specs: list[dict[str, Any]] = []

    def made(node: str, asked: dict[str, Any], *_: object) -> Callable[[Wanted, int], None]:
        specs.append(pairrun_spec(Kind.SUSPECT, node, None, asked))
        return lambda wanted, seconds: None

    monkeypatch.setattr(assess, "_pair_runner", made)
    monkeypatch.setattr(assess, "_cluster", lambda *_, **__: 0)
    with pytest.raises(SystemExit) as end:
        main(["assess", "node-1", "--db", "postgresql://h/d", *more])
    assert end.value.code == 0
    assert [spec["workload"].get("tp") for spec in specs] == [tp]


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (["--out", "x.html"], "leave --out out"),
        (["--namespace", "tandem"], "leave --namespace out"),
        (["--context", "c"], "leave --context out"),
        (["--kubeconfig", "f"], "leave --kubeconfig out"),
        (["node-1"], "or give --local"),
    ],
)
def test_a_rehearsal_ignores_nothing_that_was_asked(
    capsys: pytest.CaptureFixture[str], words: list[str], mend: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["assess", "--local", *words])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (64, "", 1)
    assert mend in err


@pytest.mark.parametrize(
    ("run_changed", "attempt_changed", "as_good"),
    [
        ({}, {}, True),
        ({"verdict": "mismatch"}, {}, True),
        ({"verdict": "inconclusive"}, {}, False),
        ({"created_at": BEGAN - 90_000}, {}, False),
        ({"spec": RunSpec(duration=3).model_dump(mode="json")}, {}, False),
        ({}, {"reason": "stopped"}, False),
        ({}, {"parity": {}}, False),
        *(({}, {"parity": here() | {field: "another"}}, False) for field in here()),
    ],
    ids=str,
)
def test_a_rehearsal_takes_an_earlier_run_only_of_this_code_and_to_its_end(
    run_changed: dict[str, Any], attempt_changed: dict[str, Any], as_good: bool
) -> None:
    spec = RunSpec(duration=2)
    records = node_run()
    run = {"spec": spec.model_dump(mode="json"), "verdict": "match", "created_at": BEGAN} | run_changed
    attempt = {"parity": here(), "reason": "completed"} | attempt_changed
    records.run = replace(records.run, **run)
    records.attempts = [replace(records.attempts[0], **attempt)]
    assert counts(records, spec, here(), BEGAN + 60) == as_good
    records.attempts = []
    assert not counts(records, spec, here(), BEGAN + 60)
