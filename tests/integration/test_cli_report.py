"""The reports of runs and nodes: self-contained, harmless whatever a node calls itself, and complete."""

from __future__ import annotations

import html
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import cast

import msgspec
import pytest
from sqlalchemy import Engine

from raw_runs import gradient_run, training_run
from sample_nodes import sample_node
from sample_runs import sample_run
from tandem.cli import report
from tandem.cli import run as cli
from tandem.cli.app import main
from tandem.db import profiles
from tandem.errors import RunNotFoundError, SetupError, UsageError
from tandem.nodes.profile import NodeProfile
from tandem.records import EvaluationRecord, RunRecords
from tandem.report import node_page
from tandem.report.run_page import render
from tandem.report.series import MOST, bins, thinned
from tandem.spec import RunSpec
from tandem.vocabulary import Kind, SyncMode, Workload


def with_answers(records: RunRecords) -> RunRecords:
    """Two evaluations of eight questions by three arms, of which the suspect errs more."""
    wrong = {"reference": 1, "baseline": 2, "suspect": 6}
    records.evaluations = [
        EvaluationRecord(
            run_id=records.run.run_id, attempt=1, step=step, task=f"task {q % 2}", question=f"q{q}", arm=arm,
            scores=[0.1, 0.9], chosen=int(q >= n), answer=1,
        )
        for step in (20, 40) for q in range(8) for arm, n in wrong.items()
    ]  # fmt: skip
    return records


EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}\x1b[31m\u202e"
RUNS = {
    "match": sample_run(),
    "mismatch": sample_run(rows=80, steps=30),
    "synthetic": sample_run(rows=20, synthetic=True),
    "inconclusive": sample_run(verdict="inconclusive", closed=False),
    "hostile": sample_run(rows=40, evil=EVIL),
    "gradient": gradient_run().records,
    "training": training_run().records,
    "finetune": with_answers(training_run(workload="finetune").records),
}
HOSTILE = {"runs": render(RUNS["hostile"]), "nodes": node_page.render(sample_node(evil=EVIL))}
TAME = {"runs": render(sample_run(rows=40)), "nodes": node_page.render(sample_node())}
PAGES = {
    **{name: render(records) for name, records in RUNS.items()},
    "node": TAME["nodes"],
    "clean node": node_page.render(sample_node(clean=True)),
    "hostile node": HOSTILE["nodes"],
}
VOID = {"meta", "link", "br", "img", "input", "hr"}
"""Elements of HTML without an end tag."""


@pytest.fixture(params=PAGES.values(), ids=PAGES.keys())
def text(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


class Page(HTMLParser):
    """Collects tags, and checks that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_it_needs_nothing_else(text: str) -> None:
    assert not re.search(r"https?://", text)
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in Page(text).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "form", "base")
        assert not [a for a in attributes if a.startswith("on") or a in ("src", "srcset", "xlink:href", "formaction")]
        assert (attributes.get("href") or "#").startswith("#")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_strings_stay_text(kind: str) -> None:
    text = HOSTILE[kind]
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert "{{7*7}}" in text
    assert not any(c in text for c in "\x1b\u202e")
    assert [tag for tag, _ in Page(text).tags] == [tag for tag, _ in Page(TAME[kind]).tags]


def test_every_chart_has_a_name_and_its_data_as_a_table(text: str) -> None:
    page = Page(text)
    charts = [a for tag, a in page.tags if tag == "svg"]
    assert all(a.get("aria-label") and a.get("role") == "img" for a in charts)
    assert sum(tag == "figure" for tag, _ in page.tags) == len(charts)
    for figure in re.findall(r"<figure>.*?</figure>", text, re.DOTALL):
        assert figure.count("<svg") == figure.count("<details>") == 1
        assert figure.count("<tr>") > 1
    assert len({a["aria-label"] for a in charts}) == len(charts)


def test_links_lead_somewhere_and_ids_are_unique(text: str) -> None:
    tags = Page(text).tags
    names = [a["id"] for _, a in tags if "id" in a]
    assert len(names) == len(set(names))
    assert {(a["href"] or "").removeprefix("#") for tag, a in tags if tag == "a"} <= set(names)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_question_is_answered_first(name: str) -> None:
    page, run = Page(PAGES[name]), RUNS[name].run
    words = " ".join(page.text)
    assert words.index(str(run.verdict)) < words.index("Pair and parity")
    assert sum(tag == "h1" for tag, _ in page.tags) == 1
    for part in ("Pair and parity", "Controls", "What was not checked", "How to repeat it"):
        assert part in words


PARTS = {
    "submodule": {"published node 11", "Over steps", "Frequency table"},
    "gradient": {"Gradient noise", "published node 11", "WCNTS"},
    "training": {"Losses over steps", "Drift of the parameters"},
    "finetune": {"Losses over steps", "Drift of the parameters", "Accuracy and disagreement"},
}
"""What only the pages of a workload have."""


@pytest.mark.parametrize("name", ["mismatch", "gradient", "training", "finetune"])
def test_parts_appear_only_for_the_workload_that_has_them(name: str) -> None:
    mine = PARTS[RUNS[name].run.workload]
    assert {part for parts in PARTS.values() for part in parts if part in PAGES[name]} == mine


def test_a_node_is_answered_in_the_order_of_its_questions() -> None:
    words = " ".join(Page(PAGES["node"]).text)
    order = ["corrupting: reproduced", "Rule: reproduced", "nothing but patience", "Devices", "By site and rank",
             "Burstiness", "Differing bits", "Severity", "Gradient noise", "Drift by", "not counted", "new board",
             "Other temperatures"]  # fmt: skip
    order.remove("Drift by")
    places = [words.index(part) for part in order]
    assert places == sorted(places)
    clean = " ".join(Page(PAGES["clean node"]).text)
    assert "of steps is excluded" in clean


def test_ten_first_mismatches_in_full() -> None:
    assert PAGES["mismatch"].count("<dt>first index</dt>") == 10


SPECS = [
    RunSpec(),
    RunSpec(kind=Kind.NULL, model="small", tp=4, steps=500, seed=2**62, sync=SyncMode.FULL, duration=0.5),
    RunSpec(duration=9, data=[Path("/a b.txt"), Path("/'\"\u202e\n: - #")], weights=Path("/w"), tokenizer=Path("/t")),
    RunSpec(
        fault=Path("/f.toml"), window=7, replays=1, replay_budget=0, self_replays=2, row_cap=9, step_timeout=1e-7,
        peer_timeout=3, batch=1, sequence=8, compute="float32", accumulate="compute", kind=Kind.SWAP,
        optimizer={"learning_rate": 1e-9, "clip_norm": None, "schedule": "constant"},
    ),
    RunSpec(workload=Workload.GRADIENT, exchange_mib=3, steps=9),
    RunSpec(
        workload=Workload.TRAINING, exact_every=7, exact_mib=0, baseline="seed", checkpoints=Path("/c"), resume=True,
        checkpoint_every=5, start=Path("/c/reference/5"),
    ),
    RunSpec(
        workload=Workload.FINETUNE, questions=[Path("/q 1.jsonl"), Path("/q2.jsonl")], held_out_percent=33,
        scoring="letter", packed=True, evaluate_every=4, tokenizer=Path("/t"), weights=Path("/w"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_how_to_repeat_it_asks_for_the_same_run(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command and the file on the page, given to the real command line, are the same spec."""
    records = sample_run()
    stored = json.loads(json.dumps(spec.model_dump(mode="json")))
    records.run = msgspec.structs.replace(records.run, spec=stored)
    command, text = re.findall(r"<h3>(?:Command|spec\.yaml)</h3><pre>(.*?)</pre>", render(records), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(html.unescape(text))
    asked: list[RunSpec] = []

    def execute(spec: RunSpec, *_: object, **__: object) -> RunRecords:
        asked.append(spec)
        raise SetupError("not run here")

    monkeypatch.setattr(cli, "execute", execute)
    tandem, *arguments = shlex.split(html.unescape(command))
    with pytest.raises(SystemExit):
        main(arguments)
    assert (tandem, asked) == ("tandem", [spec])


def test_paths_of_a_spec_mean_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text("data: [a.txt, /b.txt]\nfault: f.toml")
    (tmp_path / "f.toml").touch()
    spec = cli.read_spec(Path("spec.yaml"), {"weights": Path("w"), "tokenizer": Path("../t.json")})
    paths = [*spec.data, spec.fault, spec.weights, spec.tokenizer]
    assert all(path is not None and path.is_absolute() for path in paths)
    assert spec.data == [tmp_path / "a.txt", Path("/b.txt")]
    monkeypatch.chdir("/")
    assert cli.read_spec(None, {"data": spec.data}).data == spec.data


def test_a_long_run_stays_a_small_page() -> None:
    points = [(step, 1000, step % 97 == 0) for step in range(1, 100_001)]
    data = bins([(s, n, int(m)) for s, n, m in points])
    assert len(data) <= 180
    assert sum(b.elements for b in data) == 100_000 * 1000
    assert sum(b.mismatched for b in data) == sum(m for *_, m in points)
    losses = [(step, 5 - step / 1e5 + (9 if step == 77_777 else 0)) for step, *_ in points]
    shown = thinned(losses)
    assert len(shown) <= MOST
    assert set(shown) <= set(losses)
    assert shown == sorted(shown)
    assert {losses[0], losses[-1], losses[77_776]} <= set(shown)


def test_a_page_can_be_made_of_an_empty_run() -> None:
    records = sample_run()
    for name in ("attempts", "steps", "controls", "closings"):
        getattr(records, name).clear()
    records.run = records.run.__class__(
        **{f: getattr(records.run, f) for f in records.run.__struct_fields__ if f not in ("verdict", "sentence")}
    )
    assert "No step was compared." in render(records)


# -- the command ---------------------------------------------------------------------------------------


def test_a_name_is_a_run_or_else_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that no run has are a node's; only one that could be neither is refused, with both reasons."""
    run = RUNS["match"]

    def one_run(_: object, name: str) -> RunRecords:
        if name == "last" or str(run.run.run_id).startswith(name):
            return run
        raise RunNotFoundError(f"no run begins with {name}: list them with `tandem runs`")

    def one_node(_: object, name: str) -> NodeProfile:
        if name == "bad-1":
            return sample_node()
        raise UsageError(f"no run names a node {name}: list the nodes with `tandem nodes`")

    monkeypatch.setattr(report, "load", one_run)
    monkeypatch.setattr(profiles, "load_node", one_node)
    engine = cast(Engine, None)
    assert report.find(engine, "last") is report.find(engine, str(run.run.run_id)[:8]) is run
    assert report.find(engine, "bad-1") == sample_node()
    with pytest.raises(UsageError, match=r"no run names a node deadbeef.*no run begins with deadbeef"):
        report.find(engine, "deadbeef")
    with pytest.raises(UsageError, match=r"no run names a node rack-7: list the nodes with `tandem nodes`$"):
        report.find(engine, "rack-7")
