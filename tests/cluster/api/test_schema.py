"""What a real API server makes of the definition: every rule fires, defaults are filled in, columns are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api.hands import Hands
from clusters import SCHEMA, stored
from tandem.kube.client import Object
from tandem.kube.errors import KubeError
from tandem.kube.paths import PAIRRUNS
from tandem.pairrun import names
from tandem.pairrun.crd import COLUMNS
from tandem.pairrun.spec import MUTABLE

pytestmark = pytest.mark.needs("api-server")
NOT_BOTH = "give nodeName or selector, not both"
SAME_NODE = "suspect and reference are the same node"
ONE_SOURCE = "give exactly one of persistentVolumeClaim, configMap, emptyDir, hostPath"
OURS = "the TANDEM_ variables are the controller's"
QUESTIONS = "workload finetune needs questions"
Values = dict[str, Any]


def rules(schema: Values = SCHEMA, path: str = "") -> Iterator[tuple[str, str]]:
    """Every rule of the schema: its place and its message."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule["message"]
    for name, part in schema.get("properties", {}).items():
        yield from rules(part, f"{path}.{name}")
    if isinstance(items := schema.get("items"), dict):
        yield from rules(items, f"{path}[]")


def volume(**source: str) -> Values:
    return {"template": {"volumes": [{"name": "v", "mountPath": "/v", **source}]}}


def variable(name: str) -> Values:
    return {"template": {"env": [{"name": name, "value": "1"}]}}


