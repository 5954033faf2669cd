"""What the controller sees of one PairRun, and what it decides. Pure data; `plan` turns the one into the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import UUID

from tandem.pairing.choose import World
from tandem.pairing.policy import Policy
from tandem.pairrun import names
from tandem.pairrun.spec import PairRunSpec
from tandem.pairrun.status import PairRunStatus, read_status
from tandem.vocabulary import Role
from tandem_controller.settings import Settings

# -- what is there ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of an attempt."""

    name: str
    role: Role
    attempt: int
    node: str = ""
    phase: str = "Pending"
    reason: str = ""
    """Of the pod's status: ``Evicted``, ``UnexpectedAdmissionError``, ``NodeLost`` ..."""
    message: str = ""
    waiting: str = ""
    """Why the container waits: ``ImagePullBackOff``, ``CreateContainerConfigError`` ..."""
    waiting_message: str = ""
    exit_code: int | None = None
    exit_reason: str = ""
    """Of the container: ``OOMKilled``, ``Error``, ``Completed`` ..."""
    exit_message: str = ""
    """Its termination message: what the worker said last."""
    started_at: float | None = None
    """When the container started."""
    ended_at: float | None = None
    """When it ended."""
    image_id: str = ""
    leaves_at: float | None = None
    """Its deletion was asked for: when its container will have been killed at the latest."""
    unschedulable: str = ""
    """The scheduler's message, while it finds no place."""
    disrupted: str = ""
    """Reason of the condition DisruptionTarget: eviction, taint manager, preemption ..."""

    @property
    def running(self) -> bool:
        """It works, and nobody asked it to stop."""
        return self.phase == "Running" and self.speaks and self.leaves_at is None

    @property
    def speaks(self) -> bool:
        """Its worker has started and may yet say how it ended."""
        return self.started_at is not None and not self.ended

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed") or self.exit_code is not None


@dataclass(frozen=True, slots=True)
class Job:
    """A Job of an attempt."""

    name: str
    role: Role
    attempt: int
    failed: str = ""
    """Reason of its Failed condition; empty while it has none."""
    failed_message: str = ""
    leaving: bool = False
    deadline: int | None = None
    """Its ``activeDeadlineSeconds``."""
    refused: str = ""
    """Why its pod was not made, as its events say; asked for only while it has none."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A run's verdict as PostgreSQL holds it."""

    verdict: str
    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Live:
    """A live run's progress."""

    attempt: int = 0
    step: int = 0
    sites: int = 0
    elements: int = 0
    mismatched_sites: int = 0
    mismatched_elements: int = 0
    other_findings: int = 0
    first: Mapping[str, Any] | None = None
    """As `FirstMismatch` takes it."""
    closing: str | None = None
    """Reason of the closing record of that attempt; None while it is not stored."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What PostgreSQL says of a run."""

    reachable: bool = False
    error: str = ""
    run_stored: bool = False
    attempts: Mapping[int, str] = field(default_factory=dict)
    """Attempt -> its state."""
    live: Live = Live()
    judgement: Judgement | None = None


@dataclass(frozen=True)
class Observed:
    """Everything that a decision about one PairRun is made from."""

    now: float
    obj: Mapping[str, Any]
    """The PairRun as the cluster holds it."""
    spec: PairRunSpec | None
    spec_error: str
    world: World
    policy: Policy
    settings: Settings
    facts: Facts = Facts()
    pods: Sequence[Pod] = ()
    jobs: Sequence[Job] = ()
    node_ready: Mapping[str, bool] = field(default_factory=dict)
    """Nodes that exist -> whether they are Ready."""
    sessions: Mapping[str, str] = field(default_factory=dict)
    """Nodes that carry the mark of a session -> the run that put it there; empty where they do not say."""
    missing: Sequence[str] = ()
    """What the pods will need and the namespace lacks, each in one sentence; looked up before a pairing only."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """What could not be done lately, by action, in one sentence: RBAC too narrow, a quota ..."""

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.obj["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.obj["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.obj["metadata"].get("generation") or 0)

    @property
    def deleting(self) -> bool:
        return bool(self.obj["metadata"].get("deletionTimestamp"))

    @property
    def run_id(self) -> UUID:
        return names.run_id_of(self.uid, str(self.obj["metadata"]["creationTimestamp"]))

    @cached_property
    def status(self) -> PairRunStatus:
        return read_status(self.obj.get("status"))


# -- what to do ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Action:
    """Base of all actions; done in order after the status is written."""


@dataclass(frozen=True, slots=True)
class StoreAttempt(Action):
    """Insert the run (if it is not there) and the attempt into PostgreSQL."""

    number: int


@dataclass(frozen=True, slots=True)
class MakeChildren(Action):
    """Make what is missing of the current attempt's objects."""

    number: int


@dataclass(frozen=True, slots=True)
class SetDeadline(Action):
    """Have the Jobs of the current attempt end when the spec says now."""

    number: int
    seconds: int | None


@dataclass(frozen=True, slots=True)
class RemoveChildren(Action):
    """Remove an attempt's objects; pods that do not go are left to Kubernetes."""

    number: int


@dataclass(frozen=True, slots=True)
class StoreImages(Action):
    """Write down which image each side's pod runs: nobody can ask once the PairRun is deleted."""

    number: int


@dataclass(frozen=True, slots=True)
class CloseAttempt(Action):
    """Close an attempt in PostgreSQL."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Judge(Action):
    """Compute the verdict from the stored records and store it."""


@dataclass(frozen=True, slots=True)
class Event(Action):
    """Tell people, once the status is written."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class MarkNodes(Action):
    """Put the opt-in marks on the nodes: a session runs."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnmarkNodes(Action):
    """Take this run's session marks off, and leave the verdict where there is one. Another run's stay."""

    nodes: tuple[str, ...]
    suspect: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Release(Action):
    """Remove the finalizer: the object may go. Never while marks could not be taken off."""


@dataclass(frozen=True, slots=True)
class DeleteSelf(Action):
    """The time to live after the end is over."""


@dataclass(frozen=True)
class Decision:
    """The new status and what to do next."""

    status: PairRunStatus
    actions: tuple[Action, ...] = ()
    requeue_s: float | None = None
    """Look again after this long even if nothing happens."""
