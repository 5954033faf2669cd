"""What comparing whole steps costs: a clean step of the gradient workload against an undisturbed training step.

Two ratios, multiplied: the program (digests, gradients kept as outputs, nothing donated) against the undisturbed step
(`bench.undisturbed`), side by side in one process; and the pair's synchronised step against its unsynchronised one.
"""

from __future__ import annotations

from bench.devices import use_devices
from bench.options import Options
from bench.pair import interleaved
from bench.results import Row, row
from bench.stats import Estimate, quantile, ratios
from bench.turns import State, Step, take_turns, walls
from tandem.spec import resolve
from tandem.vocabulary import Workload


def measure(options: Options) -> list[Row]:
    """Both parts and their product."""
    program = _program(options)
    blocks = interleaved(options.spec(workload="gradient"), ("none", "optimistic"), options.blocks, options.seed)
    seconds = [{mode: step.duration_s for mode, step in block.items()} for block in blocks]
    sync = quantile(ratios(seconds, "optimistic", "none"))
    bytes_ = quantile([100 * block["optimistic"].link_bytes / block["optimistic"].full_bytes for block in blocks])
    whole = Estimate(
        program.value * sync.value, program.low * sync.low, program.high * sync.high, min(program.runs, sync.runs)
    )
    setting = options.setting(workload="gradient")
    return [
        row("gradient.step", "clean gradient step / undisturbed training step", whole, setting, bound=1.03),
        row("gradient.program", "its program / the undisturbed step", program, setting),
        row("gradient.sync", "in the pair: optimistic / unsynchronised", sync, setting),
        row("gradient.link_bytes", "bytes on the link / full exchange", bytes_, setting, unit="%"),
    ]


def _program(options: Options) -> Estimate:
    """Both in this process, interleaved, each training its own copy of the same model on the same data."""
    use_devices(options.tp)
    from bench.undisturbed import inputs_of, undisturbed
    from tandem_worker.model.init import random_parameters
    from tandem_worker.model.whole_build import build_whole

    model, training = resolve(options.spec())
    made = build_whole(model, training, options.tp, Workload.GRADIENT)
    (op,) = made.plan.ops
    inputs = inputs_of(model, training)
    alone, start = undisturbed(model, training, options.tp, inputs)

    def whole(state: State, step: int) -> State:
        slots = state | inputs(step, made.mesh)
        outputs, _, _ = made.programs[op.program]([slots[slot] for slot in op.inputs])
        return {slot: value for slot, value in zip(op.outputs, outputs, strict=True) if slot in state}

    kinds: dict[str, Step] = {"whole": whole, "undisturbed": alone}
    states = {
        "whole": random_parameters(made.plan, model, made.mesh, options.seed), "undisturbed": start(options.seed),
    }  # fmt: skip
    return quantile(ratios(walls(take_turns(kinds, states, options.blocks, options.seed)), "whole", "undisturbed"))
