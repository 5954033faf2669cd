"""The console's script library comes out of its locked package, and out of nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_api.console import build

ROOT = Path(__file__).resolve().parents[2]


def test_it_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """It runs before anything is installed."""
    script = "import sys; sys.path.insert(0, 'api'); import tandem_api.console.build; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"fastapi", "pydantic", "tandem"} & set(done.stdout.replace("'", "").strip("[]\n").split(", "))


def test_what_it_takes_is_the_package_s_own_file_and_is_marked_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, into = tmp_path / "lock.txt", tmp_path / "vendor"
    lock.write_text("x==1 --hash=sha256:0\n")

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        for word in ("--no-deps", "--require-hashes"):
            assert word in command
        target = Path(command[command.index("--target") + 1])
        for name in (*files, "django_htmx-1.dist-info/licenses/LICENSE"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(name)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(build.subprocess, "run", pip)
    files: tuple[str, ...] = ()
    with pytest.raises(SystemExit, match="lack"):
        build.build(lock, into)
    assert not build.built(into)
    files = tuple(build.FILES)
    build.build(lock, into)
    assert build.built(into)
    assert json.loads((into / build.MARK).read_text())["packages"] == ["django_htmx-1"]
    assert {path.name for path in into.iterdir()} == {*build.FILES.values(), build.LICENCE, build.MARK}


def test_no_lock_and_no_index_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="there is no"):
        build.main(["--lock", str(tmp_path / "none")])
    monkeypatch.setattr(build.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="cannot be installed"):
        build.build(build.LOCK, tmp_path)


def test_git_ignores_it_the_wheel_holds_it_and_nothing_third_party_is_committed() -> None:
    assert "vendor" not in output("git", "ls-files", "api/tandem_api/console")
    assert output("git", "check-ignore", "api/tandem_api/console/vendor/htmx.min.js")
    assert 'artifacts = ["api/tandem_api/console/vendor/*"]' in (ROOT / "pyproject.toml").read_text()


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
