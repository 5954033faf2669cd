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
