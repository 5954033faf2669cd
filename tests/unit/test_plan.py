"""Invariants of the static chain, for any model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.spec import ModelConfig, Training
from tandem.vocabulary import Module, Phase
from tandem_worker.model.layout import groups, leaves
from tandem_worker.model.plan import make_plan


class Made:
    """A drawn case; a short repr, whatever the plan's size."""

    def __init__(self, layers: int, tied: bool, compute: str, tp: int) -> None:
        sizes = {"hidden": 32, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 64, "vocab": 64}
        self.case = (layers, tied, compute, tp)
        self.model = ModelConfig(name="any", layers=layers, tied=tied, **sizes)
        self.training = Training.model_validate({"sequence": 16, "compute": compute})
        self.plan = make_plan(self.model, self.training, tp)

    def __repr__(self) -> str:
        return f"Made{self.case}"


def plans() -> st.SearchStrategy[Made]:
    return st.builds(
        Made, st.integers(1, 4), st.booleans(), st.sampled_from(["bfloat16", "float32"]), st.sampled_from([1, 2, 4])
    )


@given(plans())
def test_site_numbers_are_dense_in_execution_order(made: Made) -> None:
    plan = made.plan
    assert [site.number for site in plan.sites] == list(range(len(plan.sites)))
    assert [op.index for op in plan.ops] == list(range(len(plan.ops)))
    named = [(s.phase, s.module, s.layer, s.tensor) for s in plan.sites]
    assert len(set(named)) == len(named)


@given(plans())
def test_slots_are_written_once_and_before_they_are_read(made: Made) -> None:
    plan = made.plan
    there = set(plan.persistent) | set(plan.step_inputs)
    written: set[str] = set()
    for op in plan.ops:
        assert set(op.inputs) <= there
        assert not written & set(op.outputs)
        assert len(op.inputs) == len(op.input_names) == len(set(op.input_names))
        written |= set(op.outputs)
        there |= written
    assert plan.persistent <= written
    assert set(plan.slots) == there


@given(plans())
def test_parameters_are_read_before_they_are_replaced(made: Made) -> None:
    plan = made.plan
    replaced: set[str] = set()
    for op in plan.ops:
        assert not replaced & set(op.inputs)
        replaced |= set(op.outputs) & plan.persistent


@given(plans())
def test_sites_describe_their_slots(made: Made) -> None:
    plan = made.plan
    for op in plan.ops:
        assert len(op.sites) == len(op.outputs)
        for site, slot in zip(op.sites, op.outputs, strict=True):
            assert (site.shape, site.dtype) == (plan.slots[slot].shape, plan.slots[slot].dtype)


@given(plans())
def test_ops_of_one_program_have_one_shape(made: Made) -> None:
    plan = made.plan
    shapes: dict[str, object] = {}
    for op in plan.ops:
        signature = [plan.slots[slot] for slot in (*op.inputs, *op.outputs)]
        assert shapes.setdefault(op.program, signature) == signature


@given(plans())
def test_initial_covers_the_parameters_with_the_sites_of_the_update(made: Made) -> None:
    plan = made.plan
    written = [slot for op in plan.initial for slot in op.outputs]
    assert sorted(written) == sorted(plan.persistent)
    sites = {id(site) for op in plan.ops for site in op.sites}
    assert all(id(site) in sites for op in plan.initial for site in op.sites)
    assert not any(op.replayable or op.inputs for op in plan.initial)


@given(plans())
def test_the_window_drains_before_the_forward_and_before_the_update(made: Made) -> None:
    assert [op.program for op in made.plan.ops if op.drain] == ["embed.fwd", "dw.reduce"]


@given(plans())
def test_stored_dtypes(made: Made) -> None:
    model, training, plan = made.model, made.training, made.plan
    for site in plan.sites:
        wide = site.module is Module.HEAD and site.phase is Phase.FWD
        wide |= site.family in ("grad_norm", "moment") or site.tensor.endswith("norm") or site.phase is Phase.UPDATE
        if site.tensor.startswith("param.copy."):
            assert (site.dtype, training.compute) == ("bfloat16", "bfloat16")
        else:
            assert site.dtype == ("float32" if wide else training.compute)
    trained = sum(len(leaves(module, model, plan.tp)) for _, module, _ in groups(model))
    copies = 0 if training.compute == "float32" else trained
    assert len(plan.persistent) == 3 * trained + copies


def test_order_of_a_small_chain() -> None:
    model = ModelConfig(name="one", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=16)
    plan = make_plan(model, Training(sequence=8), 1)
    assert " ".join(op.program for op in plan.ops) == (
        "embed.fwd reduce0 attn.fwd reduce ffn.fwd reduce head.fwd head.reduce "
        "head.bwd reduce0 ffn.bwd reduce attn.bwd reduce embed.bwd "
        "dw.reduce grad_norm embed.update attn.update ffn.update head.update"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_adds_its_gradient_before_the_embeddings_own(tied: bool) -> None:
    model = ModelConfig(name="t", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=16, tied=tied)
    plan = make_plan(model, Training(sequence=8), 1)
    update = next(op for op in plan.ops if op.program == "embed.update")
    gradients = [slot for slot in update.inputs if slot.startswith("bwd.")]
    own = ["bwd.embed.dw.embedding"]
    assert gradients == (["bwd.head.dw.embedding", *own] if tied else own)
