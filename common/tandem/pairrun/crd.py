"""The CustomResourceDefinition, generated from the spec and status models. Pure; ``make generate`` writes it out."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tandem.pairrun import workload
from tandem.pairrun.names import GROUP, KIND, PLURAL, SHORT, SINGULAR, VERSION
from tandem.pairrun.spec import MUTABLE, PairRunSpec
from tandem.pairrun.status import PairRunStatus

COLUMNS = (
    ("Suspect", "string", ".status.suspect.node"),
    ("Reference", "string", ".status.reference.node"),
    ("Workload", "string", ".spec.workload.name"),
    ("Step", "integer", ".status.step"),
    ("Mismatches", "integer", ".status.counts.mismatchedElements"),
    ("Verdict", "string", ".status.verdict"),
    ("Attempt", "integer", ".status.attempt"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def crd() -> dict[str, Any]:
    """The definition as a dict, ready for YAML."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": SINGULAR, "shortNames": [SHORT],
                "categories": ["tandem"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path} for name, kind, path in COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": _object()},
                }
            ],
        },
    }  # fmt: skip


def _object() -> dict[str, Any]:
    spec = structural(PairRunSpec)
    spec["properties"]["workload"] = workload.schema() | {"default": {}}
    spec["x-kubernetes-validations"] = _rules(spec)
    choice = {
        "rule": "!(has(self.nodeName) && has(self.selector))",
        "message": "give nodeName or selector, not both",
    }
    for side in ("suspect", "reference"):
        spec["properties"][side]["x-kubernetes-validations"] = [choice]
    volume = spec["properties"]["template"]["properties"]["volumes"]["items"]
    sources = ("persistentVolumeClaim", "configMap", "emptyDir", "hostPath")
    volume["x-kubernetes-validations"] = [
        {
            "rule": f"[{', '.join(f'has(self.{s})' for s in sources)}].filter(x, x).size() == 1",
            "message": f"give exactly one of {', '.join(sources)}",
        }
    ]
    variable = spec["properties"]["template"]["properties"]["env"]["items"]
    variable["x-kubernetes-validations"] = [
        {"rule": "!self.name.startsWith('TANDEM_')", "message": "the TANDEM_ variables are the controller's"}
    ]
    return {
        "type": "object",
        "description": "A run on a pair of nodes: a suspect is compared bit by bit with a healthy reference.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "tandem.dev/v1alpha1."},
            "kind": {"type": "string", "description": "PairRun."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural(PairRunStatus),
        },
    }


def _rules(spec: dict[str, Any]) -> list[dict[str, str]]:
    """What must not change, and what a later pod could never run."""
    rules = [
        {"rule": f"self.{name} == oldSelf.{name}", "message": f"{name} cannot be changed"}
        for name in spec["properties"]
        if name not in MUTABLE
    ]
    rules += [
        {
            "rule": "!has(self.suspect.nodeName) || !has(self.reference.nodeName)"
            " || self.suspect.nodeName != self.reference.nodeName",
            "message": "suspect and reference are the same node",
        },
        {
            "rule": "!has(self.workload.name) || self.workload.name != 'finetune' || has(self.workload.questions)",
            "message": "workload finetune needs questions",
        },
    ]
    return rules


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """A model's schema as Kubernetes takes it: no references, no null, defaults kept, lists of named objects marked."""
    raw = model.model_json_schema(by_alias=True)
    return _inline(raw, raw.get("$defs", {}))


_KEPT = (
    "type",
    "description",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "maxItems",
    "pattern",
    "required",
)


def _inline(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    described = node.get("description")
    has_default, default = "default" in node, node.get("default")
    if "anyOf" in node:
        node = next(option for option in node["anyOf"] if option.get("type") != "null")
    if "$ref" in node:
        node = defs[node["$ref"].rsplit("/", 1)[1]]
    out = {key: node[key] for key in _KEPT if key in node}
    if described:
        out["description"] = " ".join(described.split())
    if out.get("type") == "integer":
        out["format"] = "int64"
    if "properties" in node:
        out["properties"] = {name: _inline(value, defs) for name, value in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _inline(node["additionalProperties"], defs)
    if "patternProperties" in node:
        out["additionalProperties"] = _inline(next(iter(node["patternProperties"].values())), defs)
    if "items" in node:
        out["items"] = _inline(node["items"], defs)
        keys = {"name": "name", "type": "type", "number": "number"}
        named = [key for key in keys if key in out["items"].get("required", [])]
        if out["items"].get("type") == "object" and named:
            out |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": named[:1]}
    if has_default and default is not None:
        out["default"] = {} if isinstance(default, dict) else default
        if default == []:
            del out["default"]
    return out
