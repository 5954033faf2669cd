"""What a page shows, read back from its HTML."""

from __future__ import annotations

import html
import math
import re


def cells(text: str, label: str) -> list[list[str]]:
    """The body rows of the table whose region has that name."""
    found = re.search(rf'aria-label="{re.escape(label)}"[^>]*><table.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    assert found, label
    rows = re.findall(r"<tr.*?</tr>", found[1], re.DOTALL)
    texts = ([re.sub(r"<small>.*?</small>|<[^>]+>", "", c) for c in re.findall(r"<t[hd].*?</t[hd]>", r)] for r in rows)
    return [[html.unescape(text).strip() for text in row] for row in texts]


def value(text: str) -> float:
    return math.nan if text in ("–", "-", "") else float(text.replace(",", ""))


def strip(text: str, label: str) -> str:
    """A number of the strip under the verdict."""
    found = re.search(rf"<dt>{re.escape(label)}(?:<small>.*?</small>)?</dt><dd>(.*?)</dd>", text)
    assert found, label
    return found[1]


def smalls(text: str, label: str) -> list[list[list[str]]]:
    """The small print of each cell of the table whose region has that name, row by row."""
    found = re.search(rf'aria-label="{re.escape(label)}"[^>]*><table.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    assert found, label
    rows = re.findall(r"<tr.*?</tr>", found[1], re.DOTALL)
    return [
        [
            [html.unescape(s) for s in re.findall(r"<small>(.*?)</small>", c)]
            for c in re.findall(r"<t[hd].*?</t[hd]>", r)
        ]
        for r in rows
    ]


def titled(text: str, title: str) -> list[list[str]]:
    """The body rows of the table below that heading."""
    found = re.search(rf"<h3>{re.escape(title)}</h3>\s*<div[^>]*><table>.*?<tbody>(.*?)</tbody>", text, re.DOTALL)
    assert found, title
    rows = re.findall(r"<tr.*?</tr>", found[1], re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", c)).strip() for c in re.findall(r"<t[hd].*?</t[hd]>", r)] for r in rows
    ]


def pairs(text: str) -> dict[str, str]:
    """Terms and what stands beside them."""
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text, re.DOTALL)
    return {html.unescape(term): html.unescape(re.sub(r"<[^>]+>", "", what)).strip() for term, what in found}
