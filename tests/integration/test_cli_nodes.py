"""`tandem nodes`, `node` and `verdict`, against a real database: exit codes, text, JSON, one-line errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from db_samples import scalar
from node_runs import BEGAN, HOUR, drift, gradient, node_run, store_run
from tandem.cli.app import main
from tandem.db.profiles import load_node
from tandem.nodes.as_json import to_json

Tandem = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tandem(database_url: str, capfd: pytest.CaptureFixture[str]) -> Tandem:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--db", database_url])
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture
def fleet(engine: Engine) -> list[str]:
    """A corrupting, a suspected, a clean and an untested node; ids of the runs."""
    runs = [
        node_run(kind="null", suspect="well-1", reference="well-2"),
        node_run(hits={3: 5}, began=BEGAN + HOUR),
        node_run(hits={4: 6}, reference="other", began=BEGAN + 2 * HOUR),
        node_run(suspect="odd\x1b[31m", hits={2: 1}, began=BEGAN + HOUR),
        node_run(suspect="fine", began=BEGAN + HOUR, hours=4),
        node_run(
            suspect="fine", workload="gradient", began=BEGAN + 2 * HOUR, hours=4, gradients=[gradient(1, 0.0, 1.0)]
        ),
        node_run(suspect="fine", workload="training", began=BEGAN + 3 * HOUR, drifts=[drift(1, 0.0)]),
    ]
    return [str(store_run(engine, records)) for records in runs]


def test_the_list_of_nodes(tandem: Tandem, fleet: list[str]) -> None:
    code, out, err = tandem("nodes")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "1 corrupting, 1 suspected, 1 clean, 4 unknown, 0 in test"
    assert [line.split()[0] for line in lines[3:]] == [
        "sick", "odd\\u001b[31m", "well-1", "fine", "healthy", "other", "well-2",
    ]  # fmt: skip
    assert "rank 1, fwd/attn, 6.9e-5, transient, 2 references" in lines[3] or "2 references" in lines[3]
    code, out, _ = tandem("nodes", "--json")
    found = json.loads(out)
    assert found["counts"] == {"corrupting": 1, "suspected": 1, "clean": 1, "unknown": 4, "in_test": 0}
    assert found["nodes"][0]["node"] == "sick"
    assert found["nodes"][0]["references"] == ["healthy", "other"]


@pytest.mark.parametrize(
    ("node", "code", "sentence"),
    [
        ("sick", 1, "corrupting: reproduced with 2 references (healthy, other)"),
        ("odd\x1b[31m", 1, "suspected: a mismatch"),
        ("fine", 0, "clean: nothing differed in 3 runs over 30 steps"),
        ("healthy", 2, "unknown: no run on two hosts has tested it"),
    ],
)
def test_the_page_of_a_node_and_its_exit_code(
    tandem: Tandem, fleet: list[str], engine: Engine, node: str, code: int, sentence: str
) -> None:
    found, out, err = tandem("node", node)
    assert (found, err) == (code, "")
    assert out.startswith(sentence)
    assert "\x1b" not in out
    found, out, _ = tandem("node", node, "--json")
    assert found == code
    profile = to_json(load_node(engine, node))
    assert json.loads(out) == json.loads(json.dumps(profile))


def test_the_documented_json_keys_are_the_real_ones(tandem: Tandem, fleet: list[str]) -> None:
    def documented(heading: str) -> str:
        text = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
        return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]

    rows = re.findall(r"^\| (`[^|]*) \|(.*)\|$", documented("A node"), re.MULTILINE)
    shown = json.loads(tandem("node", "sick", "--json")[1])
    assert {key for keys, _ in rows for key in re.findall(r"`(\w+)`", keys)} == set(shown)
    told = {key: set(re.findall(r"`(\w+)`", text)) for keys, text in rows for key in re.findall(r"`(\w+)`", keys)}
    for name in ("classes", "devices", "runs", "layer_map", "severities"):
        assert set(shown[name][0]) <= told[name], name
    listed = json.loads(tandem("nodes", "--json")[1])
    assert set(listed["nodes"][0]) <= set(re.findall(r"`(\w+)`", documented("Nodes")))
    verdict = json.loads(tandem("verdict", fleet[1], "--json")[1])
    words = set(re.findall(r"`(\w+)`", documented("A verdict computed again")))
    assert set(verdict) | set(verdict["statistics"]) | set(verdict["statistics"]["classes"][0]) <= words
    assert set(verdict["statistics"]["timing"]) | set(verdict["statistics"]["per_step"]) <= words


def test_a_person_clears_a_node(tandem: Tandem, fleet: list[str], engine: Engine) -> None:
    code, out, err = tandem("node", "sick", "clear", "--reason", "board replaced", "--by", "ana")
    assert (code, err) == (0, "")
    assert out.startswith("recorded: sick is cleared; it was corrupting before\nunknown: cleared by ana")
    assert "board replaced" in out
    assert tandem("node", "sick")[0] == 2
    with engine.connect() as conn:
        row = conn.execute(text("SELECT node, decision, reason, decided_by FROM node_decisions")).one()
    assert tuple(row) == ("sick", "cleared", "board replaced", "ana")
    code, out, _ = tandem("node", "odd\x1b[31m", "clear", "--reason", "why", "--json")
    assert code == 0
    assert json.loads(out)["decisions"][0]["decided_by"]  # the user of this machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "no run names a node nobody"),
        (["sick", "clear"], "a decision needs a reason"),
        (["sick", "clear", "--reason", " "], "a decision needs a reason"),
        (["sick", "clear", "--reason", "r", "--by", ""], "a decision needs a reason and a name"),
        (["sick", "--reason", "r"], "belong to a decision"),
        (["sick", "burn"], "'burn' is not"),
        (["fine", "clear", "--reason", "r"], "there is nothing to clear: node fine is clean"),
        (["nobody", "clear", "--reason", "r"], "no run names a node nobody"),
    ],
)
def test_wrong_usage_is_one_line(
    tandem: Tandem, fleet: list[str], engine: Engine, arguments: list[str], message: str
) -> None:
    code, out, err = tandem("node", *arguments)
    assert (code, out) == (64, "")
    assert message in err
    assert err.count("\n") == 1
    assert scalar(engine, "SELECT count(*) FROM node_decisions") == 0


def test_no_runs_yet(tandem: Tandem) -> None:
    code, out, _ = tandem("nodes")
    assert (code, out.strip()) == (0, "no real run of two hosts is stored yet: start one with `tandem pair NODE`")
    assert json.loads(tandem("nodes", "--json")[1])["nodes"] == []


def test_a_verdict_is_computed_again(tandem: Tandem, fleet: list[str], engine: Engine) -> None:
    clean, found, gradients, training = fleet[4], fleet[1], fleet[5], fleet[6]
    code, out, err = tandem("verdict", clean)
    assert (code, err) == (0, "")
    assert out.startswith("match: 0 of")
    code, out, err = tandem("verdict", found)
    assert (code, err) == (1, "")
    assert "first at step 3" in out
    assert "fwd/attn/out" in out
    told = json.loads(tandem("verdict", found, "--json")[1])
    assert (told["verdict"], told["stored_verdict"], told["agrees"]) == ("mismatch", "mismatch", True)
    out_class = next(c for c in told["statistics"]["classes"] if c["class"] == "fwd/attn/out")
    assert (out_class["affected_steps"], out_class["per_step"]["value"]) == (1, 0.1)
    assert out_class["per_element"]["low"] < 5 / 80_000 < out_class["per_element"]["high"]
    assert told["statistics"]["timing"]["onset"] == 3
    assert "WCNTS 0" in tandem("verdict", gradients)[1]
    assert "suspect: no drift" in tandem("verdict", training)[1]


def test_a_stored_verdict_that_the_rows_no_longer_carry_is_told(
    tandem: Tandem, fleet: list[str], engine: Engine
) -> None:
    with engine.begin() as conn:
        conn.execute(text("DELETE FROM controls WHERE run_id = :r AND name = 'positive_end'"), {"r": fleet[4]})
    code, out, err = tandem("verdict", fleet[4])
    assert code == 2
    assert out.startswith("inconclusive")
    assert "note: stored is match (completed)" in err
    with engine.begin() as conn:
        conn.execute(text("UPDATE runs SET records_dropped_at = now()"))
    code, out, err = tandem("verdict", fleet[4])
    assert (code, out) == (2, "")
    assert "dropped by retention: its verdict (match) stands" in err
