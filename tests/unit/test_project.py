"""The project around the code: make targets, locks, and the closing table of parts that a machine lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tandem
from plugins.parts import PARTS, REQUIRE

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip


# -- make ----------------------------------------------------------------------------------------------


def test_help_is_the_default_and_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert phony
    done = make()
    assert done.returncode == 0
    assert {line.split()[1] for line in done.stdout.splitlines()} == set(phony[1].split())


def test_a_python_that_is_too_old_or_absent_is_one_line_with_the_mend(tmp_path: Path) -> None:
    for python, word in (("/bin/false", "/bin/false is not"), ("", "none was found")):
        done = make("demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
        errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert done.returncode != 0
        assert len(errors) == 1
        assert "Python 3.11" in errors[0]
        assert word in errors[0]
        assert not (tmp_path / "venv").exists()


def test_an_environment_is_made_from_its_lock_and_made_again_only_when_that_changes(tmp_path: Path) -> None:
    """A dry run says what would be done, so that nothing is downloaded."""
    venv = tmp_path / "venv"
    variables = (f"VENV={venv}", f"PYTHON={sys.executable}")
    for target, lock in (("demo", "runtime"), ("test", "dev")):
        plan = make("-n", target, *variables).stdout
        assert f"--require-hashes -r requirements/{lock}.txt" in plan
        assert "--no-deps --no-build-isolation --editable ." in plan
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "stamps").mkdir()
    for stamp in ("runtime", "dev"):
        (venv / "stamps" / stamp).touch()
    assert "pip" not in make("-n", "demo", *variables).stdout
    assert "pip" not in make("-n", "test", *variables).stdout
    newer = "requirements/dev.txt"
    assert newer in make("-n", "-W", newer, "test", *variables).stdout
    assert "pip" not in make("-n", "-W", newer, "demo", *variables).stdout


def test_ci_is_a_script_that_bash_reads() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


# -- locks ---------------------------------------------------------------------------------------------


def pins(path: Path) -> dict[str, str]:
    return {m[1]: m[2] for m in re.finditer(r"^([a-z0-9.-]+)==(\S+)", path.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_requirement_is_pinned_with_hashes_and_names_no_address(path: Path) -> None:
    entries = re.split(r"^(?=\S)", path.read_text(), flags=re.MULTILINE)
    entries = [entry for entry in entries if entry.strip() and not entry.startswith("#")]
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9.-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry
    assert "://" not in path.read_text()
    assert not re.search(r"^\s*--(index|extra|find)", path.read_text(), re.MULTILINE)


def test_the_locks_agree_and_hold_what_the_project_asks_for() -> None:
    runtime, dev = (pins(ROOT / "requirements" / f"{name}.txt") for name in ("runtime", "dev"))
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["worker"]]
    assert {re.match(r"[a-z0-9-]+", a)[0] for a in asked} <= set(runtime)  # type: ignore[index]
    for path in LOCKS:
        for name, version in pins(path).items():
            assert dev.get(name, version) == version, f"{path.name}: {name}"
    assert set(pins(ROOT / "requirements" / "build.txt")) <= set(dev)
    assert set(runtime) <= set(dev)


def test_the_version_is_said_once() -> None:
    assert PROJECT["version"] == tandem.__version__
    assert PROJECT["requires-python"] == ">=3.11"
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


# -- parts ---------------------------------------------------------------------------------------------

CONFTEST = """
from plugins import parts
pytest_plugins = ["plugins.parts"]
parts.PARTS["moon"] = parts.Part("the moon", lambda: False, "wait for the night")
parts.PARTS["sun"] = parts.Part("the sun", lambda: True, "wait for the day")
"""
TESTS = """
import pytest
from plugins.parts import need

@pytest.mark.needs("moon")
def test_marked(): raise AssertionError

def test_on_the_way():
    need("sun")
    need("moon")
    raise AssertionError

@pytest.mark.needs("sun")
def test_there(): pass
"""


def run_pytest(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_parts.py").write_text(TESTS)
    variables = {k: v for k, v in os.environ.items() if k != REQUIRE} | {"PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", folder],
        cwd=folder, env=variables | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_tests_that_need_an_absent_part_are_skipped_in_a_closing_table(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"the moon\s+2  wait for the night", done.stdout)
    assert "the sun" not in done.stdout
    assert re.search(r"1 passed, 2 skipped", done.stdout.splitlines()[-1])


def test_where_parts_are_required_such_a_skip_fails_the_run(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, **{REQUIRE: "1"})
    assert done.returncode == 1
    assert f"{REQUIRE}=1" in done.stdout
    assert re.search(r"1 passed, 2 skipped", done.stdout.splitlines()[-1])


def test_a_part_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_unknown.py").write_text('import pytest\n\n@pytest.mark.needs("star")\ndef test_it(): pass\n')
    done = run_pytest(tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "'star': no such part" in done.stderr + done.stdout


def test_every_part_says_how_to_get_it() -> None:
    for name, part in PARTS.items():
        assert part.what, name
        assert part.get, name
