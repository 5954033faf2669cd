"""What is generated is what the code would generate now; what the docs list is what the chart has. Needs no Helm."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tandem.pairrun import generate

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "tandem"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_crd_is_not_stale() -> None:
    assert (CHART / "files" / "crd.yaml").read_text() == generate.text(), "run `make generate`"


def test_the_version_is_the_project_s() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]
    versions = re.findall(r"^ARG VERSION=(.+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert set(versions) == {PROJECT["version"]}


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key != "resources":
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_the_docs_name_every_value_with_its_default() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    section = page.split("## Values\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| `")]
    told = {row[0].strip().strip("`"): row[1].strip().strip("`") for row in rows}
    values = {key: json.dumps(value) for key, value in leaves(VALUES)}
    assert set(told) == set(values)
    assert {key: json.dumps(yaml.safe_load(text)) for key, text in told.items()} == values


def test_the_schema_is_closed_and_knows_every_value() -> None:
    """An object is closed unless its keys are the user's or Kubernetes' own."""

    def look(schema: dict[str, Any], values: Any, path: str) -> None:
        if not isinstance(values, dict) or "properties" not in schema:
            return
        assert schema["additionalProperties"] is False, path
        assert set(values) <= set(schema["properties"]), path
        for key, value in values.items():
            inner = schema["properties"][key]
            if "$ref" in inner:
                inner = SCHEMA["$defs"][inner["$ref"].rsplit("/", 1)[1]]
            look(inner, value, f"{path}.{key}")

    look(SCHEMA, VALUES, "")
    assert set(SCHEMA["properties"]) == {*VALUES, "global"}
