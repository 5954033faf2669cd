"""From a model to a chain whose every executable is compiled ahead of time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from tandem.errors import SetupError
from tandem.faults.injection import FaultProfile, can_act
from tandem.spec import ModelConfig, Training, check_tp
from tandem_worker.chain import Chain, Plan, TensorSpec, digest_name
from tandem_worker.model.compile import CPU_IN_FLIGHT, InFlight, compile_digest, compile_program, fingerprint, injected
from tandem_worker.model.forward import AXIS
from tandem_worker.model.plan import make_plan
from tandem_worker.model.programs import bodies, example_ops

Progress = Callable[[str, int, int], None]
"""Called after each executable is compiled: its name, how many are done, how many there are."""


def make_mesh(tp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """One mesh axis ``tp`` over the first ``tp`` devices.

    Raises:
        SetupError: there are fewer devices.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < tp:
        raise SetupError(
            f"tp {tp} needs {tp} devices and this worker has {len(found)}: use --tp {len(found)} or more devices"
        )
    return jax.make_mesh((tp,), (AXIS,), axis_types=(AxisType.Auto,), devices=found[:tp])


def build_chain(
    model: ModelConfig,
    training: Training,
    tp: int,
    *,
    profile: FaultProfile | None = None,
    devices: Sequence[Any] | None = None,
    on_program: Progress | None = None,
) -> Chain:
    """Compile the chain of one training step.

    Args:
        model: the decoder.
        training: shape of a step.
        tp: ranks, one device each.
        profile: makes the build synthetic: the injector is compiled into every program in which the profile can
            act, on both sides alike; None for a real build.
        devices: the ranks' devices; the process's first ones if None.
        on_program: progress.

    Raises:
        SpecError: ``tp`` does not divide what it must.
        SetupError: too few devices.
    """
    check_tp(model, training, tp)
    # Source paths would otherwise be part of every executable and of its fingerprint.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    mesh = make_mesh(tp, devices)
    plan = make_plan(model, training, tp)
    found, specs = bodies(plan, model, training), list(dict.fromkeys(plan.slots.values()))
    examples = example_ops(plan)
    report = on_program or (lambda *_: None)
    in_flight = InFlight(CPU_IN_FLIGHT) if mesh.devices.flat[0].platform == "cpu" else None
    faulty = {op.program for op in plan.ops if profile is not None and can_act(profile, op.sites)}
    jobs: dict[Any, Callable[[], Any]] = {}
    for name, body in found.items():
        inputs, outputs = (_specs(plan, slots) for slots in (examples[name].inputs, examples[name].outputs))
        rows = len(outputs) + 1 if name in faulty else 0
        jobs[name] = partial(compile_program, name, injected(name, body, outputs), inputs, mesh, rows, in_flight)
    jobs |= {spec: partial(compile_digest, spec, mesh) for spec in specs}
    built = compile_all(jobs, report)
    programs = {name: built[name] for name in found}
    digests = {spec: built[spec] for spec in specs}
    fingerprints = {name: program.fingerprint for name, program in programs.items()}
    fingerprints |= {digest_name(spec): fingerprint(program) for spec, program in digests.items()}
    return Chain(plan, programs, profile is not None, digests, mesh, fingerprints, plan)


def compile_all(jobs: Mapping[Any, Callable[[], Any]], report: Progress) -> dict[Any, Any]:
    """Compile side by side: XLA's compiler leaves the interpreter's lock alone. One job at a time per core."""
    built: dict[Any, Any] = {}
    report("", 0, len(jobs))
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile") as pool:
        waiting = {pool.submit(job): key for key, job in jobs.items()}
        for done in as_completed(waiting):
            key = waiting[done]
            built[key] = done.result()
            report(key if isinstance(key, str) else digest_name(key), len(built), len(jobs))
    return built


def _specs(plan: Plan, slots: Sequence[str]) -> list[TensorSpec]:
    return [plan.slots[slot] for slot in slots]
