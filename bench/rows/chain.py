"""The chain of submodule programs against one fused program."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.devices import use_devices
from bench.options import Options
from bench.results import Row, row
from bench.stats import quantile, ratios, shuffled_blocks
from bench.telling import tell
from tandem.spec import resolve

WARMUP = 2
State = dict[str, Any]


def measure(options: Options) -> list[Row]:
    """All in this process, interleaved, each training its own copy of the same model on the same data."""
    use_devices(options.tp)
    import jax

    from bench.fused import fused_step
    from tandem_worker.chain import run_step
    from tandem_worker.data import open_data
    from tandem_worker.model.build import build_chain
    from tandem_worker.model.init import random_parameters, step_inputs

    model, training = resolve(options.spec())
    chain = build_chain(model, training, options.tp)
    plan, mesh = chain.plan, chain.mesh
    data = open_data([], None, seed=0, batch=training.batch, sequence=training.sequence, vocab=model.vocab)

    def inputs(step: int) -> State:
        return step_inputs(*data.batch(step), step, mesh)

    def start() -> State:
        return random_parameters(plan, model, mesh, options.seed)

    def chain_step(state: State, step: int) -> State:
        return {slot: value for slot, value in run_step(chain, state | inputs(step)).items() if slot in state}

    def one_program(digests: bool) -> Callable[[State, int], State]:
        made = fused_step(plan, model, training, mesh, digests=digests).lower(start(), inputs(1)).compile()
        return lambda state, step: made(state, inputs(step))[0]

    kinds = {"chain": chain_step, "fused": one_program(False), "fused+digests": one_program(True)}
    states = {kind: start() for kind in kinds}
    wall: list[dict[str, float]] = []
    cpu: list[dict[str, float]] = []
    for number, block in enumerate(shuffled_blocks(list(kinds), WARMUP + options.blocks, options.seed), start=1):
        tell(f"block {number}/{WARMUP + options.blocks}")
        wall.append({})
        cpu.append({})
        for kind in block:
            began, began_cpu = time.monotonic(), time.process_time()
            states[kind] = kinds[kind](states[kind], number)
            jax.block_until_ready(states[kind])
            wall[-1][kind], cpu[-1][kind] = time.monotonic() - began, time.process_time() - began_cpu
    tell()
    del wall[:WARMUP], cpu[:WARMUP]
    setting = options.setting(programs=len(plan.ops))
    return [
        row(
            "chain.step", "step as a chain of programs with digests / as one fused program without",
            quantile(ratios(wall, "chain", "fused")), setting, bound=1.10,
        ),
        row(
            "chain.digest", "the same / one fused program that digests the same tensors",
            quantile(ratios(wall, "chain", "fused+digests")), setting,
        ),
        row(
            "chain.cpu", "as the first, in processor time instead of wall time",
            quantile(ratios(cpu, "chain", "fused")), setting,
        ),
        row("chain.fused", "the fused step", quantile([b["fused"] for b in wall]), setting, unit="s"),
    ]  # fmt: skip
