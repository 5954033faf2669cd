"""The launch form: the run spec's fields as controls, and what was typed as an order. Pure."""

from __future__ import annotations

import shlex
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import yaml
from pydantic import ValidationError

from tandem.spec import RunSpec
from tandem_api.launch.launcher import Order

ALWAYS = ("workload", "kind", "model", "steps")
"""Fields that stand in the spec also where they are as by default: what was seen is what is meant."""
OPEN = ("tp",)
"""Fields that are empty at first, and stand in the spec once they are not: left out, they are the node's to decide."""
FIRST = ("workload", "kind", "model", "tp", "steps", "duration", "seed", "fault")
"""Fields that are shown at once; the others open."""
HINTS = {
    "workload": "submodule: phase by phase (RQ1) · gradient: whole steps (RQ2) · training, finetune: drift (RQ3)",
    "kind": "suspect: the ordinary pair · null: two healthy nodes, must match · swap: another reference",
    "model": "preset: the model and the shape of its steps",
    "weights": "folder with config.json and safetensors, from the root; replaces the preset's model",
    "data": "text files from the root, one a line; none: Python's standard library",
    "tokenizer": "tokenizer.json or SentencePiece model, from the root; none: bytes",
    "tp": "tensor-parallel ranks, one device each; empty: as many as fit, on CPUs 2",
    "steps": "optimizer steps; empty with a duration: time ends the run",
    "duration": "seconds; the step that is going on is finished",
    "seed": "of initial weights and data order",
    "sync": "submodule, gradient: all three record the same mismatches",
    "window": "most unconfirmed sites in optimistic mode",
    "fault": "injects corruption on purpose; the run is synthetic for ever",
    "replays": "repeats of a mismatching program, on both sides",
    "replay_budget": "mismatching sites replayed per step",
    "self_replays": "repeats of every executable, at start and end",
    "row_cap": "mismatch rows kept; totals stay exact",
    "step_timeout": "seconds without progress: hung",
    "peer_timeout": "seconds without a frame: dead",
    "batch": "sequences per step; empty: the preset's",
    "sequence": "tokens per sequence; empty: the preset's",
    "compute": "dtype; empty: the preset's",
    "accumulate": "dtype in which ranks are summed; empty: the preset's",
    "optimizer": "overrides, one `field: value` a line",
    "exchange_mib": "gradient, training, finetune: MiB of a tensor exchanged at once",
    "exact_every": "training, finetune: steps between exact drifts",
    "exact_mib": "training, finetune: MiB a side measured exactly anyway",
    "baseline": "training, finetune: a later phase with another seed",
    "checkpoints": "training, finetune: folder from the root",
    "checkpoint_every": "steps; 0: at the end",
    "resume": "training, finetune: go on from the last checkpoint of both sides",
    "start": "training, finetune: one checkpoint from the root to start from",
    "questions": "finetune: JSON Lines files from the root, one a line",
    "held_out_percent": "finetune: percent of the questions that are never trained on",
    "scoring": "finetune: by the mean log-likelihood of a choice, or by its letter",
    "packed": "finetune: several questions a row",
    "evaluate_every": "finetune: steps; 0: at the end",
}  # fmt: skip
"""A few words on each field; docs/spec.md has more."""


@dataclass(frozen=True, slots=True)
class Control:
    """One field of the form."""

    name: str
    label: str
    hint: str
    kind: str
    """``select``, ``number``, ``text``, ``lines`` or ``check``."""
    default: str
    """As it stands in the control."""
    options: tuple[str, ...] = ()
    """Of a select; "" is none."""


def controls(models: Iterable[str], faults: Iterable[str]) -> list[Control]:
    """Every field of the run spec, in its order.

    Args:
        models: names of presets.
        faults: names of shipped fault profiles.
    """
    out = []
    for name, field in RunSpec.model_fields.items():
        kind, options = _kind(field.annotation)
        if name == "model":
            kind, options = "select", tuple(models)
        elif name == "fault":
            kind, options = "select", ("", *faults)
        default = "" if name in OPEN else _shown(field.default)
        out.append(Control(name, name.replace("_", " "), HINTS.get(name, ""), kind, default, options))
    return out


