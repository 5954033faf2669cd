"""A PairRun whose spec cannot be read any more while its pair runs: it ends judged, and nothing stays live."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from cluster.api.hands import CRDS, Hands, leading
from cluster.handle import until
from tandem.db.engine import connect
from tandem.pairrun import names

pytestmark = pytest.mark.needs("api-server")
CRD = f"{names.PLURAL}.{names.GROUP}"
RULES = "x-kubernetes-validations"


@contextmanager
def another_definition(hands: Hands) -> Iterator[None]:
    """The CRD of another version, by which a spec's workload may change."""
    where = ("spec", "versions", 0, "schema", "openAPIV3Schema", "properties", "spec")
    spec = hands.kube.get(f"{CRDS}/{CRD}")
    for key in where:
        spec = spec[key]  # type: ignore[index]

    def patch(op: str, **value: object) -> None:
        body = [{"op": op, "path": "/" + "/".join(map(str, (*where, RULES))), **value}]
        hands.server.kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps(body))

    patch("remove")
    try:
        yield
    finally:
        patch("add", value=spec[RULES])


def spoil(hands: Hands) -> None:
    """A preset that this version does not ship, in a spec that was fine."""

    body = json.dumps({"spec": {"workload": {"model": "gone"}}})
    words = ("patch", "pairrun", "check", "-n", hands.namespace, "--type=merge", "-p", body)

    def changed() -> bool:
        done = hands.server.try_kubectl(*words)
        assert done.returncode == 0, done.stderr  # the old definition is still in force
        return True

    with another_definition(hands):
        until("the other definition", changed)


@pytest.mark.parametrize("who", ["the same controller", "its successor"])
def test_a_spec_that_becomes_unusable_mid_run_ends_the_pair_and_the_run_is_judged(pair: Hands, who: str) -> None:
    with leading(pair) as term:
        pair.create()
        pair.start()
        pair.wait_for(names.RUNNING, "True", "Running")
        until("the attempt's row", lambda: term.controller.facts.of(pair.run_id()).attempts)
        if who == "the same controller":
            spoil(pair)
            pair.wait_for(names.FINISHED, "True", "Inconclusive")
    if who == "its successor":
        spoil(pair)
    with leading(pair, token=2) as term:
        why = pair.wait_for(names.FINISHED, "True", "Inconclusive")
        assert why.startswith(
            "inconclusive: the attempt ended early: invalid_spec: unknown preset 'gone': choose one of"
        )
        status = pair.status()
        assert (status.verdict, status.reason, status.message) == ("inconclusive", "invalid_spec", why)
        assert [(a.reason, a.infrastructure) for a in status.attempts] == [("invalid_spec", True)]
        until("no Jobs", lambda: not pair.jobs())
        until("the event", lambda: "AttemptEnded" in pair.events())
        assert term.controller.wrong() is None
    engine = connect(pair.database)
    with engine.connect() as conn:
        run = conn.execute(text("SELECT state, verdict, reason FROM runs WHERE run_id = :id"), {"id": pair.run_id()})
        attempts = conn.execute(text("SELECT state FROM attempts WHERE run_id = :id"), {"id": pair.run_id()})
        assert [tuple(row) for row in run] == [("finished", "inconclusive", "invalid_spec")]
        assert [row.state for row in attempts] == ["orphaned"]
    engine.dispose()
