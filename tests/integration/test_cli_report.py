"""The run report: self-contained, harmless whatever a node calls itself, and complete."""

from __future__ import annotations

import html
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from sample_runs import sample_run
from tandem.cli import run as cli
from tandem.cli.app import main
from tandem.errors import SetupError
from tandem.records import RunRecords
from tandem.report.page import render
from tandem.report.svg import bins, frequency_chart
from tandem.spec import RunSpec
from tandem.vocabulary import Kind, SyncMode

EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}\x1b[31m\u202e"
RUNS = {
    "match": sample_run(),
    "mismatch": sample_run(rows=80, steps=30),
    "synthetic": sample_run(rows=20, synthetic=True),
    "inconclusive": sample_run(verdict="inconclusive", closed=False),
    "hostile": sample_run(rows=40, evil=EVIL),
}
VOID = {"meta", "link", "br", "img", "input", "hr"}
"""Elements of HTML without an end tag."""


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


@pytest.fixture(params=RUNS.values(), ids=RUNS.keys())
def records(request: pytest.FixtureRequest) -> RunRecords:
    value: RunRecords = request.param
    return value


def test_it_needs_nothing_else(records: RunRecords) -> None:
    text = render(records)
    assert not re.search(r"https?://", text)
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in Page(text).tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "form", "base")
        assert not [a for a in attributes if a.startswith("on") or a in ("src", "srcset", "xlink:href", "formaction")]
        assert (attributes.get("href") or "#").startswith("#")


def test_hostile_strings_stay_text() -> None:
    text = render(RUNS["hostile"])
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert "{{7*7}}" in text
    assert not any(c in text for c in "\x1b\u202e")
    clean = Page(render(sample_run(rows=40)))
    assert [tag for tag, _ in Page(text).tags] == [tag for tag, _ in clean.tags]


def test_every_chart_has_a_name_and_its_data_as_a_table(records: RunRecords) -> None:
    text = render(records)
    page = Page(text)
    charts = [a for tag, a in page.tags if tag == "svg"]
    assert all(a.get("aria-label") and a.get("role") == "img" for a in charts)
    assert sum(tag == "details" for tag, _ in page.tags) >= len(charts)


def test_links_lead_somewhere_and_ids_are_unique(records: RunRecords) -> None:
    tags = Page(render(records)).tags
    names = [a["id"] for _, a in tags if "id" in a]
    assert len(names) == len(set(names))
    assert {(a["href"] or "").removeprefix("#") for tag, a in tags if tag == "a"} <= set(names)


def test_the_first_question_is_answered_first(records: RunRecords) -> None:
    page = Page(render(records))
    words = " ".join(page.text)
    assert words.index(str(records.run.verdict)) < words.index("Pair and parity")
    assert sum(tag == "h1" for tag, _ in page.tags) == 1
    for part in ("Pair and parity", "Controls", "What was not checked", "How to repeat it", "published node 11"):
        assert part in words


def test_ten_first_mismatches_in_full() -> None:
    text = render(RUNS["mismatch"])
    assert text.count("<dt>first index</dt>") == 10


SPECS = [
    RunSpec(),
    RunSpec(kind=Kind.NULL, model="small", tp=4, steps=500, seed=2**62, sync=SyncMode.FULL, duration=0.5),
    RunSpec(duration=9, data=[Path("/a b.txt"), Path("/'\"\u202e\n: - #")], weights=Path("/w"), tokenizer=Path("/t")),
    RunSpec(
        fault=Path("/f.toml"), window=7, replays=1, replay_budget=0, self_replays=2, row_cap=9, step_timeout=1e-7,
        peer_timeout=3, batch=1, sequence=8, compute="float32", accumulate="compute", kind=Kind.SWAP,
        optimizer={"learning_rate": 1e-9, "clip_norm": None, "schedule": "constant"},
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
    assert len(frequency_chart(data, "x")) < 100_000


def test_a_page_can_be_made_of_an_empty_run() -> None:
    records = sample_run()
    for name in ("attempts", "steps", "controls", "closings"):
        getattr(records, name).clear()
    records.run = records.run.__class__(
        **{f: getattr(records.run, f) for f in records.run.__struct_fields__ if f not in ("verdict", "sentence")}
    )
    assert "No step was compared." in render(records)
