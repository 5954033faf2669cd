"""Draws an Altair chart as inline SVG in the page's own colours: dark mode and paper need no second picture.

vl-convert runs Vega inside this process: no browser, no network, no script in the page. A chart names its colours as
CSS variables of ``style.css`` (``var(--ink)``), which Vega hands through unread.
"""

from __future__ import annotations

import json
import re
import threading
from functools import cache, lru_cache
from typing import Any

import altair as alt
from markupsafe import Markup

INK, SOFT, LINE, PAPER = "var(--ink)", "var(--soft)", "var(--line)", "var(--bg)"
WIDTH = 640
"""Of a chart's plot, in pixels; the page scales the picture."""
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"

CONFIG: dict[str, Any] = {
    "aria": False,  # the picture has one name, and a table beside it
    "background": None,
    "padding": {"left": 16, "right": 12, "top": 6, "bottom": 6},  # a reader's fonts may be wider than those measured
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "domainColor": SOFT, "gridColor": LINE, "tickColor": SOFT, "labelColor": SOFT, "titleColor": INK,
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
    },
    "title": {"color": INK, "fontSize": 12, "fontWeight": "normal"},
    "legend": {
        "labelColor": INK, "titleColor": INK, "labelFontSize": 12, "orient": "top", "title": None, "symbolSize": 80,
        "symbolStrokeWidth": 2, "labelLimit": 400, "columnPadding": 36,
    },
}  # fmt: skip
"""Vega-Lite configuration of every chart."""


def draw(chart: alt.TopLevelMixin, name: str) -> Markup:
    """The chart as an ``<svg>`` element for a page; the same chart is drawn once per process.

    Args:
        chart: any Altair chart; its data stand in it.
        name: what a screen reader says of it.
    """
    spec = chart.to_dict()
    spec["config"] = CONFIG
    svg = _convert(json.dumps(spec, sort_keys=True))
    box = _found(r'viewBox="([\d. -]+)"', svg)
    inside = Markup(svg[svg.index(">") + 1 : svg.rindex("</svg>")])  # noqa: S704 - Vega escapes every text
    return Markup('<svg class="chart" viewBox="{}" role="img" aria-label="{}">{}</svg>').format(box, name, inside)


@cache
def warm_up() -> None:
    """Start Vega on another thread: it takes a second or two, in which the records can be read."""
    spec = json.dumps({"data": {"values": []}, "mark": "point"})
    threading.Thread(target=_convert, args=(spec,), daemon=True).start()


@lru_cache(maxsize=128)
def _convert(spec: str) -> str:
    import vl_convert

    return str(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None
    return match[1]
