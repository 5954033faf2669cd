"""The page of the instrument check: HTML in one file, and text for a terminal."""

from __future__ import annotations

from tandem import formats
from tandem.paper.check import Line, Paper
from tandem.report.page import html

MARKS = {"read back": "ok", "too few events": "missing", "missed": "failed", "not measured": "missing"}
"""Status -> class of the style sheet."""


def render(paper: Paper) -> str:
    """The page as HTML text."""
    shown = {"value": _value, "interval": _interval, "origin": _origin, "extent": extent}
    return html("paper.html.j2", (), p=paper, headline=headline(paper), marks=MARKS, **shown)


def headline(paper: Paper) -> str:
    """The result in one line."""
    number = {status: sum(line.status == status for line in paper.lines) for status in MARKS}
    parts = [f"{formats.plural(number['read back'], 'value')} read back"]
    if number["too few events"]:
        parts.append(f"{number['too few events']} agree but rest on too few events")
    if number["missed"]:
        parts.append(f"{number['missed']} missed")
    if paper.unequal:
        parts.append(f"{formats.plural(len(paper.unequal), 'run')} NOT EQUAL to the injector's log")
    parts.append(f"{number['not measured']} not measured")
    return ", ".join(parts)


def extent(paper: Paper) -> str:
    """How much of the check it is."""
    if paper.most is not None:
        return f"cut to {formats.plural(paper.most, 'step')} a run"
    return "quick" if paper.quick else "full"


def text_lines(paper: Paper) -> list[str]:
    """The page for a terminal."""
    head = ("node", "quantity", "published", "measured", "interval", "events", "profile", "result")
    rows = [
        (
            formats.clean(line.node), formats.clean(line.quantity), formats.clean(line.published_text), _value(line),
            _interval(line), "–" if line.events is None else f"{line.events:,}", _origin(line),
            line.status if line.status != "not measured" else f"not measured: {formats.clean(line.why)}",
        )
        for line in paper.lines
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head) - 1)]
    table = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in [head, *rows]
    ]
    notes = [
        f"{formats.percent(paper.confidence)} intervals, each fault event one cluster; "
        f"fewer than {paper.enough_events} independent events are too few; fitted: the profile was fitted to this value"
    ]
    return [paper.label, "", f"{extent(paper)} check", *table, "", *notes, headline(paper)]


def _value(line: Line) -> str:
    if line.measured is None:
        return "–"
    if line.quantity.startswith("mismatch"):
        return "none seen" if line.measured == 0 else formats.scientific(line.measured)
    return f"{line.measured:.3g}"


def _interval(line: Line) -> str:
    if line.low is None or line.high is None:
        return "–"
    if line.measured == 0:
        return f"< {formats.scientific(line.high)}"
    return f"{formats.scientific(line.low)} to {formats.scientific(line.high)}"


def _origin(line: Line) -> str:
    if line.status == "not measured":
        return "–"
    return "fitted" if line.fitted else "as published"
