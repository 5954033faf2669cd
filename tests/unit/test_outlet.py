"""What a worker tells: lines for a supervisor, or a pod's log and last message."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.progress import ProgressEvent, decode
from tandem.vocabulary import Role
from tandem.worker_io import Failed
from tandem.worker_io import decode as decode_message
from tandem_worker.outlet import LAST_MESSAGE_BYTES, LOG_EVERY_S, Lines, PodLog

SECRET = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pod_log(tmp_path: Path, **options: object) -> tuple[PodLog, io.StringIO, Path]:
    stream, last = io.StringIO(), tmp_path / "last"
    log = PodLog(Role.REFERENCE, [SECRET], stream=stream, last_message=last, **options)  # type: ignore[arg-type]
    return log, stream, last


def test_one_line_per_phase_and_then_one_in_ten_seconds(tmp_path: Path) -> None:
    clock = Clock()
    log, stream, _ = pod_log(tmp_path, clock=clock, wall=lambda: 0.0)
    for phase in ("starting", "compiling 1/3", "compiling 2/3", "step"):
        log.progress(ProgressEvent(phase=phase))
    for step in range(40):
        log.progress(ProgressEvent(phase="step", step=step))
        clock.now += LOG_EVERY_S / 20
    lines = stream.getvalue().splitlines()
    assert [line.split("reference: ")[1].split()[0] for line in lines[:2]] == ["starting", "compiling"]
    assert len(lines) == 3 + 1  # the step's own, and one more within twenty seconds: the last came just before
    assert all(line.startswith("1970-01-01T00:00:00Z reference: ") for line in lines)


def test_no_line_and_no_last_message_shows_a_secret(tmp_path: Path) -> None:
    log, stream, last = pod_log(tmp_path)
    last.touch()
    log.log(f"trouble with {SECRET} at\nthe link")
    log.trace(f"Traceback\n  key = {SECRET}\nValueError")
    log.ended(Failed("crashed", f"ValueError: {SECRET}"))
    assert SECRET not in stream.getvalue() + last.read_text()
    assert "trouble with *** at the link" in stream.getvalue()
    assert json.loads(last.read_text()) == {"reason": "crashed", "message": "ValueError: ***"}


def test_the_first_end_counts(tmp_path: Path) -> None:
    """What follows from it must not hide it."""
    log, _, last = pod_log(tmp_path)
    last.touch()
    log.ended(Failed("hung_step", "no progress"))
    log.ended(Failed("killed", "a signal"))
    assert json.loads(last.read_text())["reason"] == "hung_step"


def test_a_second_end_waits_until_the_first_is_written(tmp_path: Path) -> None:
    """Whoever ended second exits the process at once: a message half written would be lost with it."""
    log, stream, last = pod_log(tmp_path)
    os.mkfifo(last)  # takes nothing until somebody reads
    ends = [
        threading.Thread(target=log.ended, args=(Failed(reason, ""),), daemon=True)
        for reason in ("stopped_early", "killed")
    ]
    ends[0].start()
    while "ends: stopped_early" not in stream.getvalue():
        ends[0].join(0.01)
    ends[1].start()
    ends[1].join(0.3)
    assert ends[1].is_alive()
    assert json.loads(last.read_text())["reason"] == "stopped_early"
    for end in ends:
        end.join(30)
        assert not end.is_alive()


def test_without_the_file_nothing_is_made(tmp_path: Path) -> None:
    log, stream, last = pod_log(tmp_path)
    log.ended(Failed("input", "no such preset"))
    assert not last.exists()
    assert stream.getvalue().endswith("ends: input: no such preset\n")


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=9000))
def test_the_last_message_is_json_that_kubernetes_keeps_whole(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    log, _, last = pod_log(tmp_path_factory.mktemp("last"))
    last.touch()
    log.ended(Failed("crashed", text))
    data = last.read_bytes()
    assert len(data) <= LAST_MESSAGE_BYTES
    kept = json.loads(data)["message"]
    assert text.startswith(kept)
    assert kept == text or len(data) > LAST_MESSAGE_BYTES - 32


def test_a_supervisor_hears_of_ends_without_a_result_only(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = Lines(Role.SUSPECT)
    lines.bound("tcp://127.0.0.1:1")
    lines.progress(ProgressEvent(phase="step", step=3))
    lines.ended(Failed("completed", "3 steps compared", 40))
    lines.ended(Failed("dead_peer", "gone", 2))
    lines.log("for people")
    out, err = capfdbinary.readouterr()
    bound, progress, failed = out.splitlines(keepends=True)
    assert decode_message(bound) is not None
    assert decode(progress) == ProgressEvent(phase="step", step=3)
    assert decode_message(failed) == Failed("dead_peer", "gone", 2)
    assert err == b"suspect: for people\n"
