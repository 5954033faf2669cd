"""How an attempt is closed from what is stored, by its supervisor or, after a crash, by the next command."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import UUID

from sqlalchemy import Engine

from tandem.db import queries, store
from tandem.db.fence import Fence
from tandem.db.replay import replay_spools
from tandem.errors import DatabaseError, SetupError
from tandem.home import home
from tandem.records import RunRecords
from tandem.runs.attempt import parity_of
from tandem.runs.verdict import decide, fingerprint
from tandem.vocabulary import REGULAR_ENDS, AttemptState

ROOM = 4 << 20
"""Bytes that must be free for the spool before a run begins."""


def spool_folder() -> Path:
    """Where the reference workers of this user keep what the database has not taken.

    Raises:
        SetupError: it cannot be made.
    """
    folder = home() / "spool"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the spool in {folder} cannot be made ({error.strerror}): remove what is there, or set TANDEM_HOME"
        ) from None
    return folder


def check_spool(folder: Path, room: int = ROOM) -> None:
    """Make sure that the spool can be written: a record that neither it nor the database takes is lost.

    Raises:
        SetupError: the disk is full or refuses.
    """
    trial = folder / f"room-{os.getpid()}"
    try:
        fd = os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, room)
            os.fsync(fd)
        finally:
            os.close(fd)
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise SetupError(
            f"the spool in {folder} cannot be written ({error.strerror}): "
            f"free {room >> 20} MiB there, or set TANDEM_HOME to another disk"
        ) from None


def recover(engine: Engine, url: str) -> list[UUID]:
    """Deliver what earlier processes left in the spool, and close the runs whose supervisor died.

    Returns:
        Runs that got their verdict.

    Raises:
        DatabaseError: the database failed; what lies in the spool stays there.
    """
    replay_spools(url, spool_folder())
    return store.close_orphans(engine, judge, time.time())


def finish(engine: Engine, url: str, run_id: UUID, attempt: int, reason: str) -> None:
    """Close an attempt and give the run its verdict, both from what is stored.

    Args:
        engine: the database.
        url: of the same.
        run_id: the run.
        attempt: of the run.
        reason: as for `close_attempt`.

    Raises:
        DatabaseError: the records could not be delivered; the next command that can does all this.
    """
    try:
        replay_spools(url, spool_folder())
        close_attempt(engine, run_id, attempt, reason)
        give_verdict(engine, run_id)
    except DatabaseError as error:
        raise DatabaseError(
            f"run {run_id} has no verdict yet: {error}; its records wait in {spool_folder()}, "
            "and the next command that reaches the database delivers them"
        ) from error


def close_attempt(
    engine: Engine,
    run_id: UUID,
    attempt: int,
    reason: str,
    *,
    images: Mapping[str, str] | None = None,
    fence: Fence | None = None,
) -> None:
    """Close an attempt from what is stored: as closed where its closing record is there, else as orphaned.

    Args:
        engine: the database.
        run_id: the run.
        attempt: of the run.
        reason: how the attempt ended, as its supervisor (or controller) saw it. It counts where no closing record says
            that the attempt ended regularly: the supervisor knows which worker died, its peer only that it is gone.
        images: role -> digest of the image that its pod ran; None outside a cluster.
        fence: checked in the same transaction.

    Raises:
        DatabaseError: the database failed, or a newer leader has written (`Fenced`).
    """
    records = queries.load_run(engine, run_id)
    closing = next((c for c in records.closings if c.attempt == attempt), None)
    if closing is not None and (closing.reason in REGULAR_ENDS or reason == "completed"):
        reason = closing.reason
    parity = parity_of([c for c in records.controls if c.attempt == attempt])
    store.finish_attempt(
        engine, run_id, attempt, ended_at=time.time(),
        state=AttemptState.CLOSED if closing else AttemptState.ORPHANED,
        reason=reason, fingerprint=fingerprint(parity) if parity else None, parity=parity, images=images,
        fence=fence,
    )  # fmt: skip


def give_verdict(engine: Engine, run_id: UUID, fence: Fence | None = None) -> None:
    """Give a run its verdict, a pure function of what is stored.

    Raises:
        DatabaseError: the database failed, or a newer leader has written (`Fenced`).
    """
    verdict, reason, sentence = judge(queries.load_run(engine, run_id))
    store.finish_run(
        engine, run_id, verdict=verdict, reason=reason, sentence=sentence, finished_at=time.time(), fence=fence
    )


def judge(records: RunRecords) -> tuple[str, str, str]:
    """Verdict, reason and sentence of stored records."""
    decision = decide(records)
    return decision.verdict, decision.reason, decision.sentence
