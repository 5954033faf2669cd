"""The workload of a PairRun: every field of the command line's run spec, in Kubernetes' spelling. Pure.

The fields are those of `tandem.spec.RunSpec`; none is written down twice. Kubernetes' API conventions ask for
camelCase, units in names, and no floats: seconds are whole numbers, and the optimizer's fields come as named strings.
"""

from __future__ import annotations

from typing import Any

from tandem.errors import SpecError
from tandem.spec import RunSpec, load_preset, validate
from tandem.vocabulary import Kind

ELSEWHERE = ("kind",)
"""Fields of the run spec that have their own place in the PairRun."""
SECONDS = ("duration", "step_timeout", "peer_timeout")
"""Fields in seconds: named ``...Seconds``, whole numbers."""


def field_name(name: str) -> str:
    """The PairRun's name of a field of the run spec: ``step_timeout`` is ``stepTimeoutSeconds``."""
    if name == "workload":
        return "name"
    head, *tail = (f"{name}_seconds" if name in SECONDS else name).split("_")
    return head + "".join(part.capitalize() for part in tail)


FIELDS = {field_name(name): name for name in RunSpec.model_fields if name not in ELSEWHERE}
"""PairRun field -> run spec field."""


def to_run_spec(workload: dict[str, Any], kind: Kind) -> RunSpec:
    """The run spec that a PairRun's workload asks for.

    Raises:
        SpecError: one line that names the field as the PairRun spells it.
    """
    values: dict[str, Any] = {"kind": kind}
    for name, value in workload.items():
        if name not in FIELDS:
            raise SpecError(f"workload: {name}: no such field")
        values[FIELDS[name]] = _optimizer(value) if name == "optimizer" else value
    try:
        spec = validate(RunSpec, values, "workload")
    except SpecError as error:
        raise SpecError(_spelled(str(error))) from None
    load_preset(spec.model)
    return spec


def from_run_spec(spec: RunSpec) -> dict[str, Any]:
    """The workload of a PairRun that runs what a local spec runs; only what differs from the default.

    Raises:
        SpecError: a field has no equal in a PairRun (parts of a second).
    """
    values = spec.model_dump(mode="json", exclude_unset=True)
    workload: dict[str, Any] = {}
    for name, field in FIELDS.items():
        if (value := values.get(field)) is None:
            continue
        if field == "optimizer":
            value = [{"name": key, "value": _text(item)} for key, item in sorted(value.items())]
        elif field in SECONDS:
            if value != int(value):
                raise SpecError(f"{field} {value}: a PairRun takes whole seconds")
            value = int(value)
        if value != []:
            workload[name] = value
    return workload


def schema() -> dict[str, Any]:
    """OpenAPI schema of the workload, from the run spec's own."""
    model = RunSpec.model_json_schema()
    properties = {}
    for name, field in FIELDS.items():
        properties[name] = _property(field, model["properties"][field], model.get("$defs", {}))
    return {"type": "object", "description": "What the pair runs.", "properties": properties}


