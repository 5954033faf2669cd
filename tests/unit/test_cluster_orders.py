"""What anybody may order of a cluster: a PairRun that the controller reads, or a problem that names the field."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.pairrun.spec import read_spec
from tandem.vocabulary import Kind, Workload
from tandem_api.launch.cluster import pairrun
from tandem_api.launch.launcher import Order, check
from tandem_api.problems import Problem

WORDS = st.one_of(st.text(max_size=12), st.sampled_from(["/data/a.txt", "..", "$(HOME)", "demo", "/w/x.toml", "a b"]))
SPEC: dict[str, st.SearchStrategy[Any]] = {
    "workload": st.sampled_from([str(w) for w in Workload]), "kind": st.sampled_from([str(k) for k in Kind]),
    "model": st.one_of(st.sampled_from(["tiny", "small", "/weights/x", "nowhere"]), WORDS),
    "steps": st.integers(0, 10**7), "tp": st.integers(0, 16), "seed": st.integers(-1, 2**70), "fault": WORDS,
    "weights": WORDS, "data": st.lists(WORDS, max_size=2), "tokenizer": WORDS, "tasks": st.lists(WORDS, max_size=2),
    "sync": st.sampled_from(["optimistic", "digest", "full", "none"]), "batch": st.integers(0, 2**40),
    "baseline": st.one_of(st.just("seed"), WORDS), "window": st.integers(0, 10**6), "nothing": WORDS,
}  # fmt: skip
CLUSTER = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "startDeadlineSeconds": st.integers(0, 10**6),
            "retry": st.fixed_dictionaries({"maxAttempts": st.integers(-1, 99)}),
            "template": st.fixed_dictionaries({}, optional={"image": WORDS, "priorityClassName": WORDS}),
            "resources": st.fixed_dictionaries({}, optional={"devices": WORDS, "device": WORDS}),
        },
    ),
)  # fmt: skip


@given(
    st.fixed_dictionaries({}, optional=SPEC), st.one_of(st.none(), WORDS, st.just("gpu-1")), CLUSTER,
    st.one_of(st.none(), WORDS),
)  # fmt: skip
def test_any_order_is_a_pairrun_or_a_problem(
    spec: dict[str, Any], node: str | None, more: Any, key: str | None
) -> None:
    values = {"spec": spec} | ({"node": node} if node is not None else {}) | ({"cluster": more} if more else {})
    try:
        order = Order.model_validate_json(json.dumps(values))
    except ValidationError:
        assume(False)
    made, refused = None, 422
    try:
        check(order, "cluster")
        made = pairrun(order, "tandem", by="somebody", key=key)
    except Problem as problem:
        refused = problem.status
    assert refused == 422
    if made is None:
        return
    json.dumps(made)
    read = read_spec(made["spec"])
    assert (str(read.kind), str(read.run.workload)) == (str(order.spec.kind), str(order.spec.workload))
    if key is not None:
        assert made["metadata"]["name"] == pairrun(order, "tandem", by="somebody", key=key)["metadata"]["name"]
    assert len(made["metadata"]["name"]) <= 253
