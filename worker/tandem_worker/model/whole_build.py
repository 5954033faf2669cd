"""Compiles the whole step as one program, with the small programs that its controls need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tandem.faults.injection import FaultProfile, can_act
from tandem.sites import Site
from tandem.spec import ModelConfig, Training, check_tp
from tandem.vocabulary import Workload
from tandem_worker.chain import Chain, Op, Plan, digest_name
from tandem_worker.model.build import Progress, compile_all, make_mesh
from tandem_worker.model.compile import (
    CPU_IN_FLIGHT,
    Compute,
    InFlight,
    compile_digest,
    compile_program,
    fingerprint,
    injected,
)
from tandem_worker.model.forward import Array
from tandem_worker.model.plan import REDUCTIONS, make_plan
from tandem_worker.model.programs import bodies, example_ops
from tandem_worker.model.sketch import SKETCH, sketch_body, sketch_op
from tandem_worker.model.whole import (
    SCORE,
    STEP,
    forward_ops,
    gradient_sums,
    is_replicated,
    make_whole_plan,
    score_op,
)


def composed(
    chain: Plan, step: Op, computes: Mapping[str, Compute], sums: Mapping[str, Sequence[str]],
    inside: Sequence[Op],
) -> Compute:  # fmt: skip
    """The submodules of a step, one after another, on one rank.

    Args:
        chain: the submodules.
        step: the whole step's op: inputs and outputs.
        computes: what each submodule computes, by program.
        sums: output slot -> the chain's slots whose fp32 sum it is (one: that slot itself).
        inside: ops with the injector, in the order of their fault rows.
    """
    place: dict[int, int] = {}
    for op in inside:
        place[op.index] = sum(len(other.sites) + 1 for other in inside[: len(place)])

    def compute(local: list[Array], rows: Array | None) -> tuple[list[Array], Array | None]:
        env, logs = dict(zip(step.inputs, local, strict=True)), []
        for op in chain.ops:
            at = place.get(op.index)
            mine = rows[at : at + len(op.sites) + 1] if rows is not None and at is not None else None
            inputs = [env[slot] for slot in op.inputs]
            if op.program.endswith(".bwd"):
                # As `jax.checkpoint` sets it: else the compiler takes the forward pass's values, and keeps all of them.
                inputs = list(lax.optimization_barrier(tuple(inputs)))
            values, log = computes[op.program](inputs, mine)
            env.update(zip(op.outputs, values, strict=True))
            if log is not None:
                logs.append(log)
        return [_sum([env[part] for part in sums.get(slot, (slot,))]) for slot in step.outputs], (
            jnp.concatenate(logs) if rows is not None else None
        )

    return compute


def scored(chain: Plan, score: Op, computes: Mapping[str, Compute]) -> Compute:
    """The forward pass on one rank, without the injector: fp32 ``[B, S]``, target logit minus log-sum-exp."""

    def compute(local: list[Array], rows: Array | None) -> tuple[list[Array], Array | None]:
        assert rows is None
        env = dict(zip(score.inputs, local, strict=True))
        for op in forward_ops(chain):
            values, _ = computes[op.program]([env[slot] for slot in op.inputs], None)
            env.update(zip(op.outputs, values, strict=True))
        lse, target = env["fwd.head.reduced"]
        return [target - lse], None

    return compute


def op_sites(op: Op, slots: Sequence[str]) -> list[Site]:
    """The sites of some of an op's outputs."""
    sites = dict(zip(op.outputs, op.sites, strict=True))
    return [sites[slot] for slot in slots]


def _sum(parts: Sequence[Array]) -> Array:
    total = parts[0] if len(parts) == 1 else parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total


def build_whole(
    model: ModelConfig,
    training: Training,
    tp: int,
    workload: Workload,
    *,
    profile: FaultProfile | None = None,
    devices: Sequence[Any] | None = None,
    on_program: Progress | None = None,
    digests: bool = True,
) -> Chain:
    """Compile the whole step of a workload; arguments as of `tandem_worker.model.build.build_chain`.

    ``digests``: False for the benchmark's undisturbed step only, which is what one would train with: without digests,
    and with what outlives a step donated to it.

    Raises:
        SpecError: ``tp`` does not divide what it must.
        SetupError: too few devices.
    """
    check_tp(model, training, tp)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    mesh = make_mesh(tp, devices)
    chain = make_plan(model, training, tp)
    plan = make_whole_plan(chain, model, workload)
    (step,) = plan.ops
    found, examples = bodies(chain, model, training), example_ops(chain)
    inside = tuple(op for op in chain.ops if profile is not None and can_act(profile, op.sites))
    # jax traces each submodule once, not once a layer; the compiler then takes the calls apart again.
    computes = {
        name: jax.jit(injected(name, body, [chain.slots[slot] for slot in examples[name].outputs]))
        for name, body in found.items()
    }
    sums = {s.slot: s.parts for s in gradient_sums(model, tp)}
    in_flight = InFlight(CPU_IN_FLIGHT) if mesh.devices.flat[0].platform == "cpu" else None
    rows = sum(len(op.sites) + 1 for op in inside)
    whole = composed(chain, step, computes, sums, inside)
    donated = [] if digests else [place for place, slot in enumerate(step.inputs) if slot in plan.persistent]
    jobs: dict[Any, Callable[[], Any]] = {
        STEP: partial(
            compile_program, STEP, whole, [plan.slots[s] for s in step.inputs], mesh, rows, in_flight,
            digests=digests, donated=donated,
        )
    }  # fmt: skip
    extra = {SCORE: score_op(chain)} if workload is Workload.FINETUNE else {}
    if extra:
        op = extra[SCORE]
        jobs[SCORE] = partial(
            compile_program, SCORE, scored(chain, op, computes), [plan.slots[s] for s in op.inputs], mesh, 0, in_flight
        )
    if workload in (Workload.TRAINING, Workload.FINETUNE):
        op = extra[SKETCH] = sketch_op(plan)
        body = sketch_body([is_replicated(site) for site in op_sites(step, op.inputs)], tp)
        jobs[SKETCH] = partial(compile_program, SKETCH, body, [plan.slots[s] for s in op.inputs], mesh, 0, in_flight)
    for name in REDUCTIONS:
        if name in examples:
            inputs = [chain.slots[slot] for slot in examples[name].inputs]
            jobs[name] = partial(compile_program, name, computes[name], inputs, mesh, 0, in_flight)
    specs = list(dict.fromkeys(plan.slots.values()))
    jobs |= {spec: partial(compile_digest, spec, mesh) for spec in specs}
    built = compile_all(jobs, on_program or (lambda *_: None))
    programs = {name: program for name, program in built.items() if isinstance(name, str)}
    standalone = {spec: built[spec] for spec in specs}
    fingerprints = {name: program.fingerprint for name, program in programs.items()}
    fingerprints |= {digest_name(spec): fingerprint(program) for spec, program in standalone.items()}
    synthetic = profile is not None
    return Chain(
        plan, programs, synthetic, standalone, mesh, fingerprints, chain, {STEP: inside} if inside else {}, extra
    )
