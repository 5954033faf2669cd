"""What the reference writes down. Plain structs, encodable to the spool as MessagePack and to
PostgreSQL as rows; the verdict is a pure function of them. Times are UTC seconds since the epoch.

Every record carries its natural key, so that writing it twice changes nothing.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec

from tandem.vocabulary import Cause, ControlName, Extent, Module, Phase, ReplayClass, Role


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    run_id: UUID
    attempt: int


class ClassCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one site class (``phase/module/family``) in one step, all layers and ranks together."""

    sites: int
    """Compared tensors: site x rank."""
    elements: int
    mismatched_sites: int
    """Site x rank pairs with cause ``compute``."""
    mismatched_elements: int


class StepRecord(_Record, frozen=True, kw_only=True, tag="step"):
    """One step of the pair. Key: run, attempt, step. Step 0 is the initial parameters."""

    step: int
    classes: dict[str, ClassCounts]
    rows: int
    """Mismatch rows that belong to this step, before any cap."""
    loss_reference: float | None = None
    loss_suspect: float | None = None
    grad_norm_reference: float | None = None
    """L2 norm of the whole gradient before clipping."""
    grad_norm_suspect: float | None = None
    duration_s: float = 0.0
    """Wall time of the step on the reference, waits included."""
    busy_s: float = 0.0
    """Part of ``duration_s`` in which the reference did not wait for its peer."""
    link_bytes: int = 0
    """Bytes sent and received on the pair link during the step."""
    full_bytes: int = 0
    """Bytes that full exchange would have moved: every site, both ways."""
    window_max: int = 0
    """Largest number of unconfirmed sites."""
    generation: int = 0
    """The suspect's generation at the step's end: how often it rolled back so far."""
    finished_at: float = 0.0
    sync: str = ""
    """The sync mode that this step used."""


class MismatchRecord(_Record, frozen=True, kw_only=True, tag="mismatch"):
    """One rank's tensor that differed at one site. Key: run, attempt, step, site, rank, tensor.

    Counts are None where the suspect's tensor was never received (the run cannot be ``match``).
    """

    step: int
    site: int
    rank: int
    phase: Phase
    module: Module
    layer: int
    tensor: str
    """The site's tensor, or ``input.<name>`` for cause ``state``."""
    cause: Cause
    elements: int
    mismatched: int | None = None
    severity_mean: float | None = None
    """Mean of the finite non-zero relative differences |s - r| / |r|, in fp64."""
    severity_median: float | None = None
    severity_max: float | None = None
    zero_reference: int | None = None
    """Mismatching elements whose reference value is 0 (no relative difference exists)."""
    nonfinite: int | None = None
    """Mismatching elements that are NaN or infinite on the suspect."""
    nullified: int | None = None
    """Mismatching elements that are zero on the suspect and not on the reference."""
    bits: list[int] | None = None
    """How often each bit differed, least significant first; as long as the dtype is wide."""
    first_index: int | None = None
    """Flat index (C order) of the first mismatching element in the rank's tensor."""
    extent: Extent | None = None
    box: list[list[int]] | None = None
    """Bounding box of the damage, one [low, high] (inclusive) per axis."""
    replay: ReplayClass = ReplayClass.NOT_REPLAYED
    replays: int = 0
    replays_right: int = 0
    generation: int = 0
    detected_at: float = 0.0


class ControlRecord(_Record, frozen=True, kw_only=True, tag="control"):
    """One control on one side. Key: run, attempt, name, role, step, subject."""

    name: ControlName
    role: Role
    step: int
    subject: str
    """What was checked: a program, a rank, a parity field; empty if the control has one subject."""
    ok: bool
    repeats: int = 0
    """How often it was repeated, for a self-replay."""
    detail: dict[str, Any] = {}


class FaultRecord(_Record, frozen=True, kw_only=True, tag="fault"):
    """Ground truth of the injector in a synthetic run: what it really changed at one site and rank
    in the surviving execution. Key: run, attempt, step, site, rank, level.
    """

    step: int
    site: int
    rank: int
    level: str
    """``output``, ``operand`` or ``state``."""
    changed: int
    """Elements whose bits the injector really changed."""
    elements: list[int] = []
    """Flat indices of the first changed elements (bounded, see faults.LOGGED_ELEMENTS)."""


