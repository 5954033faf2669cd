"""The commands that read, against a real embedded PostgreSQL: exit codes, one-line errors, JSON, files."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from sample_runs import sample_run
from tandem import export
from tandem.cli.app import main
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect
from tandem.db.queries import load_run
from tandem.db.sink import Sink
from tandem.db.store import create_run, finish_attempt, finish_run, start_attempt
from tandem.records import RunRecords
from tandem.runs.verdict import decide
from tandem.vocabulary import AttemptState

ROOT = Path(__file__).parents[2]
CLEAN, BAD, SYNTHETIC = (
    sample_run(seed=1),
    sample_run(seed=2, rows=60, steps=20),
    sample_run(seed=3, rows=25, synthetic=True, evil="<i>&\u202e"),
)
Tandem = Callable[..., tuple[int, str, str]]


def store(url: str, records: RunRecords, spool: Path) -> None:
    """Write a run as a supervisor and a reference worker do."""
    engine = connect(url)
    run, [attempt] = records.run, records.attempts
    create_run(engine, run.__class__(**{f: getattr(run, f) for f in ("run_id", "created_at", "workload", "kind",
        "model", "synthetic", "reference_node", "suspect_node", "spec")}, state="running"))  # fmt: skip
    start_attempt(engine, attempt.__class__(run_id=run.run_id, attempt=1, state="running", started_at=1.0,
        reference_host=attempt.reference_host, suspect_host=attempt.suspect_host))  # fmt: skip
    with Sink(url, spool, run.run_id, 1) as sink:
        for group in (records.steps, records.mismatches, records.controls, records.faults, records.closings):
            for record in group:
                sink.put(record)
        assert sink.flush(30)
    finish_attempt(engine, run.run_id, 1, state=AttemptState(attempt.state), reason="completed", ended_at=2.0,
        fingerprint=attempt.fingerprint, parity=attempt.parity)  # fmt: skip
    finish_run(engine, run.run_id, verdict=run.verdict or "", reason=run.reason, sentence=run.sentence, finished_at=3.0)
    engine.dispose()


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A data folder with a running database that holds three runs."""
    with tempfile.TemporaryDirectory(prefix="tandem-cli-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        path.chmod(0o755)  # PostgreSQL runs as another user where the tests run as root
        with embedded_database(home=path) as url:
            for records in (CLEAN, BAD, SYNTHETIC):
                store(url, records, path / "spool")
            yield path


@pytest.fixture
def tandem(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tandem:
    """Run a command in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv("TANDEM_HOME", str(home))
    monkeypatch.delenv("TANDEM_DB", raising=False)
    monkeypatch.delenv("TANDEM_DEBUG", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out, err = capfd.readouterr()
        code = end.value.code
        assert isinstance(code, int)
        return code, out, err

    return run


def ids(records: RunRecords) -> str:
    return str(records.run.run_id)


def test_runs_lists_newest_first_with_its_counts(tandem: Tandem) -> None:
    code, out, err = tandem("runs", "--json")
    assert (code, err) == (0, "")
    listed = json.loads(out)["runs"]
    assert [r["run"] for r in listed] == sorted((ids(r) for r in (CLEAN, BAD, SYNTHETIC)), reverse=True)
    text = (ROOT / "docs" / "json.md").read_text()
    assert all(f"`{key}`" in text for key in listed[0])
    bad = next(r for r in listed if r["run"] == ids(BAD))
    assert bad["mismatched_sites"] == sum(c.mismatched_sites for s in BAD.steps for c in s.classes.values())
    code, out, _ = tandem("runs")
    assert code == 0
    assert len(out.splitlines()) == 4
    assert "\u202e" not in out


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        (["--verdict", "match"], [CLEAN]),
        (["--limit", "1", "--verdict", "match"], [CLEAN]),
        (["--kind", "null"], []),
        (["--node", "healthy-7", "--verdict", "mismatch"], [BAD]),
    ],
)
def test_runs_can_be_filtered(tandem: Tandem, filters: list[str], wanted: list[RunRecords]) -> None:
    code, out, _ = tandem("runs", "--json", *filters)
    assert code == 0
    assert [r["run"] for r in json.loads(out)["runs"]] == [ids(r) for r in wanted]


def test_show_prints_the_verdict_first_and_the_counts(tandem: Tandem) -> None:
    code, out, _ = tandem("show", ids(BAD))
    assert code == 0
    assert out.splitlines()[0] == BAD.run.sentence
    attn = sum(s.classes["fwd/attn/out"].mismatched_elements for s in BAD.steps if "fwd/attn/out" in s.classes)
    line = next(line for line in out.splitlines() if line.startswith("fwd/attn "))
    assert f" {attn:,} " in line


def test_show_accepts_a_unique_beginning_and_last(tandem: Tandem) -> None:
    newest = max((CLEAN, BAD, SYNTHETIC), key=ids)
    assert json.loads(tandem("show", "last", "--json")[1])["run"] == ids(newest)
    others = [ids(r) for r in (CLEAN, BAD, SYNTHETIC) if r is not BAD]
    beginning = next(ids(BAD)[:n] for n in range(1, 37) if not any(o.startswith(ids(BAD)[:n]) for o in others))
    assert json.loads(tandem("show", beginning, "--json")[1])["run"] == ids(BAD)


def test_the_documented_json_keys_are_the_real_ones(tandem: Tandem) -> None:
    text = (ROOT / "docs" / "json.md").read_text().partition("\n## The list of runs\n")[0]
    documented = {
        key for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }
    for records in (CLEAN, BAD, SYNTHETIC):
        shown = json.loads(tandem("show", ids(records), "--json")[1])
        assert set(shown) == documented
        nested = [shown["table"][0], shown["controls"][0], shown["bound"] or {}, shown["first_mismatch"] or {}]
        for key in {key for part in [*nested, shown["fault_log"] or {}] for key in part}:
            assert f"`{key}`" in text


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["show", "ffff"], 2, "tandem runs"),
        (["show", "0"], 2, "several runs"),
        (["show", "../../etc"], 2, "no run id"),
        (["show"], 64, "Missing argument"),
        (["runs", "--limit", "0"], 64, "--limit"),
        (["runs", "--verdict", "maybe"], 64, "--verdict"),
        (["nonsense"], 64, "nonsense"),
        (["runs", "--nonsense"], 64, "--nonsense"),
        (["export", "last", "--format", "xml"], 64, "--format"),
        (["runs", "--db", "mysql://x/y"], 2, "postgresql://"),
        (["runs", "--db", "postgresql://u:hunter2@127.0.0.1:1/x"], 2, "127.0.0.1:1"),
        (["report", "last", "-o", "/nonexistent/folder/x.html"], 2, "choose another file"),
        (["export", "last", "-o", "/proc/nope"], 2, "choose another folder"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(tandem: Tandem, arguments: list[str], code: int, says: str) -> None:
    got, out, err = tandem(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert "hunter2" not in err
    assert "Traceback" not in err


def test_debug_shows_the_trace_wherever_it_is_given(tandem: Tandem) -> None:
    for arguments in (["--debug", "show", "ffff"], ["show", "ffff", "--debug"]):
        code, _, err = tandem(*arguments)
        assert code == 2
        assert "Traceback" in err
        assert err.splitlines()[-1].startswith("error: ")


def test_version_and_help(tandem: Tandem) -> None:
    assert re.fullmatch(r"tandem \d+\.\d+\.\d+\S*\n", tandem("--version")[1])
    for command in ([], ["runs"], ["show"], ["report"], ["export"], ["doctor"], ["db"], ["db", "start"]):
        for flag in ("-h", "--help"):
            code, out, _ = tandem(*command, flag)
            assert code == 0
            assert "Usage: tandem" in out


@pytest.mark.parametrize("records", [CLEAN, BAD, SYNTHETIC], ids=["match", "mismatch", "synthetic"])
def test_export_csv_equals_parquet_equals_rows(
    tandem: Tandem, tmp_path: Path, records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "BATCH", 7)
    assert tandem("export", ids(records), "-o", str(tmp_path))[0] == 0
    assert tandem("export", ids(records), "-f", "parquet", "-o", str(tmp_path))[0] == 0
    rows = {"runs": [records.run], "attempts": records.attempts, "steps": records.steps,
            "mismatches": records.mismatches, "controls": records.controls, "faults": records.faults,
            "closings": records.closings}  # fmt: skip
    for table in export.TABLES:
        with (tmp_path / f"{table.name}.csv").open(newline="", encoding="utf-8") as file:
            header, *lines = list(csv.reader(file))
        parquet = pq.read_table(tmp_path / f"{table.name}.parquet")
        assert header == parquet.column_names == [name for name, _ in table.columns]
        kinds = dict(table.columns)
        as_cells = [
            [value if kinds[name] == "json" else export._cell(value) for name, value in row.items()]
            for row in parquet.to_pylist()
        ]
        assert lines == as_cells
        if table.name in rows:
            assert len(lines) == len(rows[table.name])
    mismatches = pq.read_table(tmp_path / "mismatches.parquet").to_pylist()
    order = sorted(records.mismatches, key=lambda m: (m.step, m.site, m.rank, m.tensor))
    for row, record in zip(mismatches, order, strict=True):
        assert row["severity_mean"] == record.severity_mean
        assert (row["bits"], row["box"], row["mismatched"]) == (record.bits, record.box, record.mismatched)
        assert row["detected_at"].timestamp() == record.detected_at
    classes = pq.read_table(tmp_path / "step_classes.parquet").to_pydict()
    assert sum(classes["elements"]) == sum(c.elements for s in records.steps for c in s.classes.values())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("records", [CLEAN, BAD, SYNTHETIC], ids=["match", "mismatch", "synthetic"])
def test_a_verdict_can_be_computed_again_from_an_export(
    tandem: Tandem, home: Path, tmp_path: Path, records: RunRecords
) -> None:
    assert tandem("export", ids(records), "-f", "parquet", "-o", str(tmp_path))[0] == 0

    def read(name: str) -> list[dict[str, Any]]:
        kinds = next(dict(table.columns) for table in export.TABLES if table.name == name)
        plain = {"json": json.loads, "time": datetime.timestamp}
        return [
            {c: plain[kinds[c]](v) if kinds[c] in plain and v is not None else v for c, v in row.items()}
            for row in pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
        ]

    counts: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(dict)
    for row in read("step_classes"):
        name = f"{row['phase']}/{row['module']}/{row['tensor']}"
        counts[row["attempt"], row["step"]][name] = [
            row[c] for c in ("sites", "elements", "mismatched_sites", "mismatched_elements")
        ]
    steps = [{**row, "type": "step", "classes": counts[row["attempt"], row["step"]]} for row in read("steps")]
    [run] = read("runs")
    again = msgspec.convert(
        {
            "run": run, "attempts": read("attempts"), "steps": steps,
            "mismatches": [{**row, "type": "mismatch"} for row in read("mismatches")],
            "controls": [{**row, "type": "control"} for row in read("controls")],
            "faults": [{**row, "type": "fault"} for row in read("faults")],
            "closings": [{**row, "type": "closing"} for row in read("closings")],
        },
        RunRecords,
    )  # fmt: skip
    with embedded_database(home=home) as url:
        engine = connect(url)
        stored = load_run(engine, records.run.run_id)
        engine.dispose()
    assert again == stored
    assert decide(again) == decide(stored)


def test_report_goes_to_a_file_or_standard_output(tandem: Tandem, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    code, out, _ = tandem("report", ids(CLEAN), "-o", str(path))
    assert (code, out) == (0, f"{path}\n")
    assert path.read_text() == tandem("report", ids(CLEAN), "-o", "-")[1].removesuffix("\n")


def test_doctor_says_what_can_run(tandem: Tandem) -> None:
    code, out, _ = tandem("doctor", "--json")
    found = json.loads(out)
    names = {check["name"]: check for check in found["checks"]}
    assert {"python", "jax", "devices", "cores", "memory", "disk", "ports", "database"} <= set(names)
    assert code == (0 if found["ready"] else 2)
    assert names["database"]["status"] == "ok"
    assert next(p for p in found["presets"] if p["preset"] == "tiny")["can"]


def test_doctor_fails_with_cause_and_mend(tandem: Tandem, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = tandem("doctor", "--json", "--db", "postgresql://127.0.0.1:1/x")
    database = next(c for c in json.loads(out)["checks"] if c["name"] == "database")
    assert code == 2
    assert database["status"] == "fail"
    assert "127.0.0.1:1" in database["value"]
    assert "--db" in database["mend"]


def test_db_status_names_the_running_server(tandem: Tandem, home: Path) -> None:
    facts = json.loads(tandem("db", "status", "--json")[1])
    assert facts["running"] is True
    assert facts["data"].startswith(str(home))
    assert tandem("db", "url")[1].startswith("postgresql://")
    assert tandem("db", "upgrade")[0] == 0


def command(home: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli.app", *arguments]


def test_a_reader_that_goes_away_is_no_error(home: Path) -> None:
    environment = {**os.environ, "TANDEM_HOME": str(home)}
    process = subprocess.Popen(
        command(home, "show", ids(BAD)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert errors == b""


def test_ctrl_c_is_tidy(home: Path) -> None:
    """While the command waits for its database, a listener that never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/x"
        process = subprocess.Popen(command(home, "runs", "--db", url), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        connection, _ = silent.accept()  # it is connecting now
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        connection.close()
    assert process.returncode == 130
    assert out == b""
    assert err.decode().strip() == "interrupted"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tandem.cli.app import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('sqlalchemy', 'pyarrow', 'jinja2', 'jax', 'numpy', 'psycopg') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
