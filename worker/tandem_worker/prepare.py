"""From a spec to a machine that is ready for the handshake: inputs checked, programs compiled, parameters placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.faults.injection import FaultProfile, check_profile, load_profile
from tandem.spec import ModelConfig, RunSpec, Training, choose_preset, resolve
from tandem.vocabulary import UNSYNCHRONISED, Role, Workload
from tandem_worker.compiled import compiled_once
from tandem_worker.data import Stream, open_data
from tandem_worker.drift.saved import check_side, content_digest
from tandem_worker.files import digest_of
from tandem_worker.heap import prepare_heap
from tandem_worker.model.plan import make_plan
from tandem_worker.model.weights import check_weights, read_begin, read_config, weights_digest
from tandem_worker.questions.evaluation import Evaluation
from tandem_worker.questions.opened import open_questions
from tandem_worker.tokenizer import check_tokenizer

Report = Callable[[str], None]
"""Called with a phase, for progress."""


class Inputs:
    """Everything that a spec names, read and checked. Needs no jax."""

    def __init__(self, spec: RunSpec) -> None:
        """Read the inputs.

        Raises:
            TandemError: the first thing that is wrong, before any step.
        """
        config = read_config(spec.weights) if spec.weights else None
        self.spec = spec = choose_preset(spec, config)
        self.model: ModelConfig
        self.training: Training
        self.model, self.training = resolve(spec, config)
        if spec.weights:
            check_weights(spec.weights, self.model)
            if spec.tokenizer is not None:
                check_tokenizer(spec.tokenizer, self.model.vocab, read_begin(spec.weights), spec.weights)
        self.plan = make_plan(self.model, self.training, spec.tp)
        self.profile: FaultProfile | None = None
        if spec.fault:
            self.profile = load_profile(spec.fault)
            kept = self.plan.persistent if spec.workload is not Workload.SUBMODULE else self.plan.slots.keys()
            inputs = {
                site.number: [n for n, slot in zip(op.input_names, op.inputs, strict=True) if slot in kept]
                for op in self.plan.ops
                for site in op.sites
            }
            check_profile(self.profile, self.plan.sites, spec.tp, inputs)
        self.data: Stream
        self.held_out: Evaluation | None = None
        shape: dict[str, int] = {
            "seed": spec.seed, "batch": self.training.batch, "sequence": self.training.sequence,
            "vocab": self.model.vocab,
        }  # fmt: skip
        if spec.workload is Workload.FINETUNE:
            questions = open_questions(
                spec.questions, spec.tokenizer, **shape,
                held_out_percent=spec.held_out_percent, scoring=spec.scoring, packed=spec.packed,
            )  # fmt: skip
            self.data, self.held_out = questions.training, questions.evaluation
        else:
            self.data = open_data(spec.data, spec.tokenizer, **shape)

    def training_fields(self) -> dict[str, str]:
        """The parity fields that determine a training, as far as they can be told without reading the weights."""
        spec, profile = self.spec, self.profile
        fields = {
            "model": digest_of(self.model.model_dump(mode="json")), "seed": str(spec.seed), "tp": str(spec.tp),
            "training": digest_of(self.training.model_dump(mode="json")), "data": self.data.digest,
            "faults": profile.digest if profile else "none",
        }  # fmt: skip
        return fields if spec.weights or spec.start else fields | {"weights": "random"}


def prepare(
    spec: RunSpec,
    role: Role,
    attempt: int,
    report: Report,
    touch: Callable[[], None],
    inputs: Inputs | None = None,
    *,
    run: str = "",
    node_devices: int = 0,
) -> Any:
    """Compile and load; returns a `Prepared`.

    Args:
        spec: the run.
        role: only a synthetic suspect gets the fault profile; the reference passes rate zero.
        attempt: number of the attempt.
        report: progress.
        touch: told after everything that took time, for the watchdog.
        inputs: of the spec, if they were read already.
        run: the run's UUID in hexadecimal, which the checkpoints of its training carry.
        node_devices: how many the suspect's node has; 0: those that are seen.

    Raises:
        TandemError: the inputs cannot be used or the devices do not suffice.
    """
    from tandem_worker import parity
    from tandem_worker.drift import checkpoints
    from tandem_worker.drift.held_out import HeldOut
    from tandem_worker.drift.parts import DriftParts, NoEvaluation
    from tandem_worker.drift.room import state_bytes
    from tandem_worker.lockstep.machine import Machine
    from tandem_worker.model.build import build_chain
    from tandem_worker.model.init import place, random_parameters
    from tandem_worker.model.weights import load_parameters
    from tandem_worker.model.whole_build import build_whole
    from tandem_worker.session.common import Prepared

    inputs = inputs or Inputs(spec)
    check_side(spec, role, inputs.training_fields(), run, attempt)

    def on_program(_: str, done: int, total: int) -> None:
        touch()
        report(f"compiling {done}/{total}")

    with compiled_once(report):
        more: dict[str, Any] = {"profile": inputs.profile, "on_program": on_program}
        if spec.workload is Workload.SUBMODULE:
            chain = build_chain(inputs.model, inputs.training, spec.tp, **more)
        else:
            chain = build_whole(inputs.model, inputs.training, spec.tp, spec.workload, **more)
    if chain.mesh.devices.flat[0].platform == "cpu":
        prepare_heap(spec.tp * state_bytes(chain.plan))
    machine = Machine(chain, inputs.profile if role is Role.SUSPECT else None)
    report("loading")

    def fresh(seed: int) -> Any:
        if spec.start is not None:
            return checkpoints.start_slots(spec.start, chain.plan, chain.mesh)
        if not spec.weights:
            return random_parameters(chain.plan, inputs.model, chain.mesh, seed)
        return place(_touching(load_parameters(spec.weights, inputs.model, spec.tp), touch), chain.plan, chain.mesh)

    weights = "random"
    if spec.start is not None:
        weights = f"checkpoint {content_digest(spec.start)}"
    elif spec.weights:
        weights = weights_digest(spec.weights)
    fields = parity.gather(
        spec, inputs.model, inputs.training, chain, data=inputs.data.digest, weights=weights, profile=inputs.profile,
        node_devices=node_devices,
    )  # fmt: skip
    drift = None
    if spec.workload in UNSYNCHRONISED:
        evaluation = HeldOut(machine, inputs.held_out, spec.evaluate_every) if inputs.held_out else NoEvaluation()
        drift = DriftParts(fresh, checkpoints.open_store(spec, role, fields, run, attempt), evaluation)
    machine.slots.update(fresh(spec.seed))
    touch()
    return Prepared(spec, machine, inputs.data, fields, spec.steps, attempt, drift)


def _touching(parts: Any, touch: Callable[[], None]) -> Any:
    for part in parts:
        touch()
        yield part
