"""Workers as pods start them: told by environment and files, stopped by signals, without a supervisor."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from db_samples import scalar
from pods import DEADLINE_S, Pair, until
from tandem.db import queries
from tandem.runs.attempt import devices_of_node
from tandem.vocabulary import POD_EXIT_INCONCLUSIVE, POD_EXIT_MATCH, POD_EXIT_MISMATCH, Role
from tandem.worker_io import KeyFile


@pytest.fixture
def make(tmp_path: Path, database_url: str) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make_pair(url: str = database_url, **spec: Any) -> Pair:
        pairs.append(Pair(tmp_path / str(len(pairs)), url, **spec))
        return pairs[-1]

    yield make_pair
    for pair in pairs:
        for pod in pair.pods.values():
            pod.kill()
            pod.wait()


@pytest.mark.slow
def test_a_pair_whose_run_is_stored_late_loses_and_forgets_nothing(make: Callable[..., Pair], engine: Engine) -> None:
    """The controller found the database away when it made the pods: they run all the same, and every row counts."""
    pair = make()
    for role in (Role.SUSPECT, Role.REFERENCE):
        pair.start(role, TANDEM_NODE_DEVICES="8")
    pair.until_log(Role.REFERENCE, "is not stored there yet")
    pair.until_log(Role.REFERENCE, "delivering")
    assert scalar(engine, "SELECT count(*) FROM steps") == 0
    assert pair.pods[Role.SUSPECT].wait(DEADLINE_S) == POD_EXIT_MATCH
    pair.store(engine)
    assert pair.codes() == {Role.REFERENCE: POD_EXIT_MATCH, Role.SUSPECT: POD_EXIT_MATCH}
    records = queries.load_run(engine, pair.run_id)
    assert records.closings[0].reason == "completed"
    assert len(records.steps) == 3
    assert scalar(engine, "SELECT steps FROM attempt_totals") == 3
    assert pair.said(Role.REFERENCE) == {"reason": "completed", "message": "2 steps compared, 0 findings"}
    (reduction,) = [c for c in records.controls if c.name == "known_reduction"]
    assert reduction.detail["suspect_node"] == "node-of-the-suspect"
    assert devices_of_node(records.controls) == 8
    for role in Role:
        log = pair.log(role)
        assert (pair.of(role) / "link" / KeyFile.OWN_SECRET).read_text() not in log
        assert len(log.splitlines()) < 60
    assert list((pair.of(Role.REFERENCE) / "home" / "spool").iterdir()) == []


@pytest.mark.slow
def test_a_signal_ends_the_attempt_cleanly_with_what_is_known(make: Callable[..., Pair], engine: Engine) -> None:
    """And a shipped fault profile may be named without a path."""
    pair = make(steps=100_000, fault="node-11")
    pair.store(engine)
    pair.start_both()
    until("a step", lambda: (scalar(engine, "SELECT max(last_step) FROM attempt_totals") or 0) >= 1)
    pair.pods[Role.REFERENCE].send_signal(signal.SIGTERM)
    codes = pair.codes()
    records = queries.load_run(engine, pair.run_id)
    assert [c.reason for c in records.closings] == ["stopped"], pair.log(Role.REFERENCE)
    findings = bool(records.mismatches)
    assert codes[Role.REFERENCE] == (POD_EXIT_MISMATCH if findings else POD_EXIT_MATCH)
    assert pair.said(Role.REFERENCE)["reason"] == "stopped"
    assert "SIGTERM: ends after the current step" in pair.log(Role.REFERENCE)


@pytest.mark.slow
def test_records_that_the_database_never_takes_make_the_end_inconclusive(make: Callable[..., Pair]) -> None:
    """The pair runs without a database; the last message names the reason and shows no password."""
    pair = make(url="postgresql://tandem:hunter2@127.0.0.1:1/tandem", steps=1)
    pair.start(Role.SUSPECT)
    pair.start(Role.REFERENCE, TANDEM_RECORDS_TIMEOUT="2")
    codes = pair.codes()
    assert codes == {Role.SUSPECT: POD_EXIT_MATCH, Role.REFERENCE: POD_EXIT_INCONCLUSIVE}
    said = pair.said(Role.REFERENCE)
    assert said["reason"] == "closing_missing"
    assert "records were not delivered" in said["message"]
    assert "hunter2" not in said["message"] + pair.log(Role.REFERENCE)


@pytest.mark.slow
def test_a_signal_before_the_peer_is_there_ends_at_once(make: Callable[..., Pair]) -> None:
    """Nothing can have been compared: a reference whose suspect never starts must free its node, whether or not the
    database takes the little that there is to store.
    """
    pair = make()
    pod = pair.start(Role.REFERENCE)
    pair.until_log(Role.REFERENCE, "handshake")
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(60) == POD_EXIT_INCONCLUSIVE
    assert pair.said(Role.REFERENCE)["reason"] == "stopped_early"


def test_a_second_signal_ends_at_once(make: Callable[..., Pair]) -> None:
    """Whatever the main thread does: here it starts up, and the first signal may already suffice."""
    pair = make()
    pod = pair.start(Role.REFERENCE)
    pair.until_log(Role.REFERENCE, "listens on")
    pod.send_signal(signal.SIGTERM)
    pod.send_signal(signal.SIGINT)
    assert pod.wait(60) == POD_EXIT_INCONCLUSIVE
    assert pair.said(Role.REFERENCE)["reason"] in ("stopped_early", "killed")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"weights": "/nowhere"}, "/nowhere"),
        ({"data": ["/nowhere.txt"]}, "/nowhere.txt"),
        ({"tp": 3}, "tp 3 does not divide"),
        ({"fault": "node-12"}, "node-12"),
        ({"fault": "/nowhere.toml"}, "/nowhere.toml"),
    ],
)
def test_inputs_that_cannot_be_used_are_named_before_anything_starts(
    make: Callable[..., Pair], spec: dict[str, Any], words: str
) -> None:
    pair = make(**spec)
    for role in Role:
        assert pair.start(role).wait(60) == POD_EXIT_INCONCLUSIVE
        said = pair.said(role)
        assert said["reason"] == "input"
        assert words in said["message"]
        assert len(pair.log(role).splitlines()) == 1, pair.log(role)


def test_a_folder_that_lacks_the_database_is_named(make: Callable[..., Pair]) -> None:
    pair = make()
    (pair.of(Role.REFERENCE) / "database" / "uri").unlink()
    assert pair.start(Role.REFERENCE).wait(60) == POD_EXIT_INCONCLUSIVE
    assert "uri cannot be read" in pair.said(Role.REFERENCE)["message"]
