"""From a model to a chain whose every executable is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from tandem.errors import SetupError
from tandem.spec import ModelConfig, Training, check_tp
from tandem_worker.chain import Chain, Plan, TensorSpec
from tandem_worker.model.compile import CompiledProgram, compile_digest, compile_program, fingerprint
from tandem_worker.model.forward import AXIS
from tandem_worker.model.plan import make_plan
from tandem_worker.model.programs import bodies, example_ops

Progress = Callable[[str, int, int], None]
"""Called before each executable is compiled: its name, how many are done, how many there are."""


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
    synthetic: bool,
    devices: Sequence[Any] | None = None,
    on_program: Progress | None = None,
) -> Chain:
    """Compile the chain of one training step.

    Args:
        model: the decoder.
        training: shape of a step.
        tp: ranks, one device each.
        synthetic: whether the injector is compiled into every program.
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
    total = len(found) + len(specs)
    programs: dict[str, CompiledProgram] = {}
    for name, body in found.items():
        report(name, len(programs), total)
        inputs, outputs = (_specs(plan, slots) for slots in (examples[name].inputs, examples[name].outputs))
        programs[name] = compile_program(name, body, inputs, outputs, mesh, synthetic)
    digests: dict[TensorSpec, Any] = {}
    for spec in specs:
        report(f"digest {_label(spec)}", len(programs) + len(digests), total)
        digests[spec] = compile_digest(spec, mesh)
    fingerprints = {name: program.fingerprint for name, program in programs.items()}
    fingerprints |= {f"digest {_label(spec)}": fingerprint(program) for spec, program in digests.items()}
    report("", total, total)
    return Chain(plan, programs, synthetic, digests, mesh, fingerprints)


def _specs(plan: Plan, slots: Sequence[str]) -> list[TensorSpec]:
    return [plan.slots[slot] for slot in slots]


def _label(spec: TensorSpec) -> str:
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"
