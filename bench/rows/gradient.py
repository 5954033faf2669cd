"""What comparing whole steps costs: a clean step of the gradient workload against an undisturbed training step.

Two ratios, multiplied: the program (digests, gradients kept as outputs, nothing donated) against one fused step without
any of that, side by side in one process; and the pair's synchronised step against its unsynchronised one.
"""

from __future__ import annotations

from bench.devices import use_devices
from bench.options import Options
from bench.pair import interleaved
from bench.results import Row, row
from bench.stats import Estimate, quantile, ratios
from bench.turns import State, Step, take_turns
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
        row("gradient.program", "its program / one fused step without digests", program, setting),
        row("gradient.sync", "in the pair: optimistic / unsynchronised", sync, setting),
        row("gradient.link_bytes", "bytes on the link / full exchange", bytes_, setting, unit="%"),
    ]


def _program(options: Options) -> Estimate:
    """Both in this process, interleaved, each training its own copy of the same model on the same data."""
    use_devices(options.tp)
    from bench.fused import fused_step
    from tandem_worker.data import open_data
    from tandem_worker.model.init import random_parameters, step_inputs
    from tandem_worker.model.whole_build import build_whole

    model, training = resolve(options.spec())
    made = build_whole(model, training, options.tp, Workload.GRADIENT)
    (op,) = made.plan.ops
    data = open_data([], None, seed=0, batch=training.batch, sequence=training.sequence, vocab=model.vocab)

    def inputs(step: int) -> State:
        return step_inputs(*data.batch(step), step, made.mesh)

    def start() -> State:
        return random_parameters(made.plan, model, made.mesh, options.seed)

    def whole(state: State, step: int) -> State:
        slots = state | inputs(step)
        outputs, _, _ = made.programs[op.program]([slots[slot] for slot in op.inputs])
        return {slot: value for slot, value in zip(op.outputs, outputs, strict=True) if slot in state}

    fused = fused_step(made.submodules, model, training, made.mesh, digests=False)
    compiled = fused.lower(start(), inputs(1)).compile()
    kinds: dict[str, Step] = {
        "whole": whole, "fused": lambda state, step: compiled(state, inputs(step))[0],
    }  # fmt: skip
    states = {kind: start() for kind in kinds}
    wall = take_turns(kinds, states, options.blocks, options.seed)
    return quantile(ratios(wall, "whole", "fused"))
