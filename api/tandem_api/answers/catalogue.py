"""What can be asked for: candidates, presets, fault profiles; and how the service is."""

from __future__ import annotations

from typing import Any, Literal

from tandem.spec import Preset
from tandem_api.answers.base import Answer, shown


class PassedOverAnswer(Answer):
    node: str = shown("gpu-5")
    reason: str = shown("Unlike")
    message: str = shown("differs from gpu-17 in nvidia.com/gpu.product (H100, H200)")


class CandidateAnswer(Answer):
    """A node that waits for a test, as `tandem candidates --json` has it."""

    node: str = shown("gpu-17")
    signs: list[str] = shown(["cordoned"], "Why it counts as quarantined.")
    reference: str | None = shown("gpu-3", "The node that it would be compared with now; null: there is none.")
    why: str = shown("like the suspect, idle", "Why that one, or why none.")
    device: str | None = shown("nvidia.com/gpu")
    devices: int | None = shown(8, "How many of it each pod would ask for.")
    passed_over: list[PassedOverAnswer]


class CandidatesAnswer(Answer):
    candidates: list[CandidateAnswer]


class PresetItem(Answer):
    name: str = shown("tiny")
    preset: Preset


class PresetsAnswer(Answer):
    """The smallest model first."""

    presets: list[PresetItem]


class FaultProfileItem(Answer):
    name: str = shown("node-11")
    text: str = shown('description = "..."', "The profile itself (TOML, docs/faults.md).")
    profile: dict[str, Any] = shown({"description": "..."}, "The same, read.")


class FaultProfilesAnswer(Answer):
    fault_profiles: list[FaultProfileItem]


class Alive(Answer):
    status: Literal["ok"] = shown("ok")
    mode: Literal["local", "cluster"] = shown("local")
    version: str = shown("0.1.0")
