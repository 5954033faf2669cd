"""The PairRun: one spec model for the cluster and the command line, its schema, its names, its status."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import SpecError
from tandem.pairrun import crd, generate, names, workload
from tandem.pairrun.spec import MUTABLE, PairRunSpec, read_spec
from tandem.pairrun.status import PairRunStatus, read_status, set_condition
from tandem.spec import RunSpec
from tandem.vocabulary import Kind, Role, Workload
from tandem_controller import reasons

CRD = Path(__file__).parents[2] / "deploy" / "helm" / "tandem" / "files" / "crd.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "pairrun.md"
SOURCES = [
    Path(__file__).parents[2] / p
    for p in (
        "common/tandem/pairing/choose.py",
        "common/tandem/pairing/devices.py",
        "controller/tandem_controller/plan.py",
    )
]
SCHEMA: dict[str, Any] = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, value in schema.get("properties", {}).items():
        found += walk(value, f"{path}.{name}")
    for part in ("items", "additionalProperties"):
        if isinstance(schema.get(part), dict):
            found += walk(schema[part], f"{path}[]")
    return found


def test_the_generated_definition_is_not_stale() -> None:
    assert CRD.read_text(encoding="utf-8") == generate.text(), "run `make generate`"


def test_the_page_about_pairruns_has_the_fields_of_today_and_every_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == generate.tables(page), "run `make generate`"
    told = set(re.findall(r"`(\w+)`", page))
    ours = {*reasons.WAITING.values(), *reasons.ADMISSION.values(), *reasons.DISRUPTED.values(), "device_gone"}
    assert ours <= told
    source = "\n".join(p.read_text(encoding="utf-8") for p in SOURCES)
    named = set(re.findall(r'(?:NoPairing|NoShare)\(\s*"(\w+)"', source)) | set(
        re.findall(r'return "([A-Z]\w+)", ', source)
    )
    assert named, "the pattern must still fit the code"
    assert named <= told


@pytest.mark.parametrize("word", list(Workload))
def test_every_workload_is_one_of_a_pairrun_and_the_page_refuses_none(word: Workload) -> None:
    values = {"name": str(word)} | ({"questions": ["/q.jsonl"]} if word is Workload.FINETUNE else {})
    assert read_spec({"workload": values}).run.workload is word
    page = PAGE.read_text(encoding="utf-8")
    assert f"`{word}`" in page
    assert "exists yet" not in page
    assert "refused by name" not in page


def test_every_field_of_a_run_spec_is_a_field_of_the_workload_or_of_the_pairrun() -> None:
    assert set(workload.FIELDS.values()) | set(workload.ELSEWHERE) == set(RunSpec.model_fields)
    assert set(workload.FIELDS) == set(SCHEMA["properties"]["spec"]["properties"]["workload"]["properties"])
    assert set(workload.DESCRIPTIONS) == set(workload.FIELDS.values())


def test_the_schema_is_structural_described_and_without_floats() -> None:
    for path, part in walk(SCHEMA):
        if path == ".metadata":
            continue
        assert part.get("type") in ("object", "array", "string", "integer", "boolean"), path
        assert not {"$ref", "anyOf", "allOf", "oneOf", "title", "$defs"} & set(part), path
        if not path.endswith("[]") and path:
            assert part.get("description"), path
        if part["type"] == "array":
            assert "items" in part, path
            if path.startswith(".spec"):
                assert "maxItems" in part, path
        if part["type"] == "string" and path.startswith(".spec"):
            assert {"maxLength", "enum"} & set(part), f"{path}: CEL must know a bound"


def test_defaults_of_the_schema_are_those_of_the_model() -> None:
    spec = SCHEMA["properties"]["spec"]["properties"]
    run = RunSpec()
    for name, field in workload.FIELDS.items():
        if "default" in spec["workload"]["properties"][name]:
            assert spec["workload"]["properties"][name]["default"] == getattr(run, field), name
    assert spec["startDeadlineSeconds"]["default"] == PairRunSpec().start_deadline_seconds
    assert spec["kind"]["default"] == "suspect"
    assert spec["retry"]["properties"]["maxAttempts"]["default"] == 3


def test_what_must_not_change_has_a_rule() -> None:
    spec = SCHEMA["properties"]["spec"]
    fixed = {
        m[1] for r in spec["x-kubernetes-validations"] if (m := re.fullmatch(r"self\.(\w+) == oldSelf\.\1", r["rule"]))
    }
    assert fixed == set(spec["properties"]) - set(MUTABLE)
    for name in fixed:  # a transition rule on an absent field would not be looked at
        assert "default" in spec["properties"][name], name


SPECS: list[dict[str, Any]] = [
    {},
    {"steps": 7, "seed": 3, "tp": 4, "sync": "digest", "window": 8},
    {"duration": 60.0},
    {"steps": 3, "duration": 60.0, "step_timeout": 5.0, "peer_timeout": 9.0},
    {"weights": "/weights", "tokenizer": "/weights/tokenizer.json", "data": ["/data/a.txt", "/data/b.txt"]},
    {"model": "small", "batch": 3, "sequence": 128, "compute": "float32", "accumulate": "compute"},
    {"fault": "/faults/x.toml", "replays": 2, "replay_budget": 0, "self_replays": 2, "row_cap": 5},
    {"fault": "node-11"},
    {"optimizer": {"learning_rate": 1e-3, "schedule": "constant", "clip_norm": None, "warmup_steps": 3}},
]


@pytest.mark.parametrize("values", SPECS)
@pytest.mark.parametrize("kind", list(Kind))
def test_a_local_spec_and_its_pairrun_mean_the_same(values: dict[str, Any], kind: Kind) -> None:
    spec = RunSpec.model_validate(values | {"kind": kind})
    there = workload.from_run_spec(spec)
    back = read_spec({"kind": str(kind), "workload": there}).run
    assert back.model_dump() == spec.model_dump()
    for name in there:
        assert name in workload.FIELDS


def test_parts_of_a_second_have_no_place_in_a_pairrun() -> None:
    with pytest.raises(SpecError, match="whole seconds"):
        workload.from_run_spec(RunSpec(duration=0.5))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"workload": {"model": "huge"}}, "unknown preset 'huge'"),
    ({"workload": {"name": "finetune"}}, "workload finetune needs questions"),
    ({"workload": {"name": "nonsense"}}, "name"),
    ({"workload": {"colour": "red"}}, "colour: no such field"),
    ({"workload": {"stepTimeoutSeconds": -1}}, "stepTimeoutSeconds: "),
    ({"workload": {"sync": "none"}}, "compares nothing"),
    ({"workload": []}, "workload"),
    ({"suspect": {"nodeName": "a", "selector": {}}}, "not both"),
    ({"suspect": {"nodeName": "a"}, "reference": {"nodeName": "a"}}, "the same node"),
    ({"suspect": {"nodeName": "A_b"}}, "nodeName"),
    ({"template": {"env": [{"name": "TANDEM_ROLE"}]}}, "the controller's"),
    ({"template": {"env": [{"name": "A"}, {"name": "A"}]}}, "A comes twice"),
    ({"template": {"volumes": [{"name": "v", "mountPath": "/v"}]}}, "exactly one of"),
    ({"template": {"volumes": [{"name": "v", "mountPath": "/v", "secret": {}}]}}, "secret"),
    ({"template": {"tolerations": [{"operator": "Exists"}]}}, "key"),
    ({"retry": {"maxAttempts": 0}}, "maxAttempts"),
    ({"colour": "red"}, "colour"),
    ({"resources": {"memory": "much"}}, "memory"),
]


@pytest.mark.parametrize(("values", "word"), WRONG)
def test_what_is_wrong_is_one_line_that_names_the_field(values: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError) as error:
        read_spec(values)
    assert word in str(error.value)
    assert "\n" not in str(error.value)
    assert not re.match(r"([a-z]+): \1: ", str(error.value))


@pytest.mark.parametrize("values", [None, [], "x", 3])
def test_a_spec_that_is_no_object_is_refused(values: Any) -> None:
    with pytest.raises(SpecError):
        read_spec(values)


# -- names ---------------------------------------------------------------------------------------------


@given(
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?", fullmatch=True), st.uuids().map(str), st.integers(1, 10**6),
    st.sampled_from([None, *Role]),
)  # fmt: skip
def test_names_of_children_are_labels_and_unique(pairrun: str, uid: str, attempt: int, role: Role | None) -> None:
    """Also for the longest PairRun: the pods of a Job get six characters more."""
    name = names.child_name(pairrun, uid, attempt, role)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) + 6 <= 63
    others = {
        names.child_name(pairrun, uid, attempt + 1, role), names.child_name(pairrun, uid[::-1] + "x", attempt, role),
        names.child_name(pairrun, uid, attempt, Role.SUSPECT if role is not Role.SUSPECT else None),
    }  # fmt: skip
    assert name not in others
    assert len(names.pair_label(uid, attempt)) <= 63


def test_the_run_of_a_pairrun_is_always_the_same_and_sorts_by_time() -> None:
    one = names.run_id_of("uid-1", "2026-11-30T10:00:00Z")
    assert one == names.run_id_of("uid-1", "2026-11-30T10:00:00+00:00")
    assert one.version == 7
    assert one < names.run_id_of("uid-1", "2026-11-30T10:00:01Z")
    assert one != names.run_id_of("uid-2", "2026-11-30T10:00:00Z")


# -- status --------------------------------------------------------------------------------------------


def test_a_condition_changes_its_time_only_with_its_status() -> None:
    first = set_condition([], names.PAIRED, False, "NoReference", "none", 1e9, 1)
    second = set_condition(first, names.PAIRED, False, "BackOff", "later", 2e9, 2)
    assert second[0].last_transition_time == first[0].last_transition_time
    third = set_condition(second, names.PAIRED, True, "Paired", "", 3e9, 2)
    assert third[0].last_transition_time > second[0].last_transition_time
    assert set_condition(third, names.RUNNING, None, "X", "", 3e9, 2)[1].status == "Unknown"


@pytest.mark.parametrize(
    "values",
    [None, 3, [], {"conditions": 3}, {"attempts": [{"number": "x"}]}, {"counts": {"sites": "many"}}, {"verdict": []},
     {"attempt": -5}, {"attempt": 3_000_000_000}, {"unknown": 1}, {"conditions": [{"type": "Paired"}]}],
)  # fmt: skip
def test_a_status_that_a_hand_edited_is_read_field_by_field(values: Any) -> None:
    """What cannot be read counts as absent; the rest stays."""
    assert isinstance(read_status(values), PairRunStatus)
    if isinstance(values, dict):
        assert read_status(values | {"step": 7}).step == 7


@pytest.mark.parametrize(
    "values", [{"number": 0}, {"number": 2**31}, {"device": "x"}, {"devices": -1}, {"tp": 2**31}], ids=str
)
def test_an_attempt_that_neither_kubernetes_nor_postgresql_would_take_is_none(values: dict[str, Any]) -> None:
    sound = {"number": 2**31 - 1, "suspect": {"node": "a"}, "reference": {"node": "b"}, "startedAt": "x"}
    assert len(read_status({"attempts": [sound]}).attempts) == 1
    assert not read_status({"attempts": [sound | values]}).attempts


def test_a_status_survives_its_way_through_the_cluster() -> None:
    status = PairRunStatus(
        run_id="x", step=3, verdict="match", conditions=set_condition([], names.PAIRED, True, "Paired", "m", 1e9, 1)
    )
    assert read_status(status.to_object()) == status
