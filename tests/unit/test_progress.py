"""The block that a running pair shows, and how numbers are written."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sample_runs import sample_run
from tandem import formats
from tandem.progress import MAX_LINE, PLAIN_EVERY_S, Progress, ProgressEvent, closing_lines, decode, encode, lines
from tandem.runs.summary import summarise

EVENT = ProgressEvent(
    phase="step", step=412, steps=2000, steps_per_s=3.1, eta_s=512, sites=1_300_000, elements=420_000_000_000,
    mismatched_sites=17, mismatched_elements=1204, first_mismatch="step 96 fwd/attn layer 3 rank 1",
    controls={"parity": "ok", "self_replay_start": "ok (8)", "positive_start": "ok"}, link_bytes=2, full_bytes=10_000,
    window_used=5, window_limit=8, records_put=900, records_acknowledged=900,
)  # fmt: skip


def plain(width: int = 200) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=width), out


def test_the_block_says_everything_once():
    assert lines("pair host-b / host-a, suspect · submodule, tiny, TP 2", EVENT) == [
        "pair host-b / host-a, suspect · submodule, tiny, TP 2",
        "step        412/2,000, 3.1 steps/s, ETA 9 min",
        "compared    sites 1.3 M, elements 4.2e11",
        "mismatching sites 17, elements 1,204, first at step 96 fwd/attn layer 3 rank 1",
        "controls    parity ok, self replay start ok (8), positive start ok",
        "link        0.02 % of full exchange, window 5/8",
        "records     100 % in Postgres",
    ]


def test_an_event_survives_its_line():
    assert decode(encode(EVENT)) == EVENT
    assert encode(EVENT).endswith(b"\n")
    assert encode(EVENT).count(b"\n") == 1


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_any_other_line_is_no_event(line):
    event = decode(line)
    assert event is None or isinstance(event, ProgressEvent)


@pytest.mark.parametrize("line", [b"", b"{}", b'{"phase": 3}', b"\xff\xfe", "W0000 xla: warning", encode(EVENT)[:-9]])
def test_broken_lines_are_ignored(line):
    assert decode(line) is None


def test_an_endless_line_is_not_parsed():
    assert decode(b'{"phase":"' + b"a" * MAX_LINE + b'"}') is None


def test_records_are_never_rounded_up_to_all():
    event = ProgressEvent(phase="step", sites=1, records_put=10**9, records_acknowledged=10**9 - 1, records_spooled=1)
    shown = lines("t", event)[-1]
    assert "100 %" not in shown
    assert "1 wait in the local spool" in shown


def test_plain_output_prints_what_is_notable_and_then_now_and_then():
    console, out = plain()
    now = [0.0]
    with Progress(console, "title", clock=lambda: now[0]) as progress:
        for step in range(1, 61):
            now[0] = float(step)
            progress.update(ProgressEvent(phase="step", step=step, steps=60, sites=step, elements=step))
        found = ProgressEvent(phase="step", step=60, sites=1, mismatched_sites=1, first_mismatch="step 60 fwd/attn")
        progress.update(found)
    printed = out.getvalue().splitlines()
    assert printed[0] == "title"
    assert len(printed) == 1 + 60 / PLAIN_EVERY_S + 1
    assert "first at step 60 fwd/attn" in printed[-1]
    assert "\x1b" not in out.getvalue()


def test_the_last_event_is_always_printed():
    console, out = plain()
    with Progress(console, "title", clock=lambda: 0.0) as progress:
        progress.update(ProgressEvent(phase="step", step=1))
        progress.update(ProgressEvent(phase="step", step=2))
    assert out.getvalue().splitlines()[-1].startswith("2")


def test_a_terminal_gets_one_block_that_redraws():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40, _environ={"TERM": "xterm"})
    with Progress(console, "title") as progress:
        progress.update(EVENT)
    text = out.getvalue()
    assert "\x1b[" in text
    assert "412/2,000" in text


def test_untrusted_text_cannot_drive_the_terminal():
    event = ProgressEvent(phase="\x1b]0;x\x07", controls={"parity": "failed: \x1b[2J\u202e"}, first_mismatch="\x9b31m")
    assert not any(c in "".join(lines("a\x1b[1m", event)) for c in "\x1b\x07\x9b\u202e")


def test_closing_lines_are_verdict_table_and_report():
    records = sample_run(rows=8)
    text = closing_lines(summarise(records), "/tmp/report.html")
    assert text[0] == records.run.sentence
    assert any(line.startswith("fwd/attn") for line in text)
    assert text[-1] == "report: /tmp/report.html"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (999_999, "999,999"), (1_300_000, "1.3 M"), (4.2e9, "4.2 G"), (4.2e11, "4.2e11"), (99.99e9, "100 G")],
)
def test_short_counts(value, shown):
    assert formats.short(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "0 %"), (0.0015, "0.15 %"), (1, "100 %"), (0.9999, "99.99 %"), (0.5, "50 %"), (1e-9, "< 0.0001 %")],
)
def test_percent(share, shown):
    assert formats.percent(share) == shown


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_scientific_reads_back(x):
    assert float(formats.scientific(x, 16)) == x


@given(st.text())
def test_clean_text_is_one_printable_line(text):
    shown = formats.clean(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
