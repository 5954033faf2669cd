"""Whole-step workloads: what the comparison adds to an undisturbed training step."""

from __future__ import annotations

import msgspec

from bench.devices import use_devices
from bench.options import Options
from bench.results import Row, row
from bench.stats import quantile, ratios
from bench.turns import State, Step, take_turns
from tandem.spec import resolve
from tandem.vocabulary import Workload

TOKENS = 4096
"""Of a step: as many as the presets of the paper's size have."""


def training(options: Options) -> list[Row]:
    """A clean step of a training run, as its side does it, against an undisturbed one; for steps of two sizes."""
    use_devices(options.tp)
    _, shape = resolve(options.spec())
    rows = []
    for name, tokens in (("step", TOKENS), ("step_small", TOKENS // 8)):
        sized = msgspec.structs.replace(options, batch=tokens // shape.sequence)
        wall = _turns(sized)
        setting = sized.setting(tokens=tokens)
        rows += [
            row(
                f"training.{name}", f"clean step with digests and sketch / undisturbed step, {tokens:,} tokens",
                quantile(ratios(wall, "training", "undisturbed")), setting, bound=1.01 if tokens == TOKENS else None,
            ),
            row(
                f"training.{name}_undisturbed", "the undisturbed step", quantile([b["undisturbed"] for b in wall]),
                setting, unit="s",
            ),
        ]  # fmt: skip
    return rows


def _turns(options: Options) -> list[dict[str, float]]:
    """All in this process, interleaved, each on its own copy of the state. The link carries one frame a step, which its
    own thread sends; everything that the step's side does for it is in the figure.
    """
    import numpy as np

    from tandem_worker.data import open_data
    from tandem_worker.link import frames as f
    from tandem_worker.lockstep.transfer import lanes_bytes
    from tandem_worker.model.init import random_parameters, step_inputs
    from tandem_worker.model.sketch import SKETCH
    from tandem_worker.model.whole import STEP
    from tandem_worker.model.whole_build import build_whole

    model, shape = resolve(options.spec())
    chains = {
        kind: build_whole(model, shape, options.tp, Workload.TRAINING, digests=kind == "training")
        for kind in ("undisturbed", "training")
    }
    data = open_data([], None, seed=0, batch=shape.batch, sequence=shape.sequence, vocab=model.vocab)

    def stepper(kind: str) -> Step:
        chain = chains[kind]
        (op,) = chain.plan.ops
        masters = chain.op_of(SKETCH).inputs

        def undisturbed(state: State, step: int) -> State:
            slots = state | step_inputs(*data.batch(step), step, chain.mesh)
            outputs, _, _ = chain.programs[STEP]([slots[slot] for slot in op.inputs])
            return {s: v for s, v in zip(op.outputs, outputs, strict=True) if s in chain.plan.persistent}

        def compared(state: State, step: int) -> State:
            slots = state | step_inputs(*data.batch(step), step, chain.mesh)
            outputs, digests, _ = chain.programs[STEP]([slots[slot] for slot in op.inputs])
            made = dict(zip(op.outputs, outputs, strict=True))
            sketch, sketch_digests, _ = chain.programs[SKETCH]([made[slot] for slot in masters])
            f.encode(
                f.Report(
                    step=step, lanes=lanes_bytes(np.asarray(digests)), sketch=np.asarray(sketch[0]).tobytes(),
                    sketch_lanes=lanes_bytes(np.asarray(sketch_digests)), tops=[int(t) for t in np.asarray(sketch[1])],
                    loss=0.0, grad_norm=0.0, busy_s=0.0,
                )
            )  # fmt: skip
            return {s: v for s, v in made.items() if s in chain.plan.persistent}

        return compared if kind == "training" else undisturbed

    kinds = {kind: stepper(kind) for kind in chains}
    states = {k: random_parameters(c.plan, model, c.mesh, options.seed) for k, c in chains.items()}
    return take_turns(kinds, states, options.blocks, options.seed)
