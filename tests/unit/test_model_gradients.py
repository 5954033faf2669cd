"""Loss and gradients of the chain against jax.grad of one fused fp32 program written apart from it."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

import chains
from chains import MODEL, TIED, TRAINING

CASES = [(1, True), (2, False), (4, False)]


@cache
def stepped(tp: int, tied: bool) -> dict[str, jax.Array]:
    made = chains.chain(tp, tied)
    return chains.step(made, chains.start(made, TIED if tied else MODEL))


@pytest.mark.parametrize(("tp", "tied"), CASES)
def test_loss_and_gradients_equal_those_of_the_fused_program(tp: int, tied: bool) -> None:
    model = TIED if tied else MODEL
    made, after = chains.chain(tp, tied), stepped(tp, tied)
    params = chains.weights(model, tp, chains.start(made, model))
    loss, expected = jax.value_and_grad(lambda p: chains.fused_loss(model, TRAINING.z_loss, p, *chains.batch()))(params)
    np.testing.assert_allclose(np.asarray(after["fwd.head.reduced.loss"]), float(loss), rtol=1e-5)
    found = chains.gradients(model, tp, after)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = float(np.abs(gradient).max())
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-5 * largest, err_msg=name)
    norm = np.sqrt(sum(float(np.sum(np.square(np.asarray(g, np.float64)))) for g in expected.values()))
    np.testing.assert_allclose(np.asarray(after["update.optimizer.grad_norm"]), norm, rtol=1e-5)
    clip = min(1.0, TRAINING.optimizer.clip_norm / norm)
    np.testing.assert_allclose(np.asarray(after["update.optimizer.grad_norm.clip"]), clip, rtol=1e-5)


def test_degrees_of_tensor_parallelism_agree() -> None:
    two, four = (chains.gradients(MODEL, tp, stepped(tp, False)) for tp in (2, 4))
    for name, gradient in two.items():
        np.testing.assert_allclose(four[name], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize(("tp", "tied"), CASES)
def test_replicated_values_are_equal_on_every_rank(tp: int, tied: bool) -> None:
    after = stepped(tp, tied)
    for slot in ("fwd.head.reduced", "fwd.head.reduced.loss", "bwd.attn.0.reduced.norm", "master.head.norm"):
        ranks = np.asarray(after[slot])
        assert (ranks == ranks[0]).all(), slot
