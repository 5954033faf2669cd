"""The launch form: every field of the run spec has a control, and what is typed becomes the order that it says."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.spec import RunSpec, preset_names
from tandem_api.console import forms

CONTROLS = forms.controls(preset_names(), ["demo"])
AS_SHOWN = [(control.name, control.default) for control in CONTROLS]


def test_every_field_has_a_control_with_its_default_and_a_hint() -> None:
    assert [control.name for control in CONTROLS] == list(RunSpec.model_fields)
    assert set(forms.HINTS) == set(RunSpec.model_fields)
    assert set(forms.FIRST) <= set(RunSpec.model_fields)
    for control in CONTROLS:
        assert control.hint, control.name
        if control.kind == "select":
            assert control.default in control.options, control.name
    by_name = {control.name: control for control in CONTROLS}
    assert by_name["sync"].options == ("full", "digest", "optimistic"), "what a run may not have is not offered"
    assert by_name["data"].kind == "lines"
    assert by_name["resume"].kind == "check"


def test_the_form_as_shown_is_the_spec_by_default() -> None:
    body = forms.order(AS_SHOWN)
    assert set(body["spec"]) == set(forms.ALWAYS)
    order, wrong = forms.read(body)
    assert wrong == {}
    assert order is not None
    assert order.spec == RunSpec()


@pytest.mark.parametrize(
    ("typed", "spec"),
    [
        ({"steps": "", "duration": "90"}, {"duration": 90}),
        ({"seed": " 7 ", "window": "64"}, {"seed": 7}),
        ({"tp": "2"}, {"tp": 2}),
        ({"data": "/a.txt\r\n\r\n/b.txt\r\n"}, {"data": ["/a.txt", "/b.txt"]}),
        (
            {"optimizer": "learning_rate: 0.001\nclip_norm: null"},
            {"optimizer": {"learning_rate": 0.001, "clip_norm": None}},
        ),
        ({"workload": "training", "resume": "true", "checkpoints": "/c"}, {"resume": True, "checkpoints": "/c"}),
        ({"step_timeout": "600"}, {}),
        ({"fault": "demo"}, {"fault": "demo"}),
        ({"csrf": "x", "nonce": "y", "nobody": "z"}, {}),
    ],
)
def test_what_is_typed(typed: dict[str, str], spec: dict[str, Any]) -> None:
    body = forms.order([*AS_SHOWN, *typed.items()])
    assert {k: v for k, v in body["spec"].items() if k not in forms.ALWAYS} == spec


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ({"steps": "-3"}, "steps"), ({"seed": "x"}, "seed"), ({"node": "No Such Name"}, "node"), ({"tp": "1.5"}, "tp"),
        ({"steps": ""}, ""), ({"questions": "/q.jsonl"}, ""), ({"cluster": "resources: {cpu: many}"}, "cluster"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_at_its_field(typed: dict[str, str], field: str) -> None:
    order, wrong = forms.read(forms.order([*AS_SHOWN, *typed.items()]))
    assert order is None
    assert set(wrong) == {field}


@pytest.mark.parametrize("text", ["a: [", "- a", "1", "? {}\n: 1", "!!python/object:os.system x"])
def test_a_text_that_is_no_mapping_is_told_at_its_field(text: str) -> None:
    with pytest.raises(ValueError, match="optimizer"):
        forms.order([("optimizer", text)])


@given(st.dictionaries(st.sampled_from([name for name, _ in AS_SHOWN] + ["node", "cluster"]), st.text(max_size=30)))
def test_no_text_breaks_the_form(typed: dict[str, str]) -> None:
    try:
        body = forms.order([*AS_SHOWN, *typed.items()])
    except ValueError as error:
        field, _ = error.args  # told at a field, as those that the route expects
        assert field
        return
    order, wrong = forms.read(body)
    assert (order is None) == bool(wrong)
    if order is not None:
        assert yaml.safe_load(forms.spec_yaml(body)) == body["spec"]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=40))
def test_the_command_is_one_for_any_text(text: str) -> None:
    body = {"spec": {"model": text}}
    words = shlex.split(forms.curl("http://h:1", body).replace("\\\n", ""))
    assert json.loads(words[words.index("-d") + 1]) == body
    assert words[-1] == "http://h:1/v1/runs"


def test_problems_of_the_launcher_are_told_at_their_fields() -> None:
    assert forms.place("body.spec.model") == "model"
    assert forms.place("body.node") == "node"
    assert forms.place("body.spec") == forms.place("body") == forms.place("") == ""
