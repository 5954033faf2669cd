"""Whole steps: the loss falls, the bits repeat, the update is AdamW, the digests are of what was stored."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import chains
from chains import MODEL, OPTIMIZER
from tandem_worker import digest
from tandem_worker.chain import run_step
from tandem_worker.model.compile import InFlight
from tandem_worker.model.init import step_inputs
from tandem_worker.model.layout import groups, leaves
from tandem_worker.model.update import learning_rate


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_training_lowers_the_loss(compute: str) -> None:
    made = chains.chain(2, compute=compute)
    env, losses = chains.start(made), []
    for number in range(1, 11):
        env = run_step(made, env | step_inputs(*chains.batch(), number, made.mesh))
        losses.append(float(env["fwd.head.reduced.loss"][0]))
    assert losses[-1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_a_step_repeats_its_bits_and_digests_what_it_stores() -> None:
    made = chains.chain(2, compute="bfloat16")
    seen: list[list[tuple[bytes, bytes]]] = []
    for _ in range(2):
        bits: list[tuple[bytes, bytes]] = []

        def observe(op, outputs, digests, bits=bits) -> None:  # type: ignore[no-untyped-def]
            for slot, output, lanes in zip(op.outputs, outputs, np.asarray(digests).swapaxes(0, 1), strict=True):
                host = np.asarray(output)
                assert (lanes == [digest.lanes_numpy(rank) for rank in host]).all(), slot
                assert (lanes == np.asarray(made.digest[made.plan.slots[slot]](output))).all(), slot
                bits.append((host.tobytes(), lanes.tobytes()))

        run_step(made, chains.start(made), observe=observe)
        seen.append(bits)
    assert seen[0] == seen[1]
    assert len(seen[0]) == len(made.plan.sites)


def test_a_step_keeps_only_what_outlives_it() -> None:
    made = chains.chain(2)
    after = run_step(made, chains.start(made))
    assert made.plan.persistent <= after.keys()
    assert not any(slot in after for slot in made.plan.last_use if slot not in made.plan.step_inputs)


def test_the_update_is_adamw_of_the_clipped_gradient() -> None:
    made = chains.chain(2)
    decay = {f"{g}.{leaf.name}": leaf.decay for g, module, _ in groups(MODEL) for leaf in leaves(module, MODEL, 2)}
    optimizer = optax.chain(
        optax.clip_by_global_norm(OPTIMIZER.clip_norm),
        optax.adamw(
            lambda count: learning_rate(OPTIMIZER)(count + 1),
            b1=OPTIMIZER.beta1,
            b2=OPTIMIZER.beta2,
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
            mask=decay,
        ),
    )
    env = chains.start(made)
    params = chains.weights(MODEL, 2, env)
    state = optimizer.init(params)
    for number in (1, 2, 3):
        env = chains.step(made, env | step_inputs(*chains.batch(number), number, made.mesh))
        updates, state = optimizer.update(chains.gradients(MODEL, 2, env), state, params)
        params = jax.tree.map(np.asarray, optax.apply_updates(params, updates))
        for name, value in chains.weights(MODEL, 2, env).items():
            np.testing.assert_allclose(value, params[name], rtol=2e-5, atol=1e-7, err_msg=name)


def test_the_learning_rate_warms_up_and_decays() -> None:
    rate = learning_rate(OPTIMIZER.model_copy(update={"warmup_steps": 4, "decay_steps": 20}))
    rates = [float(rate(np.int32(step))) for step in range(1, 21)]
    assert rates[:4] == sorted(rates[:4])
    assert max(rates) == pytest.approx(OPTIMIZER.learning_rate)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    constant = learning_rate(OPTIMIZER.model_copy(update={"schedule": "constant", "warmup_steps": 0}))
    assert float(constant(np.int32(1))) == pytest.approx(OPTIMIZER.learning_rate)


def test_executions_in_flight_are_bounded_and_waited_for_in_order() -> None:
    waited: list[int] = []

    class Result:
        def __init__(self, number: int) -> None:
            self.number = number

        def block_until_ready(self) -> None:
            waited.append(self.number)

    bound = InFlight(3)
    for number in range(10):
        bound.admit(Result(number))
        assert number - len(waited) < 3
    assert waited == list(range(7))


def test_copies_are_the_rounded_masters() -> None:
    made = chains.chain(2, compute="bfloat16")
    after = run_step(made, chains.start(made))
    for slot in made.plan.persistent:
        if slot.startswith("copy."):
            master = after[slot.replace("copy.", "master.", 1)]
            assert (np.asarray(master.astype("bfloat16")) == np.asarray(after[slot])).all(), slot
