"""What the controller asks PostgreSQL before a swap: with which references a suspect was compared, in this cluster."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from db_samples import make_run
from tandem.db import store
from tandem.db.engine import connect
from tandem.db.fence import Fence
from tandem.db.liveness import controller_identity
from tandem.errors import DatabaseError
from tandem.pairrun import names
from tandem.vocabulary import AttemptState
from tandem_controller.verdicts import Verdicts


def verdicts(engine: Engine, cluster: str = "here") -> Verdicts:
    return Verdicts(engine, Fence(engine, names.LEASE, 1), cluster, "tandem")


def run(
    engine: Engine, reference: str, verdict: str, *, cluster: str | None = "here", namespace: str = "tandem",
    state: AttemptState = AttemptState.CLOSED, synthetic: bool = False,
) -> UUID:  # fmt: skip
    """A run of one attempt that ended so; without a cluster: a local one."""
    supervisor: dict[str, Any] | None = None
    if cluster is not None:
        supervisor = controller_identity(namespace, "check", "u-1") | {"cluster": cluster}
    run_id = make_run(engine, hosts=(reference, "sick"), supervisor=supervisor, synthetic=synthetic)
    store.finish_attempt(engine, run_id, 1, state=state, reason="completed", ended_at=1.0)
    store.finish_run(engine, run_id, verdict=verdict, reason="completed", sentence="s", finished_at=1.0)
    return run_id


def test_situation_8_a_swap_knows_every_reference_of_a_run_that_spoke(engine: Engine) -> None:
    assert verdicts(engine).compared_with() == {}
    run(engine, "matched", "match")
    run(engine, "mismatched", "mismatch")
    run(engine, "mismatched", "mismatch")
    run(engine, "silent", "inconclusive")
    run(engine, "synthetic", "mismatch", synthetic=True)
    run(engine, "lost", "match", state=AttemptState.ORPHANED)
    make_run(engine, hosts=("running", "sick"), supervisor={"kind": "controller", "cluster": "here"})
    run(engine, "other installation", "match", namespace="elsewhere")
    assert verdicts(engine).compared_with() == {"sick": {"matched", "mismatched", "other installation"}}


def test_nodes_of_other_clusters_and_machines_are_others_whatever_their_names(engine: Engine) -> None:
    """One database may serve several clusters, and local runs: `node-7` is a machine of its own in each."""
    run(engine, "well", "match", cluster="there")
    run(engine, "well", "match", cluster=None)
    assert verdicts(engine).compared_with() == {}
    assert verdicts(engine, "there").compared_with() == {"sick": {"well"}}


def test_without_the_database_it_is_an_error_and_not_an_empty_answer(engine: Engine, database_url: str) -> None:
    """A swap that took a reference again would look like a reproduction."""
    away = connect(database_url.replace("/test_", "/none_"))
    with pytest.raises(DatabaseError):
        verdicts(away).compared_with()
    away.dispose()
