"""The local supervisor's judgement of how a pair ended, and what it lets its workers know."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from tandem.errors import SetupError, UsageError
from tandem.recovery import check_spool, spool_folder
from tandem.spec import RunSpec
from tandem.supervisor import Local, Stop, _Pair, check_inputs, worker_environment
from tandem.vocabulary import Role
from tandem.worker_io import Checked, Failed

R, S = Role.REFERENCE, Role.SUSPECT
OOM, CRASH, SEGFAULT = -9, 1, -11
ENDED = 42


@pytest.mark.parametrize(
    ("codes", "killed", "failure", "interrupts", "reason"),
    [
        ({R: 40, S: 40}, set(), None, 0, "completed"),
        ({R: 41, S: 41}, set(), None, 1, "completed"),
        # A worker that died explains what its peer reports.
        ({R: ENDED, S: OOM}, set(), "dead_peer", 0, "suspect_died"),
        ({R: SEGFAULT, S: ENDED}, set(), "dead_peer", 0, "reference_died"),
        ({R: CRASH, S: ENDED}, set(), None, 0, "reference_died"),
        ({R: OOM, S: OOM}, set(), None, 0, "reference_died"),
        # How a worker ends that the supervisor itself killed says nothing.
        ({R: ENDED, S: -9}, {S}, "half_open_link", 0, "half_open_link"),
        ({R: -9, S: ENDED}, {R}, "half_open_link", 0, "half_open_link"),
        ({R: -9, S: -9}, {R, S}, None, 2, "killed"),
        ({R: -9, S: OOM}, {R}, None, 2, "suspect_died"),
        ({R: 40, S: -9}, {S}, None, 0, "suspect_hung"),
        ({R: ENDED}, set(), "setup", 0, "setup"),
        ({R: ENDED}, set(), None, 0, "suspect_not_started"),
        ({}, set(), None, 0, "reference_not_started"),
    ],
)
def test_why_a_pair_ended(
    tandem_home: Path, codes: dict[Role, int], killed: set[Role], failure: str | None, interrupts: int, reason: str
):
    stop = Stop()
    stop.requests = interrupts
    pair = _Pair(RunSpec(), Local(url="postgresql://"), uuid4(), stop)
    pair._workers = {role: SimpleNamespace(returncode=code) for role, code in codes.items()}  # type: ignore[misc]
    pair._killed = killed
    pair.failure = Failed(failure, "message") if failure else None
    assert pair._why() == reason


def test_interrupts_are_counted_and_handlers_put_back():
    stop, seen = Stop(), []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("outside"))
    try:
        with stop.on_interrupt():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        assert stop.requests == 2
        signal.raise_signal(signal.SIGINT)
        assert seen == ["outside"]
        assert stop.requests == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_do_not_inherit_what_opens_the_database(tandem_home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANDEM_DB", "postgresql://tandem:secret@db/tandem")
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.delenv("TANDEM_COMPILED", raising=False)
    environment = worker_environment()
    assert "secret" not in " ".join(environment.values())
    assert environment["TANDEM_COMPILED"] == str(tandem_home / "compiled")
    monkeypatch.setenv("TANDEM_COMPILED", "/elsewhere")
    assert worker_environment()["TANDEM_COMPILED"] == "/elsewhere"


def test_inputs_are_checked_by_a_worker_process(tmp_path: Path):
    assert check_inputs(RunSpec(duration=3)) == Checked("tiny", "tiny")
    assert check_inputs(RunSpec(model="small")) == Checked("small", "small")
    with pytest.raises(UsageError, match="does not divide the KV heads"):
        check_inputs(RunSpec(tp=3))
    with pytest.raises(SetupError, match="missing"):
        check_inputs(RunSpec(data=[tmp_path / "none.txt"]))


def test_the_process_that_checks_inputs_does_not_know_the_database(
    tandem_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen = tmp_path / "environment"
    broken = tmp_path / "python"
    broken.write_text(f'#!/bin/sh\nenv > {seen}\necho \'{{"type":"checked","preset":"tiny","model":"x"}}\'\n')
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    monkeypatch.setenv("TANDEM_DB", "postgresql://tandem:secret@db/tandem")
    monkeypatch.setenv("PGPASSWORD", "secret")
    check_inputs(RunSpec())
    assert "PATH=" in seen.read_text()
    assert "secret" not in seen.read_text()


def test_a_worker_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'tokenizers'\" >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(SetupError, match=r"No module named 'tokenizers'\): install tandem-sdc\[worker\]"):
        check_inputs(RunSpec())


def test_room_for_the_spool_is_tried_and_given_back(tandem_home: Path):
    folder = spool_folder()
    check_spool(folder)
    assert list(folder.iterdir()) == []
    with pytest.raises(SetupError, match="cannot be written"):
        check_spool(folder, room=1 << 60)
    assert list(folder.iterdir()) == []
    with pytest.raises(SetupError, match="cannot be written"):
        check_spool(folder / "missing")
    assert os.stat(folder).st_mode & 0o077 == 0
