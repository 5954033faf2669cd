"""Every flag that says what a pair runs arrives in the spec, by `tandem run --dry-run` and by `tandem pair`."""

from __future__ import annotations

from typing import Any

import pytest
import typer
import yaml

from tandem.cli import pair
from tandem.cli.app import app, main
from tandem.errors import UsageError
from tandem.pairrun.spec import read_spec
from tandem.pairrun.workload import from_run_spec
from tandem.spec import RunSpec

COMMON: dict[str, Any] = {
    "model": "small", "tokenizer": "/t.json", "tp": 1, "steps": 7, "duration": 30, "seed": 5, "fault": "node-11",
    "batch": 3, "sequence": 32, "compute": "float32",
}  # fmt: skip
TRAINING = {
    "exchange_mib": 9, "exact_every": 11, "baseline": "seed", "checkpoints": "/saved", "checkpoint_every": 4,
    "resume": True,
}  # fmt: skip
WORKLOADS: dict[str, dict[str, Any]] = {
    "submodule": COMMON | {"data": ["/a.txt", "/b.txt"], "weights": "/w", "sync": "digest", "window": 8},
    "gradient": COMMON | {"data": ["/a.txt"], "exchange_mib": 9, "sync": "full", "window": 8},
    "training": COMMON | TRAINING | {"data": ["/a.txt"], "start": "/saved/reference/100"},
    "finetune": COMMON | TRAINING | {
        "weights": "/w", "questions": ["/q.jsonl", "/r.jsonl"], "held_out_percent": 33, "scoring": "letter",
        "packed": True, "evaluate_every": 6,
    },
}  # fmt: skip
"""Workload -> values of its fields, none of them the default."""


def arguments(fields: dict[str, Any]) -> list[str]:
    out: list[str] = []
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            out += [f"--{name.replace('_', '-')}", *([] if each is True else [str(each)])]
    return out


def flags(command: str) -> set[str]:
    """The command's flags that are fields of a run spec."""
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    return {p.name for p in found.params} & set(RunSpec.model_fields)


@pytest.mark.parametrize("command", ["run", "pair"])
def test_every_flag_is_tried_below(command: str) -> None:
    tried = {"workload", *(name for fields in WORKLOADS.values() for name in fields)}
    assert flags(command) - {"kind"} == tried


def expected(workload: str) -> RunSpec:
    spec = RunSpec.model_validate({"workload": workload} | WORKLOADS[workload])
    for name in WORKLOADS[workload]:
        assert getattr(spec, name) != RunSpec.model_fields[name].default, name
    return spec


def called(*command: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(command))
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_dry_run_has_every_flag(capsys: pytest.CaptureFixture[str], workload: str) -> None:
    code = called("run", "--dry-run", "--workload", workload, *arguments(WORKLOADS[workload]))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    body = yaml.safe_load(out)["spec"]["workload"]
    assert read_spec(yaml.safe_load(out)["spec"]).run == expected(workload)
    assert body == from_run_spec(expected(workload))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_pair_in_a_cluster_is_asked_for_with_every_flag(monkeypatch: pytest.MonkeyPatch, workload: str) -> None:
    made: list[dict[str, Any]] = []
    build = pair.pairrun_spec

    def spy(*args: Any) -> dict[str, Any]:
        made.append(build(*args))
        raise UsageError("seen")

    monkeypatch.setattr(pair, "pairrun_spec", spy)
    assert called("pair", "node-1", "--workload", workload, *arguments(WORKLOADS[workload])) == 64
    (spec,) = made
    assert spec["workload"] == from_run_spec(expected(workload))


@pytest.mark.parametrize("name", pair.PATHS)
def test_a_path_that_is_not_one_in_the_pods_is_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    workload = next(w for w, fields in WORKLOADS.items() if name in fields)
    fields = WORKLOADS[workload] | {name: "here"}
    assert called("pair", "node-1", "--workload", workload, *arguments(fields)) == 64
    err = capsys.readouterr().err
    assert (err.count("\n"), f"--{name} here: give the path in the pods" in err) == (1, True)


def test_paths_are_all_there() -> None:
    """Every field of the spec that holds a path, but the fault profile, which may be a name."""
    paths = {name for name, field in RunSpec.model_fields.items() if "Path" in str(field.annotation)}
    assert paths - {"fault"} == set(pair.PATHS)
