"""How a run looks in a terminal while it goes on, and its closing lines.

The reference worker writes `ProgressEvent` messages, one JSON object a line; the command that started the pair
reads them and feeds a `Progress`. On a terminal one block redraws; elsewhere a plain line is printed when the phase
changes, at the first mismatch, and then once per `PLAIN_EVERY_S` seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from tandem import formats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from tandem.runs.summary import RunSummary

PLAIN_EVERY_S = 10.0
"""Seconds between plain lines while nothing notable happens."""

MAX_LINE = 64 * 1024
"""Longest progress line that is read, in bytes."""


class ProgressEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run is doing now. Totals are of the whole run so far; unknown values are None."""

    phase: str
    """``starting``, ``compiling 3/14``, ``handshake``, ``controls``, ``step``, ``draining``, ``closing``."""
    step: int = 0
    """Steps finished."""
    steps: int | None = None
    """Steps asked for; None if the run ends by time."""
    steps_per_s: float | None = None
    eta_s: float | None = None
    """Seconds until the last step, estimated."""
    sites: int = 0
    """Site x rank tensors compared."""
    elements: int = 0
    mismatched_sites: int = 0
    """Site x rank tensors with a mismatch whose inputs were equal (cause ``compute``)."""
    mismatched_elements: int = 0
    other_findings: int = 0
    """Rows with another cause: ``state``, ``digest``."""
    first_mismatch: str = ""
    """For example ``step 96 fwd/attn layer 3 rank 1``."""
    controls: dict[str, str] = {}
    """Control -> ``ok``, ``ok (8)`` (repeats) or ``failed: <why>``, in the order in which to show them."""
    link_bytes: int = 0
    full_bytes: int = 0
    """Bytes that full exchange would have moved."""
    window_used: int = 0
    window_limit: int = 0
    """0: the sync mode has no window."""
    records_put: int = 0
    records_acknowledged: int = 0
    """Records committed in PostgreSQL."""
    records_spooled: int = 0
    """Records that wait in the local spool because the database does not answer."""


_DECODER = msgspec.json.Decoder(ProgressEvent)


def encode(event: ProgressEvent) -> bytes:
    """One JSON line, newline included."""
    return msgspec.json.encode(event) + b"\n"


def decode(line: bytes | str) -> ProgressEvent | None:
    """Read one line; None for anything that is not a progress event (a library's own output, a torn line)."""
    if len(line) > MAX_LINE:
        return None
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def lines(title: str, event: ProgressEvent) -> list[str]:
    """The block of one event as plain text, one string a line; ``title`` names pair, kind, workload, model, TP."""
    out = [formats.clean(title), _step_line(event)]
    if event.sites or event.phase == "step":
        out.append(f"compared    sites {formats.short(event.sites)}, elements {formats.short(event.elements)}")
        out.append(_mismatch_line(event))
    if event.controls:
        out.append(
            "controls    " + ", ".join(f"{k.replace('_', ' ')} {formats.clean(v)}" for k, v in event.controls.items())
        )
    if event.sites or event.records_put:
        link = []
        if event.full_bytes:
            link.append(f"{formats.percent(event.link_bytes / event.full_bytes)} of full exchange")
        if event.window_limit:
            link.append(f"window {event.window_used}/{event.window_limit}")
        if link:
            out.append("link        " + ", ".join(link))
        out.append(_records_line(event))
    return out


def one_line(event: ProgressEvent) -> str:
    """One event as a single plain line, for logs."""
    parts = [_step_line(event).split(maxsplit=1)[1]]
    if event.sites:
        parts += [
            f"sites {formats.short(event.sites)}",
            f"elements {formats.short(event.elements)}",
            _mismatch_line(event).strip(),
        ]
        parts.append(_records_line(event).replace("records     ", "records "))
    return " · ".join(parts)


def _step_line(event: ProgressEvent) -> str:
    if event.phase != "step":
        return f"phase       {formats.clean(event.phase)}"
    of = f"/{formats.count(event.steps)}" if event.steps is not None else ""
    parts = [f"{formats.count(event.step)}{of}"]
    if event.steps_per_s is not None:
        rate = event.steps_per_s
        parts.append(f"{rate:.2g} steps/s" if rate >= 0.1 or rate == 0 else f"{formats.duration(1 / rate)} a step")
    if event.eta_s is not None:
        parts.append(f"ETA {formats.duration(event.eta_s)}")
    return "step        " + ", ".join(parts)


def _mismatch_line(event: ProgressEvent) -> str:
    if not event.mismatched_sites and not event.other_findings:
        return "mismatching none"
    parts = [
        f"sites {formats.count(event.mismatched_sites)}",
        f"elements {formats.count(event.mismatched_elements)}",
    ]
    if event.other_findings:
        parts.append(f"other findings {formats.count(event.other_findings)}")
    if event.first_mismatch:
        parts.append(f"first at {formats.clean(event.first_mismatch)}")
    return "mismatching " + ", ".join(parts)


def _records_line(event: ProgressEvent) -> str:
    share = event.records_acknowledged / event.records_put if event.records_put else 1.0
    # Never round up to 100 %: it means that everything is committed.
    shown = "100 %" if share >= 1 else f"{min(share * 100, 99.99):.4g} %"
    spooled = f", {formats.count(event.records_spooled)} wait in the local spool" if event.records_spooled else ""
    return f"records     {shown} in Postgres{spooled}"


class Progress:
    """Shows events; use as a context manager. ``clock`` gives monotonic seconds."""

    def __init__(
        self, console: Console, title: str, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._redraws = console.is_terminal and not console.is_dumb_terminal if live is None else live
        self._live: Live | None = None
        self._printed_at: float | None = None
        self._last: ProgressEvent | None = None
        self._printed: ProgressEvent | None = None

    def __enter__(self) -> Self:
        if self._redraws:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=8, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._last is not None and self._last is not self._printed:
            self._print(one_line(self._last))

    def update(self, event: ProgressEvent) -> None:
        """Show ``event``; cheap enough to be called for every one of them."""
        before, self._last = self._last, event
        if self._live is not None:
            self._live.update(self._block(event))
            return
        if before is None:
            self._print(formats.clean(self._title))  # not earlier: bad input is one line, and nothing else
        now = self._clock()
        notable = (
            before is None
            or before.phase.split(" ")[0] != event.phase.split(" ")[0]  # not each of ``compiling 3/36``
            or (event.first_mismatch and not before.first_mismatch)
            or before.controls != event.controls
        )
        if notable or self._printed_at is None or now - self._printed_at >= PLAIN_EVERY_S:
            self._print(one_line(event))
            self._printed, self._printed_at = event, now

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _block(self, event: ProgressEvent) -> Text:
        from rich.text import Text

        head, *rest = lines(self._title, event)
        text = Text(head, style="bold")
        for line in rest:
            label, value = line[:12], line[12:]
            found = label.startswith("mismatching") and value != "none"
            failed = label.startswith("controls") and "failed" in value
            text.append("\n" + label, style="dim")
            text.append(value, style="bold red" if found or failed else "")
        return text


def closing_lines(summary: RunSummary, report: str | None = None) -> list[str]:
    """What is printed when the run has ended: the verdict sentence, the phase x module table, the report's place."""
    from tandem.runs.tables import phase_module_table

    out = [formats.clean(summary.headline, 2000), "", *phase_module_table(summary)]
    if report:
        out += ["", f"report: {report}"]
    return out
