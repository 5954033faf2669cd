"""The folder of compiled programs: whatever a killed process may have left half-written is gone, the rest stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from plugins.compiled import Session, _prune
from tandem_worker.compiled import MARK, writing


def entry(folder: Path, name: str, age_s: float) -> Path:
    path = folder / f"{name}-cache"
    path.write_bytes(b"executable")
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_an_orderly_writer_leaves_everything(tmp_path: Path) -> None:
    with writing(tmp_path):
        made = entry(tmp_path, "a", 0)
    with writing(tmp_path):
        assert made.exists()
    assert not (tmp_path / MARK).exists()


def test_a_failing_writer_leaves_everything_too(tmp_path: Path) -> None:
    """jax finished its entries: only a process that ended at once can have torn one."""
    made = tmp_path / "a-cache"

    def fail() -> None:
        entry(tmp_path, "a", 0)
        raise RuntimeError

    with pytest.raises(RuntimeError), writing(tmp_path):
        fail()
    with writing(tmp_path):
        assert made.exists()


def test_what_was_written_before_a_kill_is_removed_and_older_entries_stay(tmp_path: Path) -> None:
    old = entry(tmp_path, "old", 60)
    lock = tmp_path / "lock"
    lock.touch()
    (tmp_path / MARK).touch()  # as of a writer that was killed here
    torn = entry(tmp_path, "torn", 0)
    with writing(tmp_path):
        assert not torn.exists()
    assert old.exists()
    assert lock.exists()


# -- what test sessions keep for each other ----------------------------------------------------------------


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*-cache")}


def test_sessions_at_once_share_what_was_kept_and_give_what_is_new(tmp_path: Path) -> None:
    first = Session(tmp_path)
    entry(first.folder / "in-process", "a", 0)
    first.end()
    one, other = Session(tmp_path), Session(tmp_path)
    assert names(one.folder / "in-process") == names(other.folder / "in-process") == {"a-cache"}
    entry(one.folder / "in-process", "b", 0)
    assert names(other.folder / "in-process") == {"a-cache"}, "what may still be half-written is nobody else's"
    for session in (one, other):
        entry(session.folder / "workers", "both", 0)
        session.end()
    assert names(tmp_path / "in-process") == {"a-cache", "b-cache"}
    assert names(tmp_path / "workers") == {"both-cache"}
    assert {path.name for path in tmp_path.iterdir()} == {"in-process", "workers", "lock"}


def test_a_killed_session_gives_nothing_and_the_next_removes_it(tmp_path: Path) -> None:
    killed, alive = Session(tmp_path), Session(tmp_path)
    entry(killed.folder / "in-process", "torn", 0)
    os.close(killed._lock)  # as the kernel does
    last = Session(tmp_path)
    assert names(last.folder / "in-process") == set()
    assert not killed.folder.exists()
    assert alive.folder.exists()
    for session in (alive, last):
        session.end()


def test_what_a_killed_worker_left_half_written_is_not_kept(tmp_path: Path) -> None:
    session = Session(tmp_path)
    entry(session.folder / "workers", "whole", 60)
    (session.folder / "workers" / MARK).touch()
    entry(session.folder / "workers", "torn", 0)
    session.end()
    assert names(tmp_path / "workers") == {"whole-cache"}


def test_of_too_many_the_oldest_go(tmp_path: Path) -> None:
    for age in range(5):
        entry(tmp_path, str(age), 10 * age)
    _prune(tmp_path, 3 * len(b"executable"))
    assert names(tmp_path) == {"0-cache", "1-cache", "2-cache"}
