"""`tandem assess --local` from end to end: Ctrl-C ends all of it, and it goes on where it was."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervised import DEADLINE_S, Home, new_home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RUNS = [("null", "submodule"), ("null", "gradient"), ("suspect", "submodule"), ("suspect", "gradient")]


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as home:
        yield home


def rehearse(home: Home, folder: Path, *more: str, interrupt: bool = False) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and standard error; ``interrupt``: by Ctrl-C once it has made steps."""
    words = ("assess", "--local", "--model", "tiny", "--tp", "1", "--json", *more)
    process = home.command(*words, cwd=folder)
    errors = ""
    if interrupt:
        assert process.stderr is not None
        while not re.search(r"^[\d,]+(/[\d,]+)?, .*sites", errors, re.MULTILINE):
            line = process.stderr.readline()
            assert line, f"it ended: {errors}"
            errors += line
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    home.at_rest()
    return process.returncode, json.loads(out), errors + err


def test_ctrl_c_ends_all_of_it_and_what_it_stopped_is_not_done(home: Home, tmp_path: Path) -> None:
    code, told, err = rehearse(home, tmp_path, "--each", "1h", interrupt=True)
    assert code == 2, err
    assert [(r["kind"], r["workload"]) for r in told["runs"]] == RUNS
    first, *others = told["runs"]
    assert first["verdict"] == "match"
    assert {(r["run"], r["verdict"], r["sentence"], r["report"]) for r in others} == {
        (None, None, "not run: stopped", None)
    }
    assert "stopped, as asked, with 3 of 4 runs not made: call it again to go on" in err
    assert [str(run) for run in home.run_ids()] == [first["run"]]
    assert first["run"] in (tmp_path / first["report"]).read_text()
    # A match of the same spec, of today, and all the same it has not run its length.
    code, told, _ = rehearse(home, tmp_path, "--each", "1h", "--for", "1s")
    assert code == 2
    assert {r["sentence"] for r in told["runs"]} == {"not run: the time is up"}
    assert len(home.run_ids()) == 1


def test_every_run_is_made_once_and_has_its_page(home: Home, tmp_path: Path) -> None:
    before = len(home.run_ids())
    code, told, err = rehearse(home, tmp_path, "--each", "2s")
    assert code == 0, err
    assert [(r["kind"], r["workload"], r["verdict"]) for r in told["runs"]] == [(*run, "match") for run in RUNS]
    assert len(home.run_ids()) == before + len(RUNS)
    for r in told["runs"]:
        assert r["run"] in (tmp_path / r["report"]).read_text()
    assert len(list(tmp_path.iterdir())) == len(RUNS)
    again, told_again, _ = rehearse(home, tmp_path, "--each", "2s", "--for", "1s")
    assert (again, told_again) == (0, told)
    assert len(home.run_ids()) == before + len(RUNS)
