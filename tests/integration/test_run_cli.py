"""`tandem run` and `tandem demo` from end to end, as a user types them: exit codes, JSON, reports, Ctrl-C."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow.parquet as pq
import pytest

from supervised import DEADLINE_S, Home, new_home
from tandem.vocabulary import ControlName, Role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DOCUMENTED = re.findall(r"`(\w+)`", "\n".join(
    line.split("|")[1] for line in (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    .split("## The list of runs")[0].splitlines() if line.startswith("| `")
))  # fmt: skip


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as home:
        yield home


@pytest.fixture(scope="module")
def null(home: Home) -> dict[str, Any]:
    """A null pair, from flags alone."""
    code, out, err = home.tandem("run", "--kind", "null", "--steps", "3", "--json")
    assert code == 0, f"{err} {out[-3000:]}"
    home.at_rest()
    return json.loads(out)


@pytest.fixture(scope="module")
def synthetic(home: Home) -> dict[str, Any]:
    """A corrupting pair, from a YAML file; a flag wins over it."""
    spec = home.folder / "spec.yaml"
    spec.write_text(f"model: tiny\nsteps: 999\nself_replays: 3\nfault: {home.fault_profile()}\nsync: digest\n")
    code, out, err = home.tandem("run", spec, "--steps", "4", "--json")
    assert code == 1, f"{err} {out[-3000:]}"
    home.at_rest()
    return json.loads(out)


def test_a_null_pair_matches_and_says_what_it_excludes(null: dict[str, Any]):
    assert (null["verdict"], null["reason"], null["kind"], null["synthetic"]) == ("match", "completed", "null", False)
    assert null["steps_compared"] == 3
    assert null["sites_compared"] > 900
    assert null["elements_compared"] > 10**6
    assert null["mismatched_sites"] == null["mismatched_elements"] == null["mismatch_rows_total"] == 0
    assert null["bound"]["steps"] == 3
    assert 0 < null["bound"]["per_step"] < 1
    assert 0 < null["link_bytes"] < null["full_bytes"]
    assert null["fault_log"] is None
    assert null["device_hours"] > 0
    assert [c["name"] for c in null["controls"] if c["status"] != "ok"] == []
    assert null["sentence"].startswith("match: 0 of ")


def test_the_documented_keys_are_there(null: dict[str, Any], synthetic: dict[str, Any]):
    asked = {
        "run", "verdict", "reason", "sites_compared", "elements_compared", "mismatched_sites", "mismatched_elements",
        "bound", "link_bytes", "fault_log",
    }  # fmt: skip
    assert asked <= set(null) == set(synthetic) <= set(DOCUMENTED)


def test_a_corrupting_pair_is_found_with_the_injectors_own_counts(synthetic: dict[str, Any]):
    assert (synthetic["verdict"], synthetic["synthetic"], synthetic["steps_compared"]) == ("mismatch", True, 4)
    assert synthetic["spec"]["sync"] == "digest"
    assert synthetic["bound"] is None
    # Two layers, two ranks, two elements each, in each of four steps.
    log = synthetic["fault_log"]
    assert (synthetic["mismatched_sites"], synthetic["mismatched_elements"]) == (16, 32)
    assert (log["output_sites"], log["output_changed"], log["found_sites"], log["found_elements"]) == (16, 32, 16, 32)
    assert (log["unequal"], log["unexplained_sites"], log["exact"]) == (0, 0, True)
    assert [(c["phase"], c["module"]) for c in synthetic["table"] if c["mismatched_sites"]] == [("fwd", "ffn")]
    assert all(c["repeats"] == 3 for c in synthetic["controls"] if c["name"] == "self_replay_start")


def test_the_reading_commands_tell_the_same(
    home: Home, null: dict[str, Any], synthetic: dict[str, Any], tmp_path: Path
):
    code, out, _ = home.tandem("runs", "--json")
    assert code == 0
    listed = {run["run"]: run for run in json.loads(out)["runs"]}
    for run in (null, synthetic):
        assert listed[run["run"]]["verdict"] == run["verdict"]
        assert listed[run["run"]]["mismatched_elements"] == run["mismatched_elements"]
    code, out, _ = home.tandem("show", synthetic["run"], "--json")
    assert json.loads(out) == synthetic
    code, out, _ = home.tandem("show", "last")
    assert code == 0
    assert out.startswith(synthetic["sentence"])
    code, out, err = home.tandem("report", synthetic["run"], "-o", tmp_path / "run.html")
    assert code == 0
    assert "synthetic" in err
    page = (tmp_path / "run.html").read_text()
    assert synthetic["run"] in page
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S*", "", page)
    code, out, err = home.tandem("export", synthetic["run"], "-o", tmp_path / "csv")
    assert code == 0, f"{err} {out[-3000:]}"
    with (tmp_path / "csv" / "mismatches.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert sum(int(row["mismatched"]) for row in rows) == 32
    code, out, err = home.tandem("export", synthetic["run"], "--format", "parquet", "-o", tmp_path / "parquet")
    assert code == 0, f"{err} {out[-3000:]}"
    assert pq.read_table(tmp_path / "parquet" / "mismatches.parquet").num_rows == 16


def test_two_runs_with_one_id_are_refused(home: Home, null: dict[str, Any]):
    code, out, err = home.tandem("run", "--run-id", null["run"], "--steps", "1")
    assert (code, out) == (2, "")
    assert err == f"error: run {null['run']} exists already: leave the id out to get a new one\n"
    assert home.records(UUID(null["run"])).run.verdict == "match"


def test_the_demo_shows_both_halves_and_their_reports(home: Home, tmp_path: Path):
    code, out, err = home.tandem("demo", "--steps", "3", "-o", tmp_path)
    assert code == 0, f"{out} {err}"
    assert out.count("right  ") == 2
    assert "WRONG" not in out
    assert "site by site equal" in out
    assert re.search(r"^match: 0 of ", out, re.MULTILINE)
    assert re.search(r"^mismatch: ", out, re.MULTILINE)
    reports = re.findall(r"^report: (.*)$", out, re.MULTILINE)
    assert len(reports) == 2
    assert all(Path(report).stat().st_size > 1000 for report in reports)
    home.at_rest()


class Interrupted:
    """A command without an end of its own, and its progress lines."""

    def __init__(self, home: Home, *command: object, until: str = r"^[\d,]+(/[\d,]+)?, .*sites") -> None:
        self.home = home
        command = command or ("run", "--kind", "null", "--duration", 3600, "--json")
        self.process: subprocess.Popen[str] = home.command(*command)
        self.lines: list[str] = []
        self._until = until
        self._stepping = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_steps(self) -> None:
        assert self._stepping.wait(DEADLINE_S), self.lines[-3:]
        assert self.process.poll() is None, self.lines[-3:]

    def end(self) -> tuple[int, str]:
        """Exit code and standard output."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self.process.stdout.close()
        self.home.at_rest()
        return code, out

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as errors:
            for line in errors:
                self.lines.append(line)
                if re.search(self._until, line):
                    self._stepping.set()
        self._stepping.set()


