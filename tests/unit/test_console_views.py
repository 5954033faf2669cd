"""What the console says of a run and of the fleet, from what the REST API answers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem_api.console import build, views
from tandem_api.console.shell import own_path

AT = 1_790_000_000.0
STORED: dict[str, Any] = {
    "verdict": None, "reason": "", "sentence": "", "created_at": AT, "finished_at": None, "workload": "submodule",
    "kind": "suspect", "model": "small", "synthetic": False, "suspect_node": "gpu-17", "reference_node": "gpu-3",
    "spec": {"steps": 2000, "tp": 2},
    "progress": {
        "attempt": 1, "step": 412, "sites_compared": 1_300_000, "elements_compared": 420_000_000_000,
        "mismatched_sites": 17, "mismatched_elements": 1204, "other_findings": 2,
        "first_mismatch": {"attempt": 1, "step": 96, "site": "fwd/attn layer 3 out", "rank": 1, "mismatched": None},
    },
}  # fmt: skip
LAUNCH: dict[str, Any] = {
    "state": "running", "reason": "", "message": "", "kind": "suspect", "workload": "submodule", "model": "small",
    "node": None, "reference": None, "spec": {}, "conditions": [], "progress": None, "synthetic": False,
}  # fmt: skip


def test_a_run_that_goes_on() -> None:
    told = {"phase": "step", "step": 413, "steps_per_s": 3.1, "eta_s": 500.0, "link_bytes": 2, "full_bytes": 10_000,
            "window_used": 5, "window_limit": 8, "controls": {"parity": "ok"}, "records_put": 10}  # fmt: skip
    now = views.now({"state": "running", "stored": STORED, "launch": LAUNCH | {"progress": told}}, AT + 60)
    assert now.headline == "running: step 413 of 2,000; 17 mismatching tensors so far"
    assert now.title == "suspect pair · gpu-17 against gpu-3 · submodule · small · TP 2"
    facts = {what: (number, more) for number, what, more in now.facts}
    assert facts["steps a second"] == ("3.1", "about 8 min left")
    assert facts["elements compared"][0] == "4.2e11"
    assert facts["since it began"][0] == "60 s"
    lines = dict(now.lines)
    assert lines["first mismatch"] == "attempt 1, step 96, fwd/attn layer 3 out, rank 1: tensor never received"
    assert lines["link"] == "2 B, 0.02 % of full exchange"
    assert lines["window"] == "5 of 8 unconfirmed sites"
    assert lines["records"] == "0 of 10 stored"
    assert now.place == "1.412.1000000", "the stream goes on behind what is shown"
    assert not now.over


def test_a_run_of_a_cluster_tells_its_rate_from_what_is_stored() -> None:
    """Its launcher knows nothing of steps; a supervisor on this machine, which does, goes first."""
    answer = lambda state, told=None, **more: {
        "state": state, "launch": LAUNCH | {"progress": told}, "stored": STORED | more | {
            "progress": STORED["progress"] | {"steps_per_s": 4.0}
        },
    }  # fmt: skip
    rate = lambda found: next(((n, more) for n, what, more in found.facts if what == "steps a second"), None)
    assert rate(views.now(answer("running"), AT)) == ("4", "about 7 min left")
    assert rate(views.now(answer("running", spec={"duration": 60}), AT)) == ("4", "")
    assert rate(views.now(answer("running", {"steps_per_s": 2.0, "eta_s": 60.0}), AT)) == ("2", "about 60 s left")
    assert rate(views.now(answer("finished", verdict="match", sentence="match"), AT)) is None


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        ({"state": "finished", "stored": STORED | {"verdict": "match", "sentence": "match: 0 of 4"}, "launch": None},
         "match", "match: 0 of 4"),
        ({"state": "failed", "stored": None, "launch": LAUNCH | {"message": "no such file"}}, "failed",
         "not run: no such file"),
        ({"state": "pending", "stored": None, "launch": LAUNCH | {"reason": "NoReference"}}, None,
         "waiting: NoReference"),
        ({"state": "running", "stored": None, "launch": LAUNCH | {"progress": {"phase": "compiling 3/14"}}}, None,
         "running: compiling 3/14; no mismatch so far"),
        ({"state": "running", "stored": None, "launch": LAUNCH | {"spec": {"workload": {"steps": 9, "tp": 4}}}}, None,
         "running: starting; no mismatch so far"),
    ],
)  # fmt: skip
def test_other_states(answer: dict[str, Any], verdict: str | None, words: str) -> None:
    now = views.now(answer, AT)
    assert (now.verdict, now.headline) == (verdict, words)
    assert now.over == (verdict is not None)


def test_the_fleet_in_every_order() -> None:
    lines = [
        {"node": name, "since": since, "last_run_at": last}
        for name, since, last in (("c", 5.0, 1.0), ("a", None, 3.0), ("b", 2.0, None))
    ]
    order = lambda sort: "".join(line["node"] for line in views.sorted_fleet(lines, sort))
    assert [order(sort) for sort in views.SORTS] == ["cab", "abc", "bca", "acb"]


def test_a_clean_node_shows_its_bound_instead_of_evidence() -> None:
    line = {"evidence": "", "verdict": "clean", "sentence": "clean: more than 0.1 % of steps excluded"}
    assert views.evidence(line) == "more than 0.1 % of steps excluded"
    assert views.evidence(line | {"evidence": "rank 5"}) == "rank 5"


@pytest.mark.parametrize("path", ["/", "/console/runs?node=a#x", "/console/nodes/a%2Fb"])
def test_own_paths(path: str) -> None:
    assert own_path(path) == path


@pytest.mark.parametrize(
    "path", [None, "", "//x", "/\\x", "http://x/", "x", "/a\nb", "/console/sign-in", "/\tx", "\\x"]
)
def test_foreign_paths(path: str | None) -> None:
    assert own_path(path) == "/"


def test_no_answer_ends_what_a_page_asks_again() -> None:
    """Whatever polls takes only answers that hold the poll; the rest that loads can be asked once more."""
    asking = []
    for path in sorted((build.HERE / "templates").glob("*.j2")):
        for element in re.findall(r"<\w+[^<]*?\shx-trigger=[^<]*?>\s*(?=<|\{|[A-Z])", path.read_text(encoding="utf-8")):
            asking.append(element)
            trigger = re.findall(r'hx-trigger="([^"]*)"', element)[0]
            if "every" in trigger:
                name = re.findall(r'\sid="([^"]*)"', element)[0]
                assert f'data-must="{name}"' in element, path
            else:
                assert trigger.split(", ")[-1] == "again", (path, trigger)
    assert len(asking) == 10
