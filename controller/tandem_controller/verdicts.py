"""What the controller writes to PostgreSQL: runs, attempts, verdicts; each write with the leader's fencing token."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, select
from sqlalchemy.exc import DBAPIError

from tandem import recovery
from tandem.db import store
from tandem.db.engine import unreachable
from tandem.db.fence import Fence
from tandem.db.liveness import CONTROLLER, controller_identity
from tandem.db.models import Attempt, Run
from tandem.records import AttemptRow, RunRow
from tandem.spec import RunSpec
from tandem.vocabulary import AttemptState


@dataclass(frozen=True, slots=True)
class Stored:
    """An attempt as it is stored."""

    run_id: UUID
    number: int
    pairrun: str
    uid: str
    run: RunSpec
    reference: str
    suspect: str
    devices: int
    images: Mapping[str, str]
    """Role -> digest of the image that its pod runs, as far as it is known."""


class Verdicts:
    """The one writer of runs, attempts and verdicts in a cluster."""

    def __init__(self, engine: Engine, fence: Fence, cluster: str, namespace: str) -> None:
        """``cluster``: what no other cluster has that writes to the same database; ``namespace``: the one served."""
        self.engine, self.fence, self.cluster, self.namespace = engine, fence, cluster, namespace

    def store(self, a: Stored) -> None:
        """Insert a run and one of its attempts; what is there already stays.

        Raises:
            DatabaseError: the database failed, or a newer leader has written (`Fenced`).
        """
        now = time.time()
        store.create_run(
            self.engine,
            RunRow(
                run_id=a.run_id, created_at=now, workload=a.run.workload, kind=a.run.kind, model=a.run.model,
                synthetic=a.run.fault is not None, reference_node=a.reference, suspect_node=a.suspect,
                spec=a.run.model_dump(mode="json"), state="running",
            ),
            controller_identity(self.namespace, a.pairrun, a.uid) | {"cluster": self.cluster},
            exists_ok=True, fence=self.fence,
        )  # fmt: skip
        store.start_attempt(
            self.engine,
            AttemptRow(
                run_id=a.run_id, attempt=a.number, state=AttemptState.RUNNING, started_at=now,
                reference_host=a.reference, suspect_host=a.suspect, devices=a.devices, images=dict(a.images),
            ),
            exists_ok=True, fence=self.fence,
        )  # fmt: skip

    def close(self, run_id: UUID, number: int, reason: str, images: Mapping[str, str] | None = None) -> None:
        """Close an attempt: with its closing record if there is one, else as orphaned for ``reason``.

        Args:
            run_id: the run.
            number: of the attempt.
            reason: how it ended, as the controller saw it.
            images: role -> digest of the image that its pod ran; None: the controller never saw them.

        Raises:
            DatabaseError: the database failed, or a newer leader has written (`Fenced`).
        """
        recovery.close_attempt(self.engine, run_id, number, reason, images=images, fence=self.fence)

    def images(self, run_id: UUID, number: int, images: Mapping[str, str]) -> None:
        """Write down which image each side's pod runs: role -> digest.

        Raises:
            DatabaseError: the database failed, or a newer leader has written (`Fenced`).
        """
        store.set_images(self.engine, run_id, number, images, self.fence)

    def judge(self, run_id: UUID) -> None:
        """Give a run its verdict, a pure function of what is stored.

        Raises:
            DatabaseError: the database failed, or a newer leader has written (`Fenced`).
        """
        recovery.give_verdict(self.engine, run_id, self.fence)

    def left_behind(self, live: set[str]) -> list[tuple[UUID, list[int]]]:
        """Runs of PairRuns that no longer exist, with their open attempts.

        Args:
            live: UIDs of the PairRuns that do.

        Raises:
            DatabaseError: the database failed.
        """
        try:
            with self.engine.connect() as conn:
                rows = conn.execute(select(Run.run_id, Run.supervisor).where(Run.state == "running")).all()
                gone = [
                    row.run_id for row in rows if self._mine(row.supervisor) and row.supervisor.get("uid") not in live
                ]
                open_ = select(Attempt.run_id, Attempt.attempt).where(
                    Attempt.run_id.in_(gone), Attempt.state == AttemptState.RUNNING
                )
                attempts = conn.execute(open_).all()
        except DBAPIError as error:
            raise unreachable(self.engine.url.render_as_string(hide_password=False), error) from None
        return [(run_id, [row.attempt for row in attempts if row.run_id == run_id]) for run_id in gone]

    def _mine(self, supervisor: Mapping[str, Any]) -> bool:
        """Whether a run is one of this cluster's and namespace's PairRuns: others may share the database."""
        found = tuple(supervisor.get(name) for name in ("kind", "cluster", "namespace"))
        return found == (CONTROLLER, self.cluster, self.namespace)

    def compared_with(self) -> dict[str, frozenset[str]]:
        """Suspect node -> references that it was compared with in a run of this cluster that spoke.

        A synthetic run says nothing of the suspect, so its reference is not used up.

        Raises:
            DatabaseError: the database failed.
        """
        try:
            with self.engine.connect() as conn:
                rows = conn.execute(
                    select(Attempt.suspect_host, Attempt.reference_host)
                    .join(Run, Run.run_id == Attempt.run_id)
                    .where(
                        Run.verdict.in_(("match", "mismatch")),
                        Attempt.state == AttemptState.CLOSED,
                        Run.synthetic.is_(False),
                        # Nodes of two clusters, and machines of local runs, may have one name.
                        Run.supervisor["cluster"].as_string() == self.cluster,
                    )
                    .distinct()
                ).all()
        except DBAPIError as error:
            raise unreachable(self.engine.url.render_as_string(hide_password=False), error) from None
        found: dict[str, set[str]] = {}
        for suspect, reference in rows:
            found.setdefault(suspect, set()).add(reference)
        return {suspect: frozenset(references) for suspect, references in found.items()}
