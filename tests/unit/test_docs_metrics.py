"""docs/metrics.md lists exactly the metrics that the processes tell, with their types and labels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

from expositions import api, controller, fleet, pair
from tandem_worker.metrics import PAIR

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
FILES = ROOT / "deploy" / "helm" / "tandem" / "files"


def listed(heading: str) -> dict[str, tuple[str, set[str]]]:
    """Metric -> its type and labels, from the table under a heading."""
    text = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| `(tandem_\w+)` \| (\w+) \| (.*?) \|", text, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in found}


@pytest.mark.parametrize(
    ("heading", "families", "common"),
    [
        ("A pair", pair, set(PAIR)),
        ("The controller", controller, set()),
        ("The fleet", fleet, set()),
        ("The API", api, set()),
    ],
    ids=["pair", "controller", "fleet", "api"],
)
def test_every_metric_is_on_the_page(heading: str, families: Callable[[], Iterable[Metric]], common: set[str]) -> None:
    there = {}
    for family in families():
        assert family.samples, family.name
        labels = {label for sample in family.samples for label in sample.labels} - common - {"le"}
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        there[family.name + suffix] = ("gauge" if family.type == "info" else family.type, labels)
    assert listed(heading) == there


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("expr", "query") and isinstance(inner, str):
                yield inner
            yield from expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)


@pytest.mark.parametrize("path", sorted((FILES / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_dashboards_ask_only_for_metrics_on_the_page(path: Path) -> None:
    known = listed("A pair") | listed("The controller") | listed("The fleet")
    used = {name for text in expressions(json.loads(path.read_text())) for name in re.findall(r"\btandem_\w+", text)}
    assert {re.sub(r"_(sum|count|bucket)$", "", name) for name in used} <= set(known)


def test_every_alert_is_on_the_page_with_its_severity() -> None:
    listed_alerts = dict(re.findall(r"^\| \[(\w+)\]\(runbooks/\1\.md\) \| (\w+) \|", PAGE, re.MULTILINE))
    rules = [yaml.safe_load(path.read_text()) for path in (FILES / "alerts").glob("*.yaml")]
    assert listed_alerts == {rule["alert"]: rule["labels"]["severity"] for rule in rules}