def test_the_first_ctrl_c_ends_the_run_with_its_controls_and_a_verdict(home: Home):
    run = Interrupted(home)
    run.wait_for_steps()
    run.process.send_signal(signal.SIGINT)
    code, out = run.end()
    result = json.loads(out)
    assert (code, result["verdict"], result["reason"]) == (0, "match", "completed")
    records = home.records(UUID(result["run"]))
    [closing] = records.closings
    assert (closing.reason, records.attempts[0].reason, records.attempts[0].state) == ("stopped", "stopped", "closed")
    ends = {(c.name, c.role) for c in records.controls}
    assert {(ControlName.SELF_REPLAY_END, role) for role in Role} <= ends
    assert (ControlName.POSITIVE_END, Role.SUSPECT) in ends


def test_ctrl_c_before_the_first_step_does_not_wait_for_the_compiler(home: Home):
    """Neither side takes messages while it compiles: of a batch that no other test compiles."""
    run = Interrupted(home, "run", "--kind", "null", "--batch", 3, "--duration", 3600, "--json", until="compiling")
    run.wait_for_steps()
    run.process.send_signal(signal.SIGINT)
    code, out = run.end()
    result = json.loads(out)
    assert (code, result["verdict"], result["reason"]) == (2, "inconclusive", "stopped_early")
    assert result["steps_compared"] == 0


def test_the_second_ctrl_c_kills_it(home: Home):
    run = Interrupted(home)
    run.wait_for_steps()
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)
    code, out = run.end()
    result = json.loads(out)
    assert (code, result["verdict"], result["reason"]) == (2, "inconclusive", "killed")
    assert result["steps_compared"] >= 1
    [attempt] = home.records(UUID(result["run"])).attempts
    assert (attempt.state, attempt.reason) == ("orphaned", "killed")


def test_ctrl_c_ends_the_whole_demo(home: Home, tmp_path: Path):
    """The first half ends with a verdict and a report; the second never begins."""
    demo = Interrupted(home, "demo", "--steps", 100_000, "-o", tmp_path)
    demo.wait_for_steps()
    demo.process.send_signal(signal.SIGINT)
    code, out = demo.end()
    assert code == 130
    assert demo.lines[-1] == "interrupted\n"
    assert re.search(r"^match: 0 of ", out, re.MULTILINE)
    assert out.count("report: ") == len(list(tmp_path.iterdir())) == 1
    assert "right  " not in out
