"""The exit code of the suspect's worker, as what the reference's ledger holds at the end makes it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from db_samples import mismatch
from tandem.spec import RunSpec
from tandem.vocabulary import POD_EXIT_INCONCLUSIVE, POD_EXIT_MATCH, POD_EXIT_MISMATCH, ControlName, Role
from tandem.worker_io import WorkerConfig
from tandem_worker.link import frames as f
from tandem_worker.lockstep.ledger import Ledger
from tandem_worker.outlet import Lines
from tandem_worker.session import choose
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.worker import Worker

RUN = UUID(int=1)


class Sent:
    """The link of both sides: a frame comes out as it went in."""

    def __init__(self) -> None:
        self.frames: list[f.Frame] = []

    def send(self, frame: f.Frame) -> None:
        self.frames.append(f.decode([f.encode(replace(frame, run=RUN.hex, attempt=1))]))

    def close(self) -> None: ...


def _itself(ledger: Ledger) -> None:
    ledger.control(ControlName.SELF_REPLAY_END, Role.SUSPECT, 3, "attn.fwd", False, 2)


def _answers(ledger: Ledger) -> None:
    ledger.unequal_answers += 1


def _failed(ledger: Ledger) -> None:
    ledger.control(ControlName.POSITIVE_END, Role.SUSPECT, 3, "rank 0", False)


def _both(ledger: Ledger) -> None:
    ledger.mismatch(mismatch(RUN, 1))
    _failed(ledger)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (lambda _: None, POD_EXIT_MATCH),
        (lambda ledger: ledger.mismatch(mismatch(RUN, 1)), POD_EXIT_MISMATCH),
        (_itself, POD_EXIT_MISMATCH),
        (_answers, POD_EXIT_MISMATCH),
        (_failed, POD_EXIT_INCONCLUSIVE),
        (_both, POD_EXIT_INCONCLUSIVE),
    ],
)
def test_the_suspect_ends_with_what_the_reference_found(
    found: Callable[[Ledger], None], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are only some of what is a finding: a match must not be told for unequal answers or a failed control."""
    link: Any = Sent()
    ledger = Ledger(SimpleNamespace(put=lambda _: None), RUN, 1, 100, lambda: 0.0)
    found(ledger)
    leading: Any = SimpleNamespace(channel=link, ledger=ledger)
    ReferenceSession.close(leading, "completed")
    following = lambda *_, **__: SimpleNamespace(run=lambda: link.frames[-1])
    monkeypatch.setattr(choose, "suspect_session", lambda _: following)
    config = WorkerConfig(
        role=Role.SUSPECT, run_id=RUN, attempt=1, spec={}, endpoint="", own_public="", own_secret="", peer_public=""
    )
    worker = Worker(config, RunSpec(), Lines(Role.SUSPECT))
    worker.channel = link
    assert worker._follow(None) == code
