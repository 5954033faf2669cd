"""What all answers share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tandem.vocabulary import Kind, Verdict, Workload

RUN = "0199a1b2-3c4d-7e5f-8a6b-7c8d9e0f1a2b"
AT = 1790000000.25


class Answer(BaseModel):
    """An answer holds exactly the documented keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def shown(example: Any, description: str = "") -> Any:
    """A required field with an example; it may be null only where its type says so."""
    return Field(examples=[example], description=description or None)


class NextPage(Answer):
    """Of every list."""

    next_page_token: str | None = shown(None, "`page_token` of the next page; null: this is the last.")


class Rate(Answer):
    value: float = shown(0.003, "Point estimate.")
    low: float = shown(0.001, "Lower end of the 95 % interval.")
    high: float = shown(0.006, "Upper end.")
    effective: float | None = shown(20.0, "Independent observations that it is worth.")


class Bound(Answer):
    """What a clean run excludes."""

    confidence: float = shown(0.95)
    steps: int = shown(2000)
    per_step: float | None = shown(0.0015, "Corruption in a larger share of steps is excluded.")
    device_hours: float = shown(0.6)
    per_device_hour: float | None = shown(5.0)
    elements: int = shown(420_000_000_000)
    per_element: float | None = shown(7.1e-12)


class Counted(Answer):
    sites: int = shown(17, "Tensors.")
    elements: int = shown(1204)


class Timing(Answer):
    """When steps mismatched."""

    steps: int = shown(2000)
    affected: int = shown(17)
    onset: int | None = shown(96, "First affected step.")
    bursts: int = shown(4)
    longest_burst: int = shown(9)
    gaps: int = shown(16)
    mean_gap: float | None = shown(31.5)
    longest_gap: int | None = shown(250)
    burstiness: float | None = shown(0.61)


class Severities(Answer):
    """How far off: |difference| / |reference|."""

    severity_mean: float | None = shown(0.5)
    severity_median: float | None = shown(0.25)
    severity_max: float | None = shown(4.0)


class ClassCounts(Severities):
    """One class of sites."""

    phase: str = shown("fwd")
    module: str = shown("attn")
    tensor: str = shown("out")
    sites: int = shown(16_000)
    elements: int = shown(16_000_000)
    mismatched_sites: int = shown(17)
    mismatched_elements: int = shown(1204)


class Damage(Answer):
    """What all that was found did to the values."""

    bits: dict[str, list[int]] = shown({"16": [0] * 16}, "Width of the type: flips of each bit, the lowest first.")
    extents: dict[str, int] = shown({"tile": 17})
    replays: dict[str, int] = shown({"transient": 15})
    findings: dict[str, int] = shown({"state": 1})
    nonfinite_elements: int = shown(0)
    nullified_elements: int = shown(0)
    zero_reference_elements: int = shown(0)
    uncounted_mismatches: int = shown(0)


class RunHead(Answer):
    """Of every run."""

    run: str = shown(RUN, "Id (UUIDv7).")
    verdict: Verdict | None = shown("mismatch", "Null before the end.")
    reason: str = shown("completed", "Stable name: see docs/reasons.md.")
    created_at: float = shown(AT, "UTC seconds, as all times.")
    finished_at: float | None = shown(AT + 600)
    workload: Workload = shown("submodule")
    kind: Kind = shown("suspect")
    model: str = shown("small")
    reference_node: str = shown("gpu-3")
    suspect_node: str = shown("gpu-17")
