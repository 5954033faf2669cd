"""Whole-step workloads: what the comparison adds to an undisturbed training step."""

from __future__ import annotations

import msgspec

from bench.devices import use_devices
from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, quantile, ratios
from bench.turns import State, Step, Turns, cpus, take_turns, walls
from tandem.spec import resolve
from tandem.vocabulary import Workload

TOKENS = 4096
"""Of a step: as many as the presets of the paper's size have."""
BOUND = 1.01
MOST = 3
"""Times as many blocks as asked for, where the range is still wider than what is to be told."""
_BOTH = ("training", "undisturbed")


def training(options: Options) -> list[Row]:
    """A clean step of a training run, as its side does it, against an undisturbed one; for steps of two sizes."""
    use_devices(options.tp)
    _, shape = resolve(options.spec())
    rows = []
    for name, tokens in (("step", TOKENS), ("step_small", TOKENS // 8)):
        sized = msgspec.structs.replace(options, batch=tokens // shape.sequence)
        turns = _turns(sized, most=MOST if tokens == TOKENS else 1)
        wall, cpu = (quantile(ratios(seconds(turns), *_BOTH)) for seconds in (walls, cpus))
        bound = BOUND if tokens == TOKENS else None
        rows += [
            row(
                f"training.{name}", f"clean step with digests and sketch / undisturbed step, {tokens:,} tokens",
                wall, sized.setting(tokens=tokens, **_seen(wall, bound)), bound=bound,
            ),
            row(
                f"training.{name}_cpu", "the same in processor time, which other work on the machine is not part of",
                cpu, sized.setting(tokens=tokens, **_seen(cpu, bound)), bound=bound,
            ),
            row(
                f"training.{name}_undisturbed", "the undisturbed step",
                quantile([b["undisturbed"] for b in walls(turns)]), sized.setting(tokens=tokens), unit="s",
            ),
        ]  # fmt: skip
    return rows


def _seen(found: Estimate, bound: float | None) -> dict[str, str]:
    """From which slowdown on a range as wide as this one would have lain beyond the bound."""
    return {} if bound is None else {"seen_from": f"{100 * (bound * found.value / found.low - 1):.1f} %"}


def _tells(turns: Turns) -> bool:
    """Whether both ranges are narrower than the bound's own distance from 1."""
    found = [quantile(ratios(seconds(turns), *_BOTH)) for seconds in (walls, cpus)]
    return all(f.value - f.low < BOUND - 1 for f in found)


def _turns(options: Options, most: int) -> Turns:
    """All in this process, interleaved, each on its own copy of the state. The link carries one frame a step, which its
    own thread sends; everything that the step's side does for it is in the figure.
    """
    import numpy as np

    from bench.undisturbed import inputs_of, undisturbed
    from tandem_worker.link import frames as f
    from tandem_worker.lockstep.transfer import lanes_bytes
    from tandem_worker.model.init import random_parameters
    from tandem_worker.model.sketch import SKETCH
    from tandem_worker.model.whole import STEP
    from tandem_worker.model.whole_build import build_whole

    model, shape = resolve(options.spec())
    inputs = inputs_of(model, shape)
    alone, start = undisturbed(model, shape, options.tp, inputs)
    chain = build_whole(model, shape, options.tp, Workload.TRAINING)
    (op,) = chain.plan.ops
    masters = chain.op_of(SKETCH).inputs

    def compared(state: State, step: int) -> State:
        slots = state | inputs(step, chain.mesh)
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

    kinds: dict[str, Step] = {"training": compared, "undisturbed": alone}
    states = {
        "training": random_parameters(chain.plan, model, chain.mesh, options.seed), "undisturbed": start(options.seed),
    }  # fmt: skip
    return take_turns(kinds, states, options.blocks, options.seed, _tells, most)
