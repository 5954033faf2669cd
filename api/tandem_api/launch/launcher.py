"""What every way to begin a run has in common. The database may be away: what was asked for lives elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from tandem.errors import SpecError
from tandem.faults.files import shipped_names
from tandem.pairing.candidates import Candidate
from tandem.pairrun.spec import Name, Resources, RetryPolicy, Seconds, Template
from tandem.spec import RunSpec, load_preset, resolve
from tandem_api.problems import Problem, invalid

PATHS = ("weights", "tokenizer", "checkpoints", "start")
"""Fields of a run spec with one path; ``data`` and ``questions`` have lists, ``fault`` a path or a name."""


class ClusterOptions(BaseModel):
    """What a PairRun may ask for beside the workload; only in a cluster. Spelled as in a PairRun."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)
    resources: Resources = Field(Resources(), description="What each pod asks its node for.")
    template: Template = Field(Template(), description="What may be changed of both pods.")
    retry: RetryPolicy = Field(RetryPolicy(), description="When an attempt says nothing about the nodes.")
    start_deadline_seconds: int = Field(
        900, ge=10, le=86_400, alias="startDeadlineSeconds", description="Both pods must run within this time."
    )
    active_deadline_seconds: int | None = Field(
        None, ge=60, le=2**31 - 1, alias="activeDeadlineSeconds", description="An attempt that runs longer is ended."
    )
    ttl_seconds_after_finished: Seconds | None = Field(
        None, alias="ttlSecondsAfterFinished", description="The PairRun is deleted this long after it finished."
    )


class Order(BaseModel):
    """A run that somebody asks for."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {"node": "gpu-17", "spec": {"workload": "submodule", "model": "small", "steps": 2000}},
                {"spec": {"kind": "null", "model": "tiny", "steps": 20}},
            ]
        },
    )
    node: Name | None = Field(
        None, description="The node under test. In a cluster default: any quarantined node; a null pair takes any two."
    )
    reference: Name | None = Field(None, description="The healthy node. Default: the idle one most like it.")
    spec: RunSpec = Field(RunSpec(), description="What to run: the run spec of `tandem run`, its kind included.")
    cluster: ClusterOptions | None = Field(None, description="Only in a cluster: more of the PairRun.")

    @property
    def digest(self) -> str:
        """Equal for equal orders, however they were written."""
        raw = self.model_dump(mode="json", exclude_unset=True)
        return hashlib.sha256(msgspec.json.encode(raw, order="sorted")).hexdigest()


def check(order: Order, mode: str = "local") -> None:
    """What no schema says.

    Args:
        order: the order.
        mode: of the launcher: in a cluster the node decides over how many devices a run without ``tp`` is split.

    Raises:
        Problem: 422, with the field.
    """
    spec = order.spec
    for text in texts(order.model_dump(exclude_unset=True)):
        if "\x00" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise invalid("body", "holds a NUL character or half of a surrogate pair")
    try:
        load_preset(spec.model)
    except (SpecError, OSError, ValueError) as error:
        raise invalid("body.spec.model", str(error)) from None
    if spec.weights is None:
        open_ = mode == "cluster" and "tp" not in spec.model_fields_set
        try:
            resolve(spec.model_copy(update={"tp": 1}) if open_ else spec)
        except SpecError as error:
            raise invalid("body.spec", str(error)) from None
    paths: list[tuple[str, Path]] = [(name, path) for name in PATHS if (path := getattr(spec, name)) is not None]
    paths += [(name, path) for name in ("data", "questions") for path in getattr(spec, name)]
    for name, path in paths:
        if not path.is_absolute():
            raise invalid(f"body.spec.{name}", f"{path} is no path from the root")
    if spec.fault is not None and not spec.fault.is_absolute() and str(spec.fault) not in shipped_names():
        raise invalid("body.spec.fault", f"{spec.fault}: use {', '.join(shipped_names())}, or a path from the root")
    if order.node is not None and order.node == order.reference:
        raise invalid("body.reference", "is the node under test itself")


def texts(value: Any) -> list[str]:
    """Every string and path in a value, keys included."""
    if isinstance(value, (str, Path)):
        return [str(value)]
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in (str(key), *texts(item))]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in texts(item)]
    return []


class State(StrEnum):
    """How far a launch has come."""

    PENDING = "pending"
    """Waits: for its turn on this machine, for a pair in a cluster."""
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    """It never became a run: its inputs cannot be used, or it was cancelled before its turn."""


@dataclass(frozen=True, slots=True)
class Condition:
    """As Kubernetes has them."""

    type: str
    status: str
    reason: str
    message: str
    since: float | None


@dataclass(frozen=True, slots=True)
class Launch:
    """What was asked for, and how it stands with whoever runs it."""

    run_id: UUID
    name: str
    """Of the PairRun; on this machine the run's id."""
    state: State
    created_at: float
    kind: str
    workload: str
    model: str
    node: str | None
    reference: str | None
    spec: dict[str, Any]
    reason: str = ""
    message: str = ""
    conditions: Sequence[Condition] = ()
    progress: dict[str, Any] | None = None
    """Latest ``ProgressEvent`` of a run on this machine."""
    synthetic: bool = field(default=False)


class Launcher(Protocol):
    """A way to begin runs."""

    mode: str
    """``local`` or ``cluster``."""

    async def start(self) -> None:
        """Take up what an earlier process left; once more changes nothing."""

    async def stop(self) -> None:
        """Let go; what runs goes on."""

    async def launch(self, order: Order, *, by: str, key: str | None) -> tuple[Launch, bool]:
        """Begin a run, or find the one that the same key began.

        Returns:
            The launch, and whether it is new.

        Raises:
            Problem: 422: the order cannot be run here, or the key belongs to another order.
        """

    async def cancel(self, run_id: UUID) -> Launch:
        """Ask a run to end.

        Raises:
            Problem: 404: nobody here runs it; 409: it has ended.
        """

    def find(self, run_id: UUID) -> Launch | None:
        """The launch of a run, from memory; None if it is not known here."""

    async def known(self, run_id: UUID) -> Launch | None:
        """The same; one that another process began a moment ago is waited for."""

    def open(self) -> list[Launch]:
        """Launches that have not ended, the newest first, from memory."""

    async def candidates(self) -> list[Candidate]:
        """Nodes that wait for a test, with the reference that each would get now."""

    def wrong(self) -> str | None:
        """Why nothing can be launched now, or None."""


def key_reused() -> Problem:
    return Problem(422, "idempotency-key-reused", "this Idempotency-Key began another run: use a new key")


def ended(launch: Launch) -> Problem:
    return Problem(409, "ended", f"run {launch.run_id} has ended already")
