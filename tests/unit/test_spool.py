"""The spool loses nothing but a cut-off tail, and never returns anything that was not put."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.db.spool import SegmentReader, Spool, SpoolCorruptError, SpoolError, frame, header

RUN = UUID("01a22926-561b-72b1-aca5-96239d3c4608")
payload_lists = st.lists(st.binary(max_size=40), max_size=5)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segment") / "one.spool"


def recover(path: Path, data: bytes) -> tuple[list[bytes], bool]:
    """Payloads read from a segment with these bytes, and whether damage was reported."""
    path.write_bytes(data)
    reader = SegmentReader.open(path)
    assert reader is not None
    found = []
    try:
        for payload in reader.payloads():
            found.append(payload)  # noqa: PERF402 - keeps what came before the damage
    except SpoolCorruptError:
        return found, True
    finally:
        reader.close()
    return found, False


@given(payload_lists)
@settings(max_examples=25, deadline=None)
def test_cut_at_every_byte_gives_exactly_the_whole_frames(scratch: Path, payloads: list[bytes]) -> None:
    """A process killed while it wrote leaves a prefix of the file."""
    data = header(RUN, 1)
    ends = []
    for payload in payloads:
        data += frame(payload)
        ends.append(len(data))
    for cut in range(len(data) + 1):
        whole = sum(end <= cut for end in ends)
        assert recover(scratch, data[:cut]) == (payloads[:whole], False)


@given(payload_lists, st.integers(1, 5000))
@settings(max_examples=25, deadline=None)
def test_zeros_behind_the_last_frame_are_a_cut_tail(scratch: Path, payloads: list[bytes], zeros: int) -> None:
    """A power cut leaves pages that were allocated and never written."""
    data = header(RUN, 1) + b"".join(map(frame, payloads))
    assert recover(scratch, data + b"\0" * zeros) == (payloads, False)


@given(payload_lists.filter(bool), st.data())
@settings(max_examples=150, deadline=None)
def test_a_changed_byte_gives_a_prefix_and_is_reported_unless_last(
    scratch: Path, payloads: list[bytes], data: st.DataObject
) -> None:
    raw = bytearray(header(RUN, 1) + b"".join(map(frame, payloads)))
    where = data.draw(st.integers(0, len(raw) - 1))
    raw[where] ^= data.draw(st.integers(1, 255))
    found, damaged = recover(scratch, bytes(raw))
    assert found == payloads[: len(found)]
    assert len(found) < len(payloads)
    if not damaged:
        assert len(found) == len(payloads) - 1


@given(st.lists(st.tuples(st.lists(st.binary(max_size=60), min_size=1, max_size=4), st.booleans()), max_size=12))
@settings(max_examples=60, deadline=None)
def test_reads_back_what_was_appended_across_segments(
    tmp_path_factory: pytest.TempPathFactory, appends: list[tuple[list[bytes], bool]]
) -> None:
    """Whatever is not acknowledged can be read by position; acknowledging all leaves no file behind."""
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, RUN, 1, segment_bytes=100)
    open_places: list[tuple[tuple[int, int], list[bytes]]] = []
    for payloads, acknowledge in appends:
        open_places.append((spool.append(payloads, sync=False), payloads))
        if acknowledge:
            (_, end), _ = open_places.pop(0)
            spool.acknowledge(end)
        for place, expected in open_places:
            assert spool.read(*place) == expected
    if open_places:
        spool.acknowledge(open_places[-1][0][1])
    assert spool.close() == []
    assert list(folder.iterdir()) == []


def test_survivors_are_left_for_a_replay(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RUN, 3, segment_bytes=100)
    sent = [bytes([i]) * 30 for i in range(20)]
    for payload in sent:
        spool.append([payload], sync=True)
    found = []
    for path in sorted(spool.close()):
        reader = SegmentReader.open(path)
        assert reader is not None
        assert (reader.run_id, reader.attempt) == (RUN, 3)
        found += list(reader.payloads())
        reader.close()
    assert found == sent


def test_a_living_spool_is_not_replayed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RUN, 1)
    spool.append([b"x"], sync=False)
    (path,) = tmp_path.iterdir()
    assert SegmentReader.open(path) is None
    spool.close()
    reader = SegmentReader.open(path)
    assert reader is not None
    reader.close()


def test_the_limit_is_named_and_acknowledging_makes_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RUN, 1, segment_bytes=200, limit_bytes=500)
    place = (0, 0)
    for _ in range(6):
        place = spool.append([b"x" * 50], sync=False)
    with pytest.raises(SpoolError) as caught:
        spool.append([b"x" * 100], sync=False)
    assert caught.value.reason == "spool_full"
    assert spool.size <= 500
    spool.acknowledge(place[1])
    spool.append([b"y"], sync=False)
    spool.close()


FULL_DISK = """
import resource, sys
from pathlib import Path
from uuid import UUID
from tandem.db.spool import Spool, SpoolError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
spool = Spool(Path(sys.argv[1]), UUID(sys.argv[2]), 1)
count = 0
try:
    while True:
        spool.append([b"x" * 70], sync=False)
        count += 1
except SpoolError as error:
    print(error.reason, count, "\\n" not in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
spool.append([b"after"], sync=True)
spool.close()
"""


def test_a_full_disk_is_named_and_leaves_no_half_frame(tmp_path: Path) -> None:
    """A frame written in half would hide everything behind it once there is room again."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), str(RUN)], capture_output=True, text=True, check=True
    )
    reason, count, one_line = done.stdout.split()
    assert (reason, one_line) == ("disk_full", "True")
    (path,) = tmp_path.iterdir()
    reader = SegmentReader.open(path)
    assert reader is not None
    assert list(reader.payloads()) == [b"x" * 70] * int(count) + [b"after"]
    reader.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpoolError) as caught:
        Spool(tmp_path / "deep", RUN, 1).append([b"x"], sync=False)
    assert caught.value.reason == "spool_unwritable"
