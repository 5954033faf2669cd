"""Checkpoints that a run cannot use are told in one line before it starts: nothing is stored, nothing compiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pairs import clean_end, run_pair

from tandem.cli.app import main
from tandem.db.engine import connect
from tandem.db.queries import list_runs
from tandem.errors import CheckpointError, TandemError
from tandem.spec import RunSpec
from tandem.supervisor import check_inputs
from tandem.vocabulary import Role
from tandem.worker_io import Checked
from tandem_worker.drift.saved import METADATA, WHOLE, check_side, listing_of
from tandem_worker.prepare import Inputs

TRAINED, EVERY = 4, 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    clean_end(run_pair(spec(folder)))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def spec(folder: Path | None, **more: Any) -> RunSpec:
    fields: dict[str, Any] = {"workload": "training", "steps": TRAINED, "self_replays": 2} | more
    if folder is not None:
        fields |= {"checkpoints": folder, "checkpoint_every": EVERY}
    return RunSpec(**fields)


def going_on(folder: Path, **more: Any) -> RunSpec:
    return spec(folder, **{"resume": True, "steps": TRAINED + 2, **more})


def cut(step: Path) -> None:
    """The largest file ends in its middle."""
    data = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def both(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """Every checkpoint that both sides hold is damaged on one of them."""

    def apply(folder: Path) -> None:
        damage(folder / "reference" / "4")
        damage(folder / "suspect" / "2")

    return apply


def test_what_can_be_used_passes(trained: Path, folder: Path) -> None:
    """Also where one of several is damaged: the run goes on from the one before it."""
    assert isinstance(check_inputs(going_on(trained)), Checked)
    assert isinstance(check_inputs(spec(None, start=trained / "suspect" / "4", seed=9)), Checked)
    cut(folder / "suspect" / "4")
    assert isinstance(check_inputs(going_on(folder)), Checked)
    assert isinstance(check_inputs(spec(folder / "new")), Checked)
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("damage", "more", "says"),
    [
        (lambda _: None, {"seed": 1}, "reference/2 is of another spec: its seed differs from this run's"),
        (lambda _: None, {"tp": 1}, "is of another spec: its tp differs"),
        (lambda _: None, {"batch": 8}, "is of another spec: its training differs"),
        (lambda _: None, {"data": [Path(__file__)]}, "is of another spec: its data differs"),
        (lambda _: None, {"resume": False}, "holds step 4 of an earlier run: give --resume, or another folder"),
        (lambda _: None, {"steps": 3}, "both sides hold step 4 of 3: nothing is left to do, give more --steps"),
        (shutil.rmtree, {}, "is missing: give the folder of the run to resume"),
        (both(cut), {}, "reference/4 is cut off or damaged: its files are not those that were saved"),
        (both(lambda step: listing_of(step).unlink()), {}, "is cut off or damaged: the list of its files is missing"),
        (lambda f: (f / "suspect" / "4" / METADATA).write_text("{"), {}, "suspect/4 is cut off, or was not written by"),
        (lambda f: (f / "suspect" / "4" / METADATA).write_text("[1]"), {}, "suspect/4 is cut off, or was not written"),
        (lambda f: (f / "suspect" / "4" / METADATA).unlink(), {}, "suspect/4 is cut off, or was not written by Tandem"),
    ],
)
def test_a_training_that_cannot_go_on(
    folder: Path, damage: Callable[[Path], object], more: dict[str, Any], says: str
) -> None:
    damage(folder)
    with pytest.raises(TandemError) as error:
        check_inputs(going_on(folder, **more))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "more", "says"),
    [
        (shutil.rmtree, {}, "is missing: give the folder of one step, such as .../reference/100"),
        (cut, {}, "is cut off or damaged: its files are not those that were saved"),
        (lambda step: (step / WHOLE).unlink(), {}, "is cut off, or was not written by Tandem"),
        (lambda step: (step / METADATA).write_text("\0"), {}, "is cut off, or was not written by Tandem"),
        (lambda _: None, {"model": "small"}, "is of another spec: its model differs"),
        (lambda _: None, {"tp": 1}, "is of another spec: its tp differs"),
    ],
)
def test_a_checkpoint_that_cannot_be_started_from(
    folder: Path, damage: Callable[[Path], object], more: dict[str, Any], says: str
) -> None:
    damage(folder / "reference" / "4")
    with pytest.raises(TandemError) as error:
        check_inputs(spec(None, start=folder / "reference" / "4", **more))
    assert says in str(error.value)


def test_a_version_to_come_is_told(folder: Path) -> None:
    path = folder / "reference" / "4" / METADATA
    found = json.loads(path.read_text())
    found["custom_metadata"]["tandem"] = json.dumps(json.loads(found["custom_metadata"]["tandem"]) | {"format": 2})
    path.write_text(json.dumps(found))
    with pytest.raises(TandemError, match="was written by another version of Tandem"):
        check_inputs(going_on(folder))


def test_nothing_is_stored_of_such_a_run(folder: Path, database_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--workload", "training", "--steps", "6", "--seed", "1", "--checkpoints", str(folder), "--resume"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--db", database_url])
    out, err = capfd.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: checkpoint ")
    engine = connect(database_url)
    assert list_runs(engine) == []
    engine.dispose()


def test_a_side_in_a_pod_looks_before_it_compiles(trained: Path) -> None:
    """Only its own are there; a later attempt takes those of its run, and no other's."""
    again = spec(trained, steps=TRAINED + 2)
    fields = Inputs(again).training_fields()
    saved = json.loads((trained / "reference" / "4" / METADATA).read_text())["custom_metadata"]["tandem"]
    for role in Role:
        check_side(again, role, fields, json.loads(saved)["lineage"], 2)
        with pytest.raises(CheckpointError, match="of an earlier run"):
            check_side(again, role, fields, "another", 2)
        with pytest.raises(CheckpointError, match="of another spec: its faults differs"):
            check_side(again, role, fields | {"faults": "x"}, json.loads(saved)["lineage"], 2)
