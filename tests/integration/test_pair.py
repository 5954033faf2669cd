"""A pair from end to end in one process, in seconds: what the second Python runs too. The rest is in test_lockstep."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pairs import clean_end, found, profile, run_pair, truth

from tandem.runs.verdict import decide
from tandem.spec import RunSpec
from tandem.vocabulary import Verdict
from tandem_worker.link.words import peer_reason
from tandem_worker.lockstep.inbox import StopRequested
from tandem_worker.session.reference import ReferenceSession
from tandem_worker.session.suspect import SuspectSession

SETTINGS: dict[str, Any] = {"self_replays": 2, "replays": 2}


def test_a_suspect_that_is_asked_to_stop_ends_the_pair_after_its_step() -> None:
    """Its pod is to go: both drain, run the end controls, and what was compared counts."""

    def stop(_: ReferenceSession, suspect: SuspectSession) -> None:
        begin = suspect.progress.begin_step

        def begin_step(step: int) -> None:
            begin(step)
            if step == 2:
                suspect.inbox.queue.put(StopRequested("stopped"))

        suspect.progress.begin_step = begin_step  # type: ignore[method-assign]

    outcome = run_pair(RunSpec(steps=1000, **SETTINGS), tamper=stop)
    assert (outcome.errors, outcome.reason) == ({}, "stopped")
    assert decide(outcome.records).verdict is Verdict.MATCH
    assert len(outcome.records.steps) == 3


@pytest.mark.parametrize("reason", ["completed", "stopped", "", "x" * 200, "a\nb", "<script>", "Ok fine"])
def test_a_suspects_goodbye_cannot_claim_a_regular_end(reason: str) -> None:
    assert peer_reason(reason) == "peer_left"
    assert peer_reason("half_open_link") == "half_open_link"


def test_one_flipped_bit_is_found_where_it_is() -> None:
    recipe = profile(
        {"kind": "flip", "bits": [9], "elements": 1, "phase": "fwd", "module": "ffn", "layers": [1],
         "tensor": "out", "ranks": [0], "steps": [1]}
    )  # fmt: skip
    outcome = run_pair(RunSpec(steps=1, fault="x.toml", **SETTINGS), recipe)
    clean_end(outcome)
    assert found(outcome.records) == truth(outcome.records) != {}
    assert decide(outcome.records).verdict is Verdict.MISMATCH
