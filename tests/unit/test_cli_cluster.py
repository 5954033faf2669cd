"""Commands for clusters, as far as they need none: specs, names, lines, candidates, errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusters import POLICY, node, use, world
from tandem.cli import candidates, pair
from tandem.cli.app import main
from tandem.errors import SpecError, TandemError
from tandem.faults.files import shipped_names
from tandem.pairing.candidates import of_world
from tandem.pairrun.changes import told
from tandem.pairrun.spec import read_spec
from tandem.pairrun.status import PairRunStatus, read_status
from tandem.vocabulary import Kind


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "TANDEM_DB", "TANDEM_DB_FILE"):
        monkeypatch.delenv(name, raising=False)


# -- tandem run --dry-run --------------------------------------------------------------------------------


def test_a_local_spec_is_printed_as_the_pairrun_that_runs_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text("steps: 7\nwindow: 3\noptimizer: {learning_rate: 0.001}\n")
    code, out, err = run(
        capsys,
        "run",
        "spec.yaml",
        "--dry-run",
        "--kind",
        "null",
        "--fault",
        "node-11",
        "--weights",
        "w",
        "--sync",
        "full",
    )
    assert (code, err) == (0, "")
    body = yaml.safe_load(out)
    assert (body["apiVersion"], body["kind"]) == ("tandem.dev/v1alpha1", "PairRun")
    spec = read_spec(body["spec"]).run
    assert (spec.kind, spec.steps, spec.window, spec.sync) == (Kind.NULL, 7, 3, "full")
    assert str(spec.fault) == "node-11"
    assert spec.weights == tmp_path / "w"
    assert spec.optimizer == {"learning_rate": 0.001}


def test_what_a_pairrun_cannot_say_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", "--dry-run", "--duration", "1.5")
    assert (code, err.count("\n")) == (64, 1)
    assert "whole seconds" in err


@pytest.mark.parametrize("arguments", [("--db", "postgresql://h/d"), ("--run-id", "x"), ("--json",)])
def test_a_dry_run_ignores_nothing_that_was_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, "run", "--dry-run", *arguments)
    assert (code, out) == (64, "")
    assert err == f"error: --dry-run stores no run and prints YAML: leave {arguments[0]} out\n"
    monkeypatch.setenv("TANDEM_DB", "postgresql://h/d")  # set for every command: no request
    assert run(capsys, "run", "--dry-run")[0] == 0


@pytest.mark.parametrize("more", [("--dry-run",), ()])
def test_a_name_that_no_fault_profile_has_is_told_those_that_ship(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, "run", "--fault", "nosuch", *more)
    assert (code, out, err.count("\n")) == (64, "", 1)
    assert "fault profile nosuch: " in err
    assert all(name in err for name in shipped_names())


@pytest.mark.parametrize("command", [("run",), ("run", "--dry-run"), ("pair", "node-1")])
@pytest.mark.parametrize("mode", ["none", "never"])
def test_a_mode_that_compares_nothing_is_not_offered(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], mode: str
) -> None:
    code, _, err = run(capsys, *command, "--sync", mode)
    assert code == 64
    assert err in (
        "error: option: sync 'none' compares nothing; it exists for the benchmark only\n",
        "error: option: sync: 'never' is no mode: use full, digest or optimistic\n",
    )


# -- tandem pair -----------------------------------------------------------------------------------------


def test_a_pairruns_spec_holds_what_was_asked_and_nothing_else() -> None:
    spec = pair.pairrun_spec(Kind.SWAP, "sick", "healthy", {"steps": 5, "fault": Path("demo"), "duration": 60.0})
    assert spec == {
        "kind": "swap",
        "suspect": {"nodeName": "sick"},
        "reference": {"nodeName": "healthy"},
        "workload": {"steps": 5, "durationSeconds": 60, "fault": "demo"},
    }
    assert pair.pairrun_spec(Kind.NULL, None, None, {}) == {"kind": "null", "workload": {}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"node": "a", "reference": "a"}, "same node"),
        ({"asked": {"model": "huge"}}, "unknown preset"),
        ({"asked": {"steps": 0}}, "steps"),
        ({"asked": {"workload": "finetune"}}, "needs questions"),
        ({"asked": {"weights": Path("w")}}, "--weights w: give the path in the pods"),
        ({"asked": {"data": [Path("/a"), Path("b")]}}, "--data b: give the path in the pods"),
        (
            {"asked": {"fault": Path("nosuch")}},
            "--fault nosuch: use anatomy, bursts, demo, .* or give the path in the pods",
        ),
        ({"asked": {"fault": Path("a/b.toml")}}, "--fault a/b.toml: use "),
        ({"node": "Not A Node"}, "nodeName"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_made(arguments: dict[str, Any], words: str) -> None:
    values = {"node": "a", "reference": None, "asked": {}, **arguments}
    with pytest.raises(TandemError, match=words) as caught:
        pair.pairrun_spec(Kind.SUSPECT, values["node"], values["reference"], values["asked"])
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 64


def test_names_are_new_and_names() -> None:
    found = {pair.generated_name("Node.Example") for _ in range(50)}
    assert len(found) == 50
    for name in [*found, pair.generated_name("n" * 300)]:
        assert read_spec({"suspect": {"nodeName": name}}).suspect.node_name == name
        assert len(name) <= 253


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["pair"], 64, "name the node under test"),
        (["pair", "--null", "--swap"], 64, "not both"),
        (["pair", "sick"], 2, "no kubeconfig"),
        (["watch", "x"], 2, "no kubeconfig"),
        (["candidates"], 2, "no kubeconfig"),
        (["candidates", "--kubeconfig", "/nowhere"], 2, "/nowhere is not there"),
        (["db", "wait"], 64, "nothing to wait for"),
        (["db", "wait", "--db-file", "/nowhere"], 2, "/nowhere .* cannot be read"),
        (["db", "upgrade", "--db-file", "/dev/null"], 2, "is empty"),
    ],
)
def test_errors_are_one_line_with_the_mend(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    found, out, err = run(capsys, *arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert re.search(words, err), err


def test_without_the_package_the_mend_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    code, _, err = run(capsys, "candidates")
    assert code == 2
    assert "install tandem-sdc[controller]" in err


def test_a_controller_that_is_not_installed_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tandem_controller.main", None)
    code, _, err = run(capsys, "controller", "--config", "/nowhere")
    assert code == 2
    assert "install tandem-sdc[controller]" in err


def test_following_a_run_of_which_nothing_was_heard_claims_nothing_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {
        "current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}], "users": [{"name": "u", "user": {}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    code, out, err = run(capsys, "watch", "x", "--kubeconfig", "config", "--timeout", "0.1")
    assert (code, out) == (2, "")
    assert "nothing was heard of the PairRun default/x" in err
    assert "goes on" not in err


def test_the_database_is_waited_for_no_longer_than_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "uri").write_text("postgresql://u:hunter2@127.0.0.1:1/x\n")
    code, out, err = run(capsys, "db", "wait", "--db-file", "uri", "--timeout", "0.05")
    assert (code, out) == (2, "")
    assert "cannot be used" in err
    assert "hunter2" not in err


@pytest.mark.parametrize(("verdict", "code"), [("match", 0), ("mismatch", 1), ("inconclusive", 2), ("", 2)])
def test_exit_codes(verdict: str, code: int) -> None:
    assert pair.exit_code(verdict) == code


# -- what is told of a status ----------------------------------------------------------------------------


def status(**values: Any) -> PairRunStatus:
    return read_status(values)


def condition(kind: str, status_: str, reason: str = "R", message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status_, "reason": reason, "message": message, "lastTransitionTime": "t"}


def test_every_change_is_told_once() -> None:
    suspect, reference = {"node": "sick", "reason": "cordoned"}, {"node": "healthy", "reason": "idle"}
    attempt = {"number": 1, "suspect": suspect, "reference": reference, "startedAt": "t"}
    paired = {"conditions": [condition("Paired", "True")], "suspect": suspect, "reference": reference}
    stages: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"conditions": [condition("Paired", "False", "NoReference", "no reference")]}, ["no pair yet: no reference"]),
        (
            paired | {"attempts": [attempt]},
            ["suspect sick (cordoned), reference healthy (idle)"],
        ),
        ({"attempts": [attempt | {"runningAt": "t"}], "steps": 20}, ["attempt 1 runs"]),
        ({"step": 3, "counts": {"elements": 5000}}, ["step 3/20 · elements 5,000 · mismatching none"]),
        (
            {
                "step": 4,
                "counts": {"elements": 6000, "mismatchedSites": 1, "mismatchedElements": 9, "otherFindings": 2},
                "firstMismatch": {"step": 4, "site": "fwd/attn layer 3 out", "rank": 1, "mismatched": 9},
            },
            [
                "step 4/20 · elements 6,000 · mismatching 9 in 1 site · other findings 2",
                "first mismatch: step 4 fwd/attn layer 3 out rank 1, 9 elements",
            ],
        ),
        (
            {"attempts": [attempt | {"runningAt": "t", "endedAt": "t", "reason": "evicted", "message": "gone\x1b[0m"}]},
            ["attempt 1 ended: evicted: gone"],
        ),
    ]  # fmt: skip
    before: PairRunStatus | None = None
    merged: dict[str, Any] = {}
    for change, expected in stages:
        merged |= change
        now = status(**merged)
        lines = told(before, now)
        assert [line.split("gone")[0] for line in lines] == [line.split("gone")[0] for line in expected]
        assert not any("\x1b" in line for line in lines)
        assert told(now, now) == []
        before = now


# -- tandem candidates -----------------------------------------------------------------------------------


def test_candidates_come_with_their_reference_and_with_why_others_would_not_do() -> None:
    seen = world(
        node("sick", gpus=8, cordoned=True), node("sick-too", gpus=8, cordoned=True), node("good", gpus=8),
        node("busy", gpus=8), node("other", gpus=8, labels={"nvidia.com/gpu.product": "NVIDIA-A100"}),
        pods=[use("job", "busy", nvidia_com__gpu=8)],
    )  # fmt: skip
    found = of_world(seen, POLICY)
    assert [(c.node, c.reference, c.device, c.devices) for c in found] == [
        ("sick", "good", "nvidia.com/gpu", 8), ("sick-too", "good", "nvidia.com/gpu", 8),
    ]  # fmt: skip
    why = {p.node: p.reason for p in found[0].passed_over}
    assert why == {"busy": "NoRoom", "other": "Unlike", "sick-too": "Quarantined"}
    lines = candidates.lines(found)
    assert lines[0].startswith("sick (cordoned): good (like the suspect, idle; 8 nvidia.com/gpu)")
    assert any(line.startswith("  not other: Unlike: differs from sick in nvidia.com/gpu.product") for line in lines)


def test_a_candidate_without_a_reference_says_why() -> None:
    (found,) = of_world(world(node("sick", cordoned=True)), POLICY)
    assert found.reference is None
    assert "no node may be the reference" in candidates.lines([found])[0]
    assert of_world(world(node("good")), POLICY) == []


def test_a_policy_of_the_installations_own(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("quarantine: [{kind: label, key: broken}]\n")
    policy = candidates.policy_of(tmp_path / "policy.yaml")
    assert [s.key for s in policy.quarantine] == ["broken"]
    for content, words in (("{", "not valid YAML"), ("quarantine: 1", "quarantine")):
        (tmp_path / "policy.yaml").write_text(content)
        with pytest.raises(SpecError, match=words):
            candidates.policy_of(tmp_path / "policy.yaml")
    with pytest.raises(SpecError, match="No such file"):
        candidates.policy_of(tmp_path / "absent")