REFUSED: list[tuple[Values, str, str]] = [
    ({"suspect": {"nodeName": "a", "selector": {}}}, ".suspect", NOT_BOTH),
    ({"reference": {"nodeName": "a", "selector": {"matchLabels": {"a": "b"}}}}, ".reference", NOT_BOTH),
    ({"suspect": {"nodeName": "a"}, "reference": {"nodeName": "a"}}, "", SAME_NODE),
    (volume(), ".template.volumes[]", ONE_SOURCE),
    (volume(configMap="c", emptyDir="1Gi"), ".template.volumes[]", ONE_SOURCE),
    (volume(persistentVolumeClaim="p", hostPath="/h"), ".template.volumes[]", ONE_SOURCE),
    (variable("TANDEM_ROLE"), ".template.env[]", OURS),
    ({"workload": {"name": "finetune"}}, "", QUESTIONS),
]
TAKEN: list[Values] = [
    {},
    {"suspect": {"nodeName": "a"}, "reference": {"nodeName": "b"}},
    {"suspect": {"selector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}},
    {"workload": {"name": "finetune", "questions": ["/q.jsonl"]}},
    {"workload": {"name": "gradient", "model": "paper-16l", "optimizer": [{"name": "beta1", "value": "0.9"}]}},
    {"kind": "null", "retry": {"maxAttempts": 1}, "activeDeadlineSeconds": 60},
    volume(persistentVolumeClaim="p"), volume(configMap="c"), volume(emptyDir="1Gi"), volume(hostPath="/h"),
    variable("XLA_FLAGS"), {"template": {"tolerations": [{"key": "team"}]}},
]  # fmt: skip
CHANGES: dict[str, Any] = {
    "kind": "null",
    "suspect": {"nodeName": "b"},
    "reference": {"nodeName": "b"},
    "workload": {"steps": 7},
    "resources": {"cpu": "2"},
    "template": {"image": "other"},
    "retry": {"maxAttempts": 9},
    "startDeadlineSeconds": 77,
    "activeDeadlineSeconds": 99,
    "suspend": True,
    "ttlSecondsAfterFinished": 5,
}
ATTEMPT: Values = {
    "number": 1, "suspect": {"node": "a"}, "reference": {"node": "b"}, "startedAt": "2027-01-15T08:00:00Z",
}  # fmt: skip


def make(hands: Hands, spec: Values, name: str = "check") -> Object:
    body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}
    return hands.kube.create(PAIRRUNS.path(hands.namespace), body)


def test_a_workload_that_does_not_exist_is_refused_by_name(hands: Hands) -> None:
    with pytest.raises(KubeError) as error:
        make(hands, {"workload": {"name": "nonsense"}})
    assert error.value.status == 422
    assert 'spec.workload.name: Unsupported value: "nonsense"' in error.value.message


def test_every_rule_of_the_schema_has_its_case() -> None:
    cases = {(path, message) for _, path, message in REFUSED}
    cases |= {("", f"{name} cannot be changed") for name in CHANGES if name not in MUTABLE}
    assert cases == set(rules())
    assert set(CHANGES) == set(SCHEMA["properties"])


@pytest.mark.parametrize(("spec", "path", "message"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_with_its_sentence(hands: Hands, spec: Values, path: str, message: str) -> None:
    with pytest.raises(KubeError) as error:
        make(hands, spec)
    assert error.value.status == 422
    assert message in error.value.message
    assert f"spec{path}".replace("[]", "[0]") in error.value.message


@pytest.mark.parametrize("spec", TAKEN, ids=str)
def test_what_can_be_is_taken_and_stored_with_the_defaults(hands: Hands, spec: Values) -> None:
    """Exactly as the tests of the pure parts believe."""
    assert make(hands, spec)["spec"] == stored(spec)


@pytest.mark.parametrize("name", CHANGES)
def test_what_must_not_change_does_not_and_the_rest_may(hands: Hands, name: str) -> None:
    made = make(hands, {"suspect": {"nodeName": "a"}, "reference": {"nodeName": "c"}})
    path, body = PAIRRUNS.path(hands.namespace, "check"), {"spec": {name: CHANGES[name]}}
    if name in MUTABLE:
        assert hands.kube.patch(path, body)["spec"][name] == CHANGES[name]
        return
    with pytest.raises(KubeError) as error:
        hands.kube.patch(path, body)
    assert error.value.status == 422
    assert f"{name} cannot be changed" in error.value.message
    assert hands.get()["spec"] == made["spec"]


@pytest.mark.parametrize(
    ("status", "place"),
    [
        ({"attempt": 3_000_000_000}, "status.attempt"), ({"attempt": -5}, "status.attempt"),
        *(({"attempts": [ATTEMPT | bad]}, f"status.attempts[0].{next(iter(bad))}")
          for bad in ({"number": 0}, {"number": 2**31}, {"device": "x"}, {"devices": -1})),
    ], ids=str,
)  # fmt: skip
def test_a_status_that_no_controller_writes_is_refused(hands: Hands, status: Values, place: str) -> None:
    make(hands, {})
    hands.kube.patch_status(PAIRRUNS.path(hands.namespace, "check"), {"attempts": [ATTEMPT]})
    with pytest.raises(KubeError) as error:
        hands.kube.patch_status(PAIRRUNS.path(hands.namespace, "check"), status)
    assert error.value.status == 422
    assert place in error.value.message


def test_the_short_name_lists_the_columns_with_what_the_status_says(hands: Hands) -> None:
    make(hands, {"workload": {"name": "gradient"}})
    fresh = hands.server.kubectl("get", "pr", "-n", hands.namespace)
    header, row = fresh.splitlines()
    assert header.split() == ["NAME", *(name.upper() for name, _, _ in COLUMNS)]
    assert row.split()[:2] == ["check", "gradient"]
    status = {
        "suspect": {"node": "sick"}, "reference": {"node": "well"}, "step": 412, "verdict": "mismatch", "attempt": 2,
        "counts": {"mismatchedElements": 1893},
    }  # fmt: skip
    hands.kube.patch_status(PAIRRUNS.path(hands.namespace, "check"), status)
    told = hands.server.kubectl("get", "pr", "check", "-n", hands.namespace, "--no-headers").split()
    assert told[:-1] == ["check", "sick", "well", "gradient", "412", "1893", "mismatch", "2"]
    for word in (names.PLURAL, names.SINGULAR, "tandem"):
        assert "check" in hands.server.kubectl("get", word, "-n", hands.namespace)
