"""What Tandem reads from nodes, as data: the quarantine signals, the likeness fields, the opt-outs."""

from __future__ import annotations

from importlib import resources
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from tandem.spec import validate

Key = Annotated[str, Field(min_length=1, max_length=317)]


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


class Signal(_Model):
    """One sign by which other software quarantines a node."""

    kind: Literal["unschedulable", "taint", "label", "condition"]
    key: Key | None = None
    """Taint key, label key or condition type; a final ``*`` stands for any ending (taints only)."""
    values: list[str] = []
    """Values of the label or statuses of the condition that count; none: any. Not for taints."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "unschedulable") is (self.key is not None):
            raise ValueError(f"{self.kind} takes {'no key' if self.key else 'a key'}")
        if self.key is not None and (self.key == "*" or ("*" in self.key[:-1])):
            raise ValueError(f"{self.key}: only a key's end may be left open")
        if self.key is not None and self.key.endswith("*") and self.kind != "taint":
            raise ValueError(f"{self.key}: only a taint's key may end in *")
        return self


class LabelMatch(_Model):
    key: Key
    values: list[str] = []
    """Values that count; none: any."""

    def matches(self, labels: dict[str, str]) -> bool:
        return self.key in labels and (not self.values or labels[self.key] in self.values)


class Likeness(_Model):
    """What must be equal on both nodes."""

    labels: list[Key] = []
    node_info: list[str] = []
    """Fields of ``status.nodeInfo``."""


class Policy(_Model):
    """Everything that pairing reads from nodes."""

    quarantine: list[Signal]
    device_taints: list[Key] = []
    likeness: Likeness = Likeness()
    opt_out: list[LabelMatch] = []
    tpu_topology_label: Key = "cloud.google.com/gke-tpu-topology"
    runs_per_reference: Annotated[int, Field(ge=1, le=1000)] = 1


def read_policy(values: Any) -> Policy:
    """A policy from its YAML's content; lists that are not given are those that ship with Tandem.

    Raises:
        SpecError: one line that names the field.
    """
    defaults = yaml.safe_load(resources.files("tandem.pairing").joinpath("policy.yaml").read_text(encoding="utf-8"))
    return validate(Policy, defaults | dict(values or {}), "policy")
