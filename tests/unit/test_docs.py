"""The pages under docs/ name exactly what the code has: commands, fields, columns, reasons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from tandem.cli.app import app
from tandem.db.models import Base
from tandem.faults.profile import Burst, Fault, FaultProfile
from tandem.runs.attempt import NODE_DEVICES
from tandem.runs.conclusive import REQUIRED_PARITY
from tandem.spec import ModelConfig, OptimizerConfig, Preset, RunSpec, Training, preset_names
from tandem.vocabulary import Cause, ControlName, Extent, ReplayClass
from tandem_worker.watchdog import Reason

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MARKDOWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    start = re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE)
    assert start, f"no heading {heading!r}"
    end = re.search(r"^#+ ", text[start.end() :], re.MULTILINE)
    return text[start.end() : start.end() + end.start()] if end else text[start.end() :]


def rows(text: str) -> list[list[str]]:
    """The cells of every table line, without headers and rulers."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rulers = {i for i, cells in enumerate(found) if all(re.fullmatch(r":?-+:?", c) for c in cells)}
    return [cells for i, cells in enumerate(found) if i not in rulers and i + 1 not in rulers]


def names(text: str) -> set[str]:
    """The code words in the first cells of the tables."""
    return {word for cells in rows(text) for word in re.findall(r"`([^`]+)`", cells[0])}


# -- commands ------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    root = typer.main.get_command(app)
    todo: list[tuple[str, Any]] = [("tandem", root)]
    while todo:
        name, command = todo.pop(0)
        yield name, command
        if hasattr(command, "commands"):
            todo += [(f"{name} {child}", found) for child, found in command.commands.items()]


def parameters(command: Any) -> set[str]:
    found = set()
    for parameter in command.params:
        if parameter.param_type_name == "option":
            found |= {*parameter.opts, *parameter.secondary_opts}
        else:
            found.add(str(parameter.metavar or parameter.name))
    return found


@pytest.mark.parametrize(
    ("name", "command"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_and_option_is_on_its_page(name: str, command: Any) -> None:
    text = section(page("cli.md"), name)
    assert names(text) == parameters(command)


def test_the_page_of_commands_has_no_others() -> None:
    headings = re.findall(r"^#+ (tandem.*)$", page("cli.md"), re.MULTILINE)
    assert headings == sorted(headings, key=headings.index)
    assert set(headings) == {name for name, _ in commands()}


# -- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "heading", "model"),
    [
        ("spec.md", "The run spec", RunSpec),
        ("spec.md", "A preset", Preset),
        ("spec.md", "The model", ModelConfig),
        ("spec.md", "The training shape", Training),
        ("spec.md", "The optimizer", OptimizerConfig),
        ("faults.md", "The profile", FaultProfile),
        ("faults.md", "A fault", Fault),
        ("faults.md", "A burst", Burst),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_field_is_on_its_page(file: str, heading: str, model: type[BaseModel]) -> None:
    listed = {
        re.findall(r"`([^`]+)`", cells[0])[0]: cells[1].strip("`") for cells in rows(section(page(file), heading))
    }
    assert set(listed) == set(model.model_fields)
    for name, field in model.model_fields.items():
        if field.is_required():
            assert listed[name] == "required", name
        elif isinstance(field.default, (bool, int, float, str)) or field.default is None:
            shown = {None: "none", True: "true", False: "false"}.get(field.default, str(field.default))
            assert listed[name].replace(",", "") == shown or float(listed[name].replace(",", "")) == field.default, name


def test_every_preset_is_named() -> None:
    assert names(section(page("spec.md"), "Presets")) == set(preset_names())


def test_every_column_is_on_the_page_of_records() -> None:
    text = page("records.md")
    for name, table in Base.metadata.tables.items():
        assert names(section(text, name)) == {column.name for column in table.columns}, name
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) == set(Base.metadata.tables)


@pytest.mark.parametrize(
    ("heading", "words"),
    [("Causes", Cause), ("Replay classes", ReplayClass), ("Extents", Extent), ("Controls", ControlName)],
)
def test_every_word_of_a_record_is_explained(heading: str, words: type[Cause]) -> None:
    assert names(section(page("records.md"), heading)) == {str(word) for word in words}


def test_every_parity_field_is_on_the_page_of_determinism() -> None:
    listed = names(section(page("determinism.md"), "What must be equal"))
    assert listed == {*REQUIRED_PARITY, NODE_DEVICES, "program.<name>"}


# -- reasons -------------------------------------------------------------------------------------------

RAISED = {
    "PairError": 0,
    "LinkError": 0,
    "Refuse": 0,
    "fail": 0,
    "_fail": 1,
    "say_bye": 0,
    "_inconclusive": 0,
    "Failed": 0,
}
"""Calls that name a reason, with the place of that argument."""


def reasons_of(path: Path) -> Iterator[str]:
    """Reasons named in a source file; a formatted part reads ``*``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        found: ast.expr | None = None
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            place = RAISED.get(name)
            keyword = next((k.value for k in node.keywords if k.arg == "reason"), None)
            found = keyword or (node.args[place] if place is not None and len(node.args) > place else None)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and path.name == "conclusive.py":
            found = node.value.elts[0]
        elif isinstance(node, ast.Assign) and path.name == "supervisor.py":
            found = node.value if getattr(node.targets[0], "attr", "") == "reason" else None
        elif isinstance(node, ast.FunctionDef) and node.name == "_why":
            for end in (n.value for n in ast.walk(node) if isinstance(n, ast.Return)):
                yield from _text(end.body) + _text(end.orelse) if isinstance(end, ast.IfExp) else _text(end)
        yield from _text(found)


def _text(node: ast.expr | None) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values)]
    return []


def reasons_in_the_code() -> set[str]:
    files = [*(ROOT / "common").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    files = [path for path in files if "cli" not in path.parts]
    found = {reason for path in files for reason in reasons_of(path)}
    return {r for r in found if re.fullmatch(r"[a-z_:*]+", r) and r not in {"*", "*:*"}} | {str(r) for r in Reason}


def test_every_reason_is_explained() -> None:
    listed = names(page("reasons.md"))
    patterns = {r: re.compile(re.escape(r).replace(r"\*", r".+")) for r in reasons_in_the_code()}
    missing = [r for r, pattern in patterns.items() if not any(pattern.fullmatch(name) for name in listed)]
    assert not missing, "docs/reasons.md lacks these"


def test_no_reason_is_explained_that_cannot_occur() -> None:
    known = [re.compile(re.escape(r).replace(r"\*", r".+")) for r in reasons_in_the_code()]
    source = "".join(p.read_text(encoding="utf-8") for d in ("common", "worker") for p in (ROOT / d).rglob("*.py"))
    stale = [
        name
        for name in names(page("reasons.md"))
        if not any(pattern.fullmatch(name) for pattern in known) and f'"{name}"' not in source
    ]
    assert not stale, "docs/reasons.md has these for nothing"


# -- links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}, target


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in sorted(DOCS.glob("*.md")) if f"docs/{p.name}" not in text] == []
