"""An old leader that still believes in its lease changes nothing; a controller may repeat whatever it did."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Engine, text

from db_samples import make_run, run_row, scalar
from tandem.db import liveness, queries, store
from tandem.db.fence import Fence, Fenced, newest
from tandem.errors import DatabaseError
from tandem.ids import new_run_id
from tandem.records import AttemptRow
from tandem.vocabulary import AttemptState

SUPERVISOR = liveness.controller_identity("tandem", "sick", "u-1")


def new_id() -> UUID:
    return new_run_id(time.time(), os.urandom(10))


def attempt_row(run_id: UUID, **values: Any) -> AttemptRow:
    row = AttemptRow(
        run_id=run_id, attempt=1, state="running", started_at=1_790_000_000.0, reference_host="a", suspect_host="b"
    )
    return msgspec.structs.replace(row, **values)


WRITES: dict[str, Callable[[Engine, UUID, Fence], object]] = {
    "create_run": lambda e, r, f: store.create_run(e, run_row(new_id()), SUPERVISOR, fence=f),
    "start_attempt": lambda e, r, f: store.start_attempt(e, attempt_row(r, attempt=2), fence=f),
    "set_images": lambda e, r, f: store.set_images(e, r, 1, {"suspect": "sha256:1"}, fence=f),
    "finish_attempt": lambda e, r, f: store.finish_attempt(
        e, r, 1, state=AttemptState.CLOSED, reason="completed", ended_at=1.0, fence=f
    ),
    "finish_run": lambda e, r, f: store.finish_run(
        e, r, verdict="match", reason="completed", sentence="s", finished_at=1.0, fence=f
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_once_a_newer_leader_has_written_an_old_one_changes_nothing(engine: Engine, write: str) -> None:
    run_id = make_run(engine)
    old, new = Fence(engine, "controller", 7), Fence(engine, "controller", 8)
    rows = (
        "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM attempts), r.state, a.state, a.images "
        "FROM runs r, attempts a"
    )
    old.claim()
    new.claim()
    with engine.connect() as conn:
        before = conn.execute(text(rows)).all()
    with pytest.raises(Fenced, match="newer controller") as caught:
        WRITES[write](engine, run_id, old)
    assert "\n" not in str(caught.value)
    with engine.connect() as conn:
        assert conn.execute(text(rows)).all() == before
    WRITES[write](engine, run_id, new)
    WRITES["finish_run"](engine, run_id, replace(new, name="another"))
    assert newest(engine, "controller") == 8
    assert newest(engine, "nobody") == 0


def test_a_newer_leader_waits_for_the_transaction_of_the_old_one_and_not_the_other_way(engine: Engine) -> None:
    """Otherwise the old one could commit after the new one had looked."""
    done: list[str] = []
    old, new = Fence(engine, "controller", 1), Fence(engine, "controller", 2)
    with engine.begin() as conn:
        old.check(conn)
        other = threading.Thread(target=lambda: (new.claim(), done.append("new")))
        other.start()
        deadline = time.monotonic() + 30
        while not scalar(engine, "SELECT count(*) FROM pg_locks WHERE NOT granted"):
            assert time.monotonic() < deadline
        done.append("old")
    other.join(30)
    assert done == ["old", "new"]
    with pytest.raises(Fenced):
        old.claim()


def test_what_a_controller_repeats_changes_nothing(engine: Engine) -> None:
    row, fence = run_row(new_id()), Fence(engine, "controller", 1)
    for _ in range(2):
        store.create_run(engine, row, SUPERVISOR, exists_ok=True, fence=fence)
        store.start_attempt(engine, attempt_row(row.run_id), exists_ok=True, fence=fence)
    found = queries.load_run(engine, row.run_id)
    assert (found.run, len(found.attempts)) == (row, 1)
    assert scalar(engine, "SELECT supervisor->>'kind' FROM runs") == "controller"


def test_another_run_or_attempt_under_the_same_key_is_refused(engine: Engine) -> None:
    row = run_row(new_id())
    store.create_run(engine, row, SUPERVISOR)
    store.start_attempt(engine, attempt_row(row.run_id))
    for change in ({"synthetic": True}, {"kind": "null"}, {"workload": "gradient"}):
        with pytest.raises(DatabaseError, match="is another"):
            store.create_run(engine, msgspec.structs.replace(row, **change), SUPERVISOR, exists_ok=True)
    with pytest.raises(DatabaseError, match="other hosts"):
        store.start_attempt(engine, attempt_row(row.run_id, suspect_host="c"), exists_ok=True)
    with pytest.raises(DatabaseError, match="could not be started"):
        store.start_attempt(engine, attempt_row(new_id()), exists_ok=True)


def test_no_command_on_any_machine_closes_a_controllers_run(engine: Engine) -> None:
    """Its controller may be away for a while; whether it lives cannot be told from here."""
    assert liveness.alive(SUPERVISOR) is None
    assert liveness.alive(liveness.identity() | {"pid": 2**22 + 1} | SUPERVISOR) is None
    run_id = make_run(engine, supervisor=SUPERVISOR)
    assert store.close_orphans(engine, lambda _: ("inconclusive", "r", "s"), 1_790_000_000.0) == []
    assert queries.load_run(engine, run_id).run.state == "running"