def order(fields: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """What a form asks for, as the body of ``POST /v1/runs``: only what is not as by default.

    Args:
        fields: of the form; those of another name are left out.

    Raises:
        ValueError: (field, message): a text is no YAML.
    """
    given = dict(fields)
    out: dict[str, Any] = {}
    for name in ("node", "reference"):
        if chosen := given.get(name, "").strip():
            out[name] = chosen
    spec: dict[str, Any] = {}
    for name, field in RunSpec.model_fields.items():
        kind, _ = _kind(field.annotation)
        typed = given.get(name, "").replace("\r\n", "\n").strip()
        if kind == "check":
            value: Any = typed == "true"
        elif not typed:
            if name == "steps" and name in given and not given.get("duration", "").strip():
                spec[name] = None  # an emptied field is no wish for the default: the spec says what it needs
            continue
        elif name == "optimizer":
            value = _mapping(name, typed)
        elif kind == "lines":
            value = [line.strip() for line in typed.splitlines() if line.strip()]
        else:
            value = _number(typed) if kind == "number" else typed
        if name in (*ALWAYS, *OPEN) or _shown(value) != _shown(field.default):
            spec[name] = value
    out["spec"] = spec
    if typed := given.get("cluster", "").strip():
        out["cluster"] = _mapping("cluster", typed)
    return out


def read(body: Mapping[str, Any]) -> tuple[Order | None, dict[str, str]]:
    """The order of a body; or, by field, what is wrong with it."""
    try:
        return Order.model_validate(body), {}
    except ValidationError as error:
        wrong: dict[str, str] = {}
        for each in error.errors():
            message = each["msg"].removeprefix("Value error, ")
            wrong.setdefault(_field(each["loc"]), message)
        return None, wrong


def place(where: str) -> str:
    """The form's field that a problem's ``body.spec.steps`` means; "" for none of its own."""
    return _field(tuple(where.split(".")[1:]))


def spec_yaml(body: Mapping[str, Any]) -> str:
    """The file that ``tandem run`` takes."""
    return str(yaml.safe_dump(dict(body["spec"]), sort_keys=False, allow_unicode=False, width=100))


def object_yaml(made: Mapping[str, Any]) -> str:
    """The PairRun that ``kubectl create -f`` takes: as the API would make it, named by the cluster."""
    meta = made["metadata"]
    stem = str(meta["name"]).rpartition("-")[0]
    shown = {**made, "metadata": {"generateName": f"{stem}-", "namespace": meta["namespace"]}}
    return str(yaml.safe_dump(shown, sort_keys=False, allow_unicode=False, width=100))


def curl(url: str, body: Mapping[str, Any]) -> str:
    """The same order by REST, for a shell that has a token in ``$T``."""
    text = msgspec.json.encode(dict(body)).decode()
    return (
        f"curl -H \"Authorization: Bearer $T\" -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(text)} \\\n  {shlex.quote(f'{url}/v1/runs')}"
    )


def _field(loc: tuple[Any, ...]) -> str:
    names = [str(part) for part in loc]
    if names[:1] == ["spec"]:
        return names[1] if len(names) > 1 and names[1] in RunSpec.model_fields else ""
    return names[0] if names[:1] and names[0] in ("node", "reference", "cluster") else ""


def _kind(annotation: Any) -> tuple[str, tuple[str, ...]]:
    """Kind of control of a type, and its options."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [part for part in get_args(annotation) if part is not types.NoneType]
        kind, options = _kind(inner[0])
        return kind, ("", *options) if options else ()
    if get_origin(annotation) is Literal:
        return "select", tuple(map(str, get_args(annotation)))
    if get_origin(annotation) in (list, dict):
        return "lines", ()
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return "select", tuple(str(value) for value in annotation if value != "none")
    if annotation is bool:
        return "check", ()
    if annotation in (int, float):
        return "number", ()
    assert annotation in (str, Path), annotation
    return "text", ()


def _shown(value: Any) -> str:
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, bool):
        return "true" if value else ""
    return f"{value:g}" if isinstance(value, float) and value < 1e15 else str(value)


def _number(text: str) -> Any:
    """The number that a text is, else the text: the spec then says what is wrong with it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _mapping(name: str, text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(name, "is no YAML: write one `field: value` a line") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(name, "is no list of `field: value` lines")
    return found
