"""The chart's alerts, and which labels they look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "helm" / "tandem" / "files" / "alerts"
_METRIC = r"\btandem_\w+"


def rule(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return found


def matchers(inner: str) -> list[tuple[str, str, str]]:
    """Label, operator and value of each matcher in a selector's braces."""
    return re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', inner)


def looked_at(expression: str) -> Iterator[tuple[str, str, set[str]]]:
    """Series, label, and the values that it is compared with: of each matcher, and of each grouping without values."""
    assert not re.search(r"\b(without|on|ignoring|group_left|group_right)\b", expression), "these are not read here"
    for metric, inner in re.findall(rf"({_METRIC})(?:\{{(.*?)\}})?", expression, re.DOTALL):
        for label, operator, value in matchers(inner):
            yield metric, label, set(value.split("|") if "~" in operator else [value])
    groupings = list(re.finditer(r"\bby \(([^)]*)\) \(", expression))
    assert len(groupings) == len(re.findall(r"\bby\b", expression))
    for by in groupings:
        depth, end = 1, by.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(expression[end], 0)
            end += 1
        for metric in re.findall(_METRIC, expression[by.end() : end]):
            for label in re.split(r",\s*", by[1]):
                yield metric, label, set()
