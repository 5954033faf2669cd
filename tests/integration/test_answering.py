"""Fine-tuning on questions that the project writes itself, with the parts that the pair is made of, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.quiz import write_quiz

from tandem.spec import RunSpec, resolve
from tandem.vocabulary import Workload
from tandem_worker.drift.held_out import HeldOut
from tandem_worker.lockstep.machine import Machine
from tandem_worker.model.init import random_parameters, step_inputs
from tandem_worker.model.whole import LOSS
from tandem_worker.model.whole_build import build_whole
from tandem_worker.questions.opened import open_questions


def test_the_loss_on_answers_falls_and_the_answers_follow_the_parameters(tmp_path: Path) -> None:
    """Bytes as tokens, the tiny preset: it learns which answers are likely, not to answer."""
    paths = write_quiz(tmp_path, per_task=20)[:2]
    spec = RunSpec(batch=8, sequence=128, optimizer={"learning_rate": 1e-2})
    model, training = resolve(spec)
    training = training.model_copy(update={"masked": True})
    questions = open_questions(
        paths, None, seed=1, batch=training.batch, sequence=training.sequence, vocab=model.vocab,
        held_out_percent=20, scoring="mean", packed=False,
    )  # fmt: skip
    chain = build_whole(model, training, spec.tp, Workload.FINETUNE)
    machine = Machine(chain)
    machine.slots.update(random_parameters(chain.plan, model, chain.mesh, 0))
    (op,) = chain.plan.ops
    held_out = HeldOut(machine, questions.evaluation)
    before, again = (held_out.evaluate(machine.slots) for _ in range(2))
    assert before == again
    assert {scored.task for scored in before} == {path.stem for path in paths}
    # nearly uniform over 256 bytes at a random start
    np.testing.assert_allclose([s for q in before for s in q.scores], -np.log(256), atol=0.3)
    losses = []
    for step in range(1, 41):
        machine.slots.update(step_inputs(*questions.training.batch(step), step, chain.mesh))
        outputs = machine.execute(op, step, 0).outputs
        losses.append(float(np.asarray(outputs[op.outputs.index(LOSS)])[0]))
    assert np.mean(losses[-8:]) < 0.75 * losses[0]
    after = held_out.evaluate(machine.slots)
    assert np.mean([max(q.scores) for q in after]) > np.mean([max(q.scores) for q in before]) + 0.5
    assert [q.scores for q in after] == [q.scores for q in held_out.evaluate(machine.slots)]