class GradientRecord(_Record, frozen=True, kw_only=True, tag="gradient"):
    """Gradient noise of one step (RQ2): of a leaf that differed, or of the whole gradient.

    Key: run, attempt, step, leaf.

    Norms are L2 in fp64 over all ranks, a replicated leaf's ranks counting 1/R each. Equal leaves have no row.
    """

    step: int
    leaf: str
    """``<group>.<leaf>`` such as ``attn.3.wq``; empty: all leaves together, equal ones included."""
    noise: float
    """||g_s - g_r||; NaN or infinite where the suspect's gradient is."""
    signal: float
    """||g_r||."""
    suspect: float
    """||g_s||."""
    cosine: float | None
    """g_s . g_r / (||g_s|| ||g_r||); None where a norm is zero or not finite."""
    elements: int
    mismatched: int


class DriftRecord(_Record, frozen=True, kw_only=True, tag="drift"):
    """Distance of an arm's parameters from the reference's after a step (RQ3).

    Key: run, attempt, step, arm, part, method.
    """

    step: int
    arm: str
    """``suspect``, or ``baseline``: the reference node with another seed, in a later phase."""
    part: str
    """A parameter group such as ``attn.3``; empty: the whole model."""
    method: str
    """``sketch`` (an estimate) or ``exact``."""
    drift: float | None
    """||p_a - p_r||; None where neither the sketch nor an exact measurement could say."""
    norm: float | None
    """||p_r||."""
    error: float
    """One standard deviation of ``drift``'s relative error; 0 for ``exact``."""
    loss: float | None = None
    """The arm's, for ``baseline`` (the suspect's are in the step's row)."""
    grad_norm: float | None = None


class EvaluationRecord(_Record, frozen=True, kw_only=True, tag="evaluation"):
    """One question, answered by an arm's parameters after a step. Key: run, attempt, step, task, question, arm."""

    step: int
    task: str
    question: str
    arm: str
    """``reference``, ``suspect`` or ``baseline``."""
    scores: list[float]
    """Score of each choice, in the question's order."""
    chosen: int
    """Index of the largest score, the first of equals; -1 where none is a number."""
    answer: int


class ClosingRecord(_Record, frozen=True, kw_only=True, tag="closing"):
    """Written last; its counts must equal the rows stored. Key: run, attempt."""

    steps: int
    """Step rows, step 0 included."""
    mismatches: int
    """Mismatch rows, after the cap."""
    mismatches_total: int
    """Mismatch rows before the cap."""
    controls: int
    faults: int
    gradients: int = 0
    drifts: int = 0
    evaluations: int = 0
    capped: bool
    reason: str
    """``completed``, ``stopped`` (asked to stop early), or the named reason of an early end."""
    device_seconds: float
    """Seconds of compared steps, times the suspect's devices."""
    devices: list[str]
    """Names of the suspect's devices that were covered."""
    finished_at: float


Record = (
    StepRecord | MismatchRecord | ControlRecord | FaultRecord | GradientRecord | DriftRecord | EvaluationRecord
    | ClosingRecord
)  # fmt: skip


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as stored. Written by the supervisor (or controller), closed by the reference."""

    run_id: UUID
    attempt: int
    state: str
    started_at: float
    ended_at: float | None = None
    reason: str = ""
    fingerprint: str | None = None
    """Digest of every executable's fingerprint and of all parity fields; equal on both sides."""
    parity: dict[str, str] = {}
    reference_host: str = ""
    suspect_host: str = ""
    devices: int = 1
    """Devices of the suspect: the seconds of a step times this are its device-seconds."""
    images: dict[str, str] | None = None
    """Role -> digest of the image that its pod ran, as its node says. None: no pods, nothing to compare."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run as stored."""

    run_id: UUID
    created_at: float
    workload: str
    kind: str
    model: str
    synthetic: bool
    reference_node: str
    suspect_node: str
    spec: dict[str, Any]
    state: str
    """``running`` or ``finished``."""
    verdict: str | None = None
    reason: str = ""
    sentence: str = ""
    finished_at: float | None = None
    records_dropped_at: float | None = None
    """When retention dropped the run's rows of the partitioned tables."""


class RunRecords(msgspec.Struct, kw_only=True):
    """Everything stored of one run: the input of the verdict, of `show` and of the report."""

    run: RunRow
    attempts: list[AttemptRow]
    steps: list[StepRecord]
    mismatches: list[MismatchRecord]
    controls: list[ControlRecord]
    faults: list[FaultRecord]
    closings: list[ClosingRecord]
    gradients: list[GradientRecord] = []
    drifts: list[DriftRecord] = []
    evaluations: list[EvaluationRecord] = []
