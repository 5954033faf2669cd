"""Parameters at the start: a function of the seed alone, or loaded rank by rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import chains
from chains import BF16, MODEL, TRAINING
from tandem.errors import SetupError, SpecError, WeightsError
from tandem.vocabulary import Module
from tandem_worker.model.build import build_chain, make_mesh
from tandem_worker.model.init import place, random_parameters
from tandem_worker.model.layout import leaves
from tandem_worker.model.plan import make_plan


def test_logical_weights_depend_on_the_seed_alone() -> None:
    drawn = {}
    for tp in (1, 2, 4):
        plan, mesh = make_plan(MODEL, TRAINING, tp), make_mesh(tp)
        drawn[tp] = chains.weights(MODEL, tp, random_parameters(plan, MODEL, mesh, 7))
    for name, value in drawn[1].items():
        assert value.tobytes() == drawn[2][name].tobytes() == drawn[4][name].tobytes(), name
    other = chains.weights(MODEL, 1, random_parameters(make_plan(MODEL, TRAINING, 1), MODEL, make_mesh(1), 8))
    assert (other["attn.0.wq"] != drawn[1]["attn.0.wq"]).mean() > 0.99
    assert drawn[1]["attn.0.wq"].std() == pytest.approx(MODEL.init_std, rel=0.1)
    assert (drawn[1]["attn.0.wq"] != drawn[1]["attn.1.wq"]).mean() > 0.99


def masters(tp: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """Every master array of every rank, in the order of a weight file: leaf by leaf."""
    plan = make_plan(MODEL, BF16, tp)
    for slot in sorted(s for s in plan.persistent if s.startswith("master.")):
        for rank in range(tp):
            values = np.arange(np.prod(plan.slots[slot].shape), dtype=np.float32).reshape(plan.slots[slot].shape)
            yield slot, rank, values + 1000 * rank


def test_loaded_weights_land_on_their_ranks() -> None:
    plan, mesh = make_plan(MODEL, BF16, 2), make_mesh(2)
    slots = place(masters(2), plan, mesh)
    assert slots.keys() == plan.persistent
    for slot, rank, values in masters(2):
        assert (np.asarray(slots[slot])[rank] == values).all()
        assert not np.asarray(slots[slot.replace("master", "mu", 1)]).any()
        assert slots[slot.replace("master", "copy", 1)].dtype == "bfloat16"
        assert [shard.data.shape[0] for shard in slots[slot].addressable_shards] == [1, 1]


def test_weights_that_do_not_fit_are_refused() -> None:
    plan, mesh = make_plan(MODEL, BF16, 2), make_mesh(2)
    every = list(masters(2))
    with pytest.raises(WeightsError, match="lack"):
        place(every[2:], plan, mesh)
    with pytest.raises(WeightsError, match="twice"):
        place([*every, every[0]], plan, mesh)
    with pytest.raises(WeightsError, match="unknown"):
        place([("master.attn.9.wq", 0, every[0][2])], plan, mesh)
    with pytest.raises(WeightsError, match="shape"):
        place([(every[0][0], 0, every[0][2][1:])], plan, mesh)


def test_too_few_devices_and_wrong_degrees_are_refused_before_anything_is_compiled() -> None:
    with pytest.raises(SetupError, match="tp 8 needs 8 devices"):
        make_mesh(8)
    with pytest.raises(SpecError, match="does not divide the KV heads"):
        build_chain(MODEL, TRAINING, 3)


def test_split_leaves_cover_the_model() -> None:
    for module in (Module.EMBED, Module.ATTN, Module.FFN, Module.HEAD):
        for one, two in zip(leaves(module, MODEL, 1), leaves(module, MODEL, 2), strict=True):
            parts = 1 if one.split is None else 2
            assert np.prod(one.shape) == parts * np.prod(two.shape)
