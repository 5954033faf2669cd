"""The reports in a real Chromium: a silent console, no request that leaves the page, legible by night and on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raw_runs import finetune_run, gradient_run, submodule_run, training_run
from sample_nodes import sample_node
from sample_runs import sample_run
from tandem.paper.check import CHECKS
from tandem.paper.check import paper as instrument_check
from tandem.report import node_page, paper
from tandem.report.run_page import render

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}"
PAGES = {
    "submodule": lambda: render(submodule_run().records),
    "gradient": lambda: render(gradient_run().records),
    "training": lambda: render(training_run(resumed=True).records),
    "fine-tuning": lambda: render(finetune_run()),
    "instrument check": lambda: paper.render(
        instrument_check(dict.fromkeys(CHECKS, "left out") | {CHECKS[1]: sample_run(synthetic=True)}, quick=True)
    ),
    "node": lambda: node_page.render(sample_node()),
    "hostile run": lambda: render(sample_run(rows=40, evil=EVIL)),
    "hostile node": lambda: node_page.render(sample_node(evil=EVIL)),
}

FAINT = """
(() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const paper = parse(getComputedStyle(document.body).backgroundColor);
  const faint = [];
  for (const mark of document.querySelectorAll('svg.chart text, svg.chart path, svg.chart rect')) {
    const style = getComputedStyle(mark), text = mark.tagName === 'text';
    for (const colour of text ? [style.fill] : [style.fill, style.stroke]) {
      if (!colour.startsWith('rgb') || mark.closest('.role-axis-grid, .mark-rule, .mark-rect.role-mark')) continue;
      if (mark.classList.contains('background')) continue;
      const least = text ? 4.5 : 3;
      if (ratio(parse(colour), paper) < least) faint.push([mark.tagName, mark.textContent, colour]);
    }
  }
  return faint;
})()
"""
"""Marks of charts with too little contrast with the page: WCAG 2.2 asks 4.5 for text, 3 for graphics."""

PAPER = {"media": "print", "width": 718}
"""A4 without its margins, in CSS pixels."""

COLOURS = """
[...new Set([...document.querySelectorAll('h1, td, svg.chart text')].map(
  t => t.tagName === 'text' ? getComputedStyle(t).fill : getComputedStyle(t).color))].sort()
"""
"""Of the words on a page and in its charts."""


@pytest.fixture(scope="module")
def tab() -> Iterator[object]:
    from browser import chromium  # its library is no part of what a machine without Chromium needs

    with chromium() as open_tab:
        yield open_tab


@pytest.mark.parametrize("name", PAGES)
def test_in_chromium(name: str, tab, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), encoding="utf-8")
    tab.requests.clear()
    looks = {
        "light": {},
        "dark": {"dark": True},
        "paper": PAPER,
        "paper, dark": PAPER | {"dark": True},
        "telephone": {"width": 390},
    }
    inks = {}
    for look, wanted in looks.items():
        tab.look(**wanted)
        tab.open(path)
        assert tab.ask(FAINT) == [], look
        inks[look] = tab.ask(COLOURS)
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth"), look
    assert inks["light"] != inks["dark"]
    assert inks["paper"] == inks["paper, dark"]
    assert tab.ask("document.querySelectorAll('script, img, iframe, link').length") == 0
    assert set(tab.requests) == {path.as_uri()}
    assert tab.said == []
    tab.paper(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF-")


def test_a_request_and_an_error_would_be_seen(tab, tmp_path: Path) -> None:
    """The test above would fail for a page that asks for something or says something."""
    path = tmp_path / "page.html"
    path.write_text("<!doctype html><img src=other.png><script>console.error('x'); nothing()</script>")
    tab.look()
    tab.requests.clear()
    tab.open(path)
    assert {url.rsplit("/", 1)[1] for url in tab.requests} == {"page.html", "other.png"}
    assert any("console" in line for line in tab.said)
    assert any("exception" in line for line in tab.said)
    tab.said.clear()