def _property(field: str, raw: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    described = DESCRIPTIONS[field]
    if field == "optimizer":
        return {
            "type": "array",
            "description": described,
            "maxItems": 16,
            "items": {
                "type": "object",
                "required": ["name", "value"],
                "properties": {
                    "name": {"type": "string", "description": "Field of the optimizer.", "maxLength": 64},
                    "value": {"type": "string", "description": "Its value, as text.", "maxLength": 64},
                },
            },
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        }
    options = [option for option in raw.get("anyOf", [raw]) if option.get("type") != "null"]
    found = dict(options[0])
    if "$ref" in found:
        found = {k: v for k, v in defs[found["$ref"].rsplit("/", 1)[1]].items() if k in ("type", "enum")}
    out: dict[str, Any] = {"description": described}
    kind = found["type"]
    if field in SECONDS:
        out |= {"type": "integer", "minimum": 1, "format": "int64"}
    elif kind == "integer":
        out |= {"type": "integer", "format": "int64", **_bounds(found)}
    elif kind == "array":
        out |= {"type": "array", "maxItems": 64, "items": _PATH}
    elif field == "fault":
        out |= _PROFILE
    elif found.get("format") == "path":
        out |= _PATH
    elif kind == "boolean":
        out |= {"type": "boolean"}
    elif "const" in found:
        out |= {"type": "string", "enum": [found["const"]]}
    else:
        out |= {"type": "string"} | ({"enum": found["enum"]} if "enum" in found else {"maxLength": 253})
    if field == "sync":
        out["enum"] = [value for value in out["enum"] if value != "none"]
    if (default := raw.get("default")) not in (None, [], {}) and field not in UNSET:
        out["default"] = int(default) if field in SECONDS else default
    return out


_PATH = {"type": "string", "maxLength": 4096, "pattern": "^/"}
"""A path in the pods."""
_PROFILE = {"type": "string", "maxLength": 4096, "pattern": r"^(/.*|[A-Za-z0-9][A-Za-z0-9._-]*)$"}
"""A path in the pods, or a name."""
UNSET = ("model", "steps", "tp")
"""Fields whose absence means something: the weights' own preset, a run that only time ends, the node's devices. The API
server writes a schema's default into each object, which then says what its user never said."""

DESCRIPTIONS = {
    "workload": "What the pair runs.",
    "model": "Name of a preset. Default: tiny, or the preset that fits the weights.",
    "weights": "Folder in the pods with Hugging Face config.json and safetensors. Default: random weights.",
    "data": "Text files in the pods to train on. Default: the source text of Python's standard library.",
    "tokenizer": "A tokenizer.json in the pods. Default: bytes.",
    "tp": "Tensor-parallel ranks, one device each. Default: as many of the node's devices as the model can be "
    "split over; on CPUs 2.",
    "steps": "Optimizer steps. Default: 20, or none if durationSeconds is given.",
    "duration": "Seconds after which the run ends with the step it is in.",
    "seed": "Of initial weights and data order.",
    "sync": "Submodule, gradient: how the two sides are kept equal.",
    "window": "Most unconfirmed sites in optimistic mode.",
    "fault": "A fault profile (TOML) in the pods, or the name of a shipped one; makes the run synthetic for ever.",
    "replays": "How often a mismatching submodule is run again on the same inputs.",
    "replay_budget": "Mismatching sites replayed per step, the first in site order.",
    "self_replays": "How often each program is run on the same inputs at the start and at the end.",
    "row_cap": "Mismatch rows kept per run; totals stay exact.",
    "step_timeout": "Seconds without progress after which a step is hung.",
    "peer_timeout": "Seconds without any frame after which the peer is dead.",
    "batch": "Sequences per step. Default: the preset's.",
    "sequence": "Tokens per sequence. Default: the preset's.",
    "compute": "Compute dtype. Default: the preset's.",
    "accumulate": "dtype in which the ranks' partials are added. Default: the preset's.",
    "optimizer": "Overrides of the preset's optimizer fields.",
    "exchange_mib": "Whole-step workloads: most MiB of a differing tensor that are exchanged at once.",
    "exact_every": "Training, finetune: the drift is measured exactly every so many steps and at the end.",
    "exact_mib": "Training, finetune: MiB of parameters up to which it also is where a sketch cannot be trusted.",
    "baseline": "Training, finetune: a later phase on the reference node with another seed.",
    "checkpoints": "Training, finetune: folder in the pods for checkpoints, on a volume that outlives them; "
    "a later attempt goes on from there.",
    "checkpoint_every": "Steps between checkpoints; 0: only at the end.",
    "resume": "Go on from the last step that both sides hold in checkpoints.",
    "start": "A checkpoint in the pods from which both sides start.",
    "questions": "Finetune: JSON Lines files in the pods with multiple-choice questions, one a task.",
    "held_out_percent": "Finetune: share of the questions that is never trained on and is evaluated.",
    "scoring": "Finetune: score of a choice: mean log-likelihood of its tokens, or that of its letter.",
    "packed": "Finetune: several questions a row instead of one.",
    "evaluate_every": "Finetune: steps between evaluations; 0: only at the end.",
}


def _bounds(found: dict[str, Any]) -> dict[str, int]:
    """Inclusive bounds."""
    low = found.get("minimum", found.get("exclusiveMinimum", 0) + 1 if "exclusiveMinimum" in found else None)
    high = found.get("maximum", found["exclusiveMaximum"] - 1 if "exclusiveMaximum" in found else None)
    # The API server reads bounds as floats; an int64 has its own largest value.
    bounds = {"minimum": low, "maximum": high if high is not None and high <= 2**53 else None}
    return {k: int(v) for k, v in bounds.items() if v is not None}


def _optimizer(items: Any) -> Any:
    if not isinstance(items, list):
        return items
    return {str(item.get("name")): _value(item.get("value")) for item in items if isinstance(item, dict)}


def _value(text: Any) -> Any:
    """A value of the optimizer: a number, null, or a word."""
    if text == "null":
        return None
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _spelled(message: str) -> str:
    """An error of the run spec with its fields spelled as in the PairRun."""
    what, _, rest = message.partition(": ")
    field, _, fault = rest.partition(": ")
    names = {field: name for name, field in FIELDS.items()}
    return f"{what}: {names.get(field, field)}: {fault}" if fault else message
