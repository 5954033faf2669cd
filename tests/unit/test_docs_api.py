"""docs/api.md names exactly what the API has: routes, problems, events, settings."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tandem_api.live import hub, read
from tandem_api.routes.events import _EVENT
from tandem_api.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")
API = ROOT / "api/tandem_api"


def table(heading: str) -> dict[str, list[str]]:
    """First cells, without their code marks, to the other cells of the table below a heading."""
    start = re.search(rf"^## {heading}$", PAGE, re.MULTILINE)
    assert start, heading
    end = PAGE.find("\n## ", start.end())
    lines = [line for line in PAGE[start.end() : end if end > 0 else None].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_route_is_on_the_page() -> None:
    document = json.loads((ROOT / "docs/openapi.json").read_text(encoding="utf-8"))
    routes = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    assert set(table("Routes")) == routes


def problems_in_the_code() -> set[tuple[str, int]]:
    """Names and statuses of the problems that the code makes."""
    found: set[tuple[str, int]] = set()
    for path in API.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if name == "Problem" and len(words) > 1 and isinstance(words[0], int):
                found.add((str(words[1]), int(words[0])))
            elif name == "away":
                found.add((str(words[-1]) if len(node.args) > 1 and words else "database-away", 503))
    return found | {("not-found", 404), ("method-not-allowed", 405)}


def test_every_problem_is_on_the_page() -> None:
    listed = {(name, int(s)) for name, cells in table("Errors").items() for s in cells[0].split(",")}
    assert listed == problems_in_the_code()


def test_every_event_is_on_the_page_and_in_the_document() -> None:
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (hub, read))
    made = set(re.findall(r'event\(\s*"(\w+)"', source))
    assert set(table("Events")) == made == set(_EVENT["properties"]["event"]["enum"])  # type: ignore[index]


def fields(model: type[BaseModel], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in model.model_fields.values():
        name = f"{before}{field.alias}"
        if isinstance(field.default, BaseModel):
            out |= fields(type(field.default), f"{name}.")
        else:
            out[name] = field.default
    return out


@pytest.mark.parametrize(("name", "default"), list(fields(Settings).items()), ids=str)
def test_every_setting_is_on_the_page(name: str, default: Any) -> None:
    shown = json.dumps(default) if not isinstance(default, (list, str)) else str(default).replace("'", "")
    assert table("Settings")[name][0].strip("`") == shown


def test_no_other_setting_is() -> None:
    assert set(table("Settings")) == set(fields(Settings))
