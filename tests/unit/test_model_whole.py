"""The whole step as one program: the same mathematics as the chain, its loss on answers alone, its digests in place."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import chains
from chains import MODEL, OPTIMIZER, TIED, TRAINING
from tandem.faults.injection import FaultProfile
from tandem.spec import ModelConfig, Training
from tandem.vocabulary import Workload
from tandem_worker.chain import Chain
from tandem_worker.digest import lanes_numpy
from tandem_worker.model.init import random_parameters, step_inputs
from tandem_worker.model.whole import LOSS, SCORE, SCORES, STEP
from tandem_worker.model.whole_build import build_whole

MASKED = TRAINING.model_copy(update={"masked": True})


@cache
def whole(tied: bool, workload: Workload) -> Chain:
    training = MASKED if workload is Workload.FINETUNE else TRAINING
    return build_whole(TIED if tied else MODEL, training, 2, workload)


def start(made: Chain, model: ModelConfig, targets: np.ndarray | None = None) -> dict[str, jax.Array]:
    tokens, following = chains.batch()
    inputs = step_inputs(tokens, following if targets is None else targets, 1, made.mesh)
    return random_parameters(made.plan, model, made.mesh, 0) | inputs


def run(made: Chain, slots: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    (op,) = made.plan.ops
    outputs, digests, _ = made.programs[STEP]([slots[slot] for slot in op.inputs])
    found = {slot: np.asarray(value) for slot, value in zip(op.outputs, outputs, strict=True)}
    for place, (slot, value) in enumerate(found.items()):
        for rank in range(made.plan.tp):
            np.testing.assert_array_equal(np.asarray(digests)[rank, place], lanes_numpy(value[rank]), err_msg=slot)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_one_program_computes_what_the_chain_computes(tied: bool) -> None:
    """Up to rounding: fused into one program, XLA may add in another order. Its digests are of what it returns."""
    model = TIED if tied else MODEL
    made, chain = whole(tied, Workload.GRADIENT), chains.chain(2, tied)
    found, expected = run(made, start(made, model)), chains.step(chain, chains.start(chain, model))
    gradients = chains.gradients(model, 2, expected)
    for slot, value in found.items():
        if slot.startswith("grad."):
            name = slot.removeprefix("grad.")
            leaf = next(leaf for group, m, _ in chains.groups(model) for leaf in chains.leaves(m, model, 2)
                        if name == f"{group}.{leaf.name}")  # fmt: skip
            value, wanted = chains.logical(value, leaf), gradients[name]
        else:
            wanted = np.asarray(expected[slot])
        far = np.abs(value - wanted) > 1e-4 * (np.abs(wanted).max() or 1.0)
        # Adam's first update is g / (|g| + eps): where a gradient is nearly zero, rounding alone moves the weight.
        assert np.count_nonzero(far) <= (0.001 * far.size if slot.startswith("master.") else 0), slot


def test_a_masked_loss_and_its_update_are_those_of_the_answers_alone() -> None:
    """Against jax.grad of a program written apart; by way of Adam's first moment, (1 - beta1) * clip * gradient."""
    made = whole(False, Workload.FINETUNE)
    tokens, targets = chains.batch()
    targets = np.where(np.random.default_rng(1).random(targets.shape) < 0.7, -1, targets)
    slots = start(made, MODEL, targets)
    params = chains.weights(MODEL, 2, slots)
    loss, expected = jax.value_and_grad(
        lambda p: chains.fused_loss(MODEL, TRAINING.z_loss, p, tokens, targets)
    )(params)  # fmt: skip
    found = run(made, slots)
    np.testing.assert_allclose(found[LOSS], float(loss), rtol=1e-5)
    clip = found["update.optimizer.grad_norm.clip"].flat[0]
    after = chains.weights(MODEL, 2, found, "mu")
    for name, gradient in expected.items():
        moment = (1 - OPTIMIZER.beta1) * clip * np.asarray(gradient)
        np.testing.assert_allclose(after[name], moment, rtol=0, atol=1e-5 * np.abs(moment).max(), err_msg=name)


def test_a_step_without_any_answer_changes_no_moment() -> None:
    made = whole(False, Workload.FINETUNE)
    found = run(made, start(made, MODEL, np.full((TRAINING.batch, TRAINING.sequence), -1)))
    assert not found[LOSS].any()
    assert not any(value.any() for slot, value in found.items() if slot.startswith(("mu.", "nu.")))


def test_the_scores_are_log_likelihoods() -> None:
    made = whole(False, Workload.FINETUNE)
    slots = start(made, MODEL)
    op = made.extra[SCORE]
    assert op.outputs == (SCORES,)
    outputs, _, _ = made.programs[SCORE]([slots[slot] for slot in op.inputs])
    scores = np.asarray(outputs[0])
    assert (scores[0] == scores[1]).all()
    params = chains.weights(MODEL, 2, slots)
    mean = chains.fused_loss(MODEL, 0.0, params, *chains.batch())
    np.testing.assert_allclose(-scores[0].mean(), float(mean), rtol=1e-5)


def test_a_profile_acts_inside_the_step_where_it_acts_in_the_chain() -> None:
    fault: dict[str, Any] = {
        "kind": "flip",
        "bits": [3],
        "elements": 1,
        "phase": "fwd",
        "module": "attn",
        "layers": [1],
    }
    profile = FaultProfile.model_validate({"name": "test", "seed": 1, "fault": [fault | {"tensor": "out"}]})
    training = Training(batch=1, sequence=4, compute="float32")
    made = build_whole(MODEL, training, 2, Workload.TRAINING, profile=profile)
    assert [(op.program, op.sites[0].layer) for op in made.inside[STEP]] == [("attn.fwd", 1)]
    assert made.fault_ops(made.plan.ops[0]) == made.inside[STEP]
