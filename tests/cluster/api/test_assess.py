"""`tandem assess NODE` against a real API server, a real PostgreSQL and, where it decides, the real controller."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine

from cluster.api.hands import Hands, leading
from cluster.handle import until
from node_runs import node_run, store_run
from tandem.db.engine import connect
from tandem.kube.client import Object
from tandem.kube.paths import PAIRRUNS
from tandem.pairrun import names
from tandem.records import RunRecords

pytestmark = pytest.mark.needs("api-server")
GPUS = {"capacity": {"nvidia.com/gpu": "8"}, "labels": {"nvidia.com/gpu.count": "8"}}


class Assessment:
    """The command as a process, on the namespace of a test."""

    def __init__(self, hands: Hands, node: str, folder: Path, *more: str, database: str | None = None) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "tandem.cli.app", "assess", node, "--namespace", hands.namespace,
                "--db", database or hands.database, "--model", "tiny", "--each", "60s", "--json", *more,
            ],
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
            env=hands.server.environment, start_new_session=True,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=240)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def pairruns(hands: Hands) -> list[Object]:
    found = hands.kube.list(PAIRRUNS.path(hands.namespace)).items
    return sorted(found, key=lambda obj: (obj["metadata"]["creationTimestamp"], obj["metadata"]["name"]))


def unfinished(hands: Hands) -> Object:
    """The one PairRun that waits for its end."""

    def one() -> bool:
        return sum(not (obj.get("status") or {}).get("conditions") for obj in pairruns(hands)) == 1

    until("a new PairRun", one)
    return next(obj for obj in pairruns(hands) if not (obj.get("status") or {}).get("conditions"))


def finish(hands: Hands, engine: Engine, obj: Object, **values: Any) -> None:
    """Play the controller: store the run of a PairRun, then write its end."""
    meta, spec = obj["metadata"], obj["spec"]
    run = {"kind": spec["kind"], "workload": spec["workload"]["name"], "model": "tiny", **values}
    records = _renamed(node_run(**run), names.run_id_of(meta["uid"], meta["creationTimestamp"]))
    store_run(engine, records)
    attempt = {
        "number": 1, "suspect": {"node": run["suspect"]}, "reference": {"node": run["reference"]}, "startedAt": "t",
    }  # fmt: skip
    hands.kube.patch_status(
        PAIRRUNS.path(hands.namespace, meta["name"]),
        {
            "conditions": [ended("Match", "match")], "attempts": [attempt], "attempt": 1, "verdict": "match",
            "suspect": attempt["suspect"], "reference": attempt["reference"], "runId": str(records.run.run_id),
        },
    )  # fmt: skip


def _renamed(records: RunRecords, run_id: Any) -> RunRecords:
    parts = ("steps", "mismatches", "controls", "gradients", "drifts", "closings", "attempts")
    new = {part: [msgspec.structs.replace(r, run_id=run_id) for r in getattr(records, part)] for part in parts}
    return msgspec.structs.replace(records, run=msgspec.structs.replace(records.run, run_id=run_id), **new)


def ended(reason: str, message: str) -> dict[str, Any]:
    return {
        "type": names.FINISHED, "status": "True", "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-30T00:00:00Z", "observedGeneration": 1,
    }  # fmt: skip


@pytest.fixture
def engine(hands: Hands) -> Iterator[Engine]:
    engine = connect(hands.database)
    yield engine
    engine.dispose()


def test_a_pair_that_no_attempt_can_be_made_of_ends_it(hands: Hands, engine: Engine, tmp_path: Path) -> None:
    """What the controller refuses for good stays refused: asking again would go on until the time is up."""
    sick = hands.node("sick", cordoned=True, **GPUS)
    for name in ("well", "good"):
        hands.node(name, **GPUS)
    store_run(engine, node_run(kind="null", suspect="well-1", reference="well-2", model="tiny"))
    with leading(hands):
        code, out, err = Assessment(hands, sick, tmp_path, "--tp", "3").end()
    assert (code, out) == (2, ""), err
    (made,) = pairruns(hands)
    error = err.splitlines()[-1]
    name = made["metadata"]["name"]
    assert error.startswith(f"error: nothing is known of {sick}: PairRun {name} ended without a run (tp 3 does not ")
    assert error.endswith("): mend that first")


def test_what_is_known_of_the_node_is_told_all_the_same(hands: Hands, engine: Engine, tmp_path: Path) -> None:
    """With its report: an assessment that cannot go on says where it stands."""
    sick = hands.node("sick", cordoned=True)
    store_run(engine, node_run(suspect=sick, model="small"))
    command = Assessment(hands, sick, tmp_path)
    made = unfinished(hands)["metadata"]["name"]
    hands.kube.patch_status(
        PAIRRUNS.path(hands.namespace, made),
        {"conditions": [ended("NoReference", "no node may be the reference")], "reason": "no_partner"},
    )
    code, out, err = command.end()
    assert code == 2, err
    told = json.loads(out)
    assert told["ended"].startswith(f"PairRun {made} ended without a run (no node may be the reference)")
    assert told["runs_made"] == 1
    assert told["profile"]["node"] == sick
    assert Path(tmp_path, told["report"]).stat().st_size > 10_000
    assert len(pairruns(hands)) == 1


def test_another_database_than_the_controllers_is_noticed(hands: Hands, tmp_path: Path) -> None:
    """The run took place, and what `--db` names knows nothing of it: the next one would be the same again."""
    sick = hands.node("sick", cordoned=True)
    command = Assessment(hands, sick, tmp_path)
    made = unfinished(hands)["metadata"]["name"]
    attempt = {"number": 1, "suspect": {"node": "a"}, "reference": {"node": "b"}, "startedAt": "t"}
    hands.kube.patch_status(
        PAIRRUNS.path(hands.namespace, made), {"conditions": [ended("Match", "it matched")], "attempts": [attempt]}
    )
    code, _, err = command.end()
    assert code == 2
    assert "this database has no run of it: give the controller's with --db" in err.splitlines()[-1]
    assert len(pairruns(hands)) == 1


def test_a_null_control_with_the_node_itself_ends_it(hands: Hands, engine: Engine, tmp_path: Path) -> None:
    """It controls nothing; a node that nobody quarantined is as good as any other for a null pair, again and again."""
    odd = hands.node("odd")
    command = Assessment(hands, odd, tmp_path)
    finish(hands, engine, unfinished(hands), suspect=odd, reference="well")
    code, out, err = command.end()
    assert code == 2, err
    assert f"took {odd} itself: quarantine it" in json.loads(out)["ended"]
    assert len(pairruns(hands)) == 1


def test_an_interrupted_assessment_goes_on_with_what_it_had_begun(hands: Hands, engine: Engine, tmp_path: Path) -> None:
    """The PairRun of the ended command is waited for first; what it stored is not run again."""
    sick = hands.node("sick", cordoned=True)
    first = Assessment(hands, sick, tmp_path)
    begun = unfinished(hands)
    first.process.send_signal(signal.SIGINT)
    code, out, err = first.end()
    assert (code, out, err.splitlines()[-1]) == (130, "", "interrupted")
    again = Assessment(hands, sick, tmp_path)
    line = ""
    assert again.process.stderr is not None
    while "which was begun before" not in line:
        line = again.process.stderr.readline()
        assert line, "it ended"
    assert begun["metadata"]["name"] in line
    finish(hands, engine, begun, suspect="well-1", reference="well-2")
    seen = [(begun["spec"]["kind"], begun["spec"]["workload"]["name"])]
    for _ in range(3):
        made = unfinished(hands)
        kind = made["spec"]["kind"]
        seen.append((kind, made["spec"]["workload"]["name"]))
        finish(hands, engine, made, suspect="well-1" if kind == "null" else sick, reference="well-2")
    code, out, err = again.end()
    assert code == 2, err
    assert seen == [("null", "submodule"), ("suspect", "submodule"), ("null", "gradient"), ("suspect", "gradient")]
    assert "too small to clear a node" in json.loads(out)["ended"]
    assert json.loads(out)["runs_made"] == 4
