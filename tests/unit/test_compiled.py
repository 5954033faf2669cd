"""The folder of compiled programs: whatever a killed process may have left half-written is gone, the rest stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

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
