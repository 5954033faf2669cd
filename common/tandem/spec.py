"""The run spec: what a user asks for, from flags, a YAML file or (later) a PairRun object.

Pure validation; no file is opened here except presets that ship with the package.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tandem.errors import SpecError
from tandem.vocabulary import Kind, SyncMode, Workload

T = TypeVar("T", bound=BaseModel)
Positive = Annotated[int, Field(gt=0)]


_OF_WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "sync": (Workload.SUBMODULE, Workload.GRADIENT),
    "exchange_mib": (Workload.GRADIENT, Workload.TRAINING, Workload.FINETUNE),
    "data": (Workload.SUBMODULE, Workload.GRADIENT, Workload.TRAINING),
    **dict.fromkeys(
        ("exact_every", "exact_mib", "baseline", "checkpoints", "checkpoint_every", "resume", "start"),
        (Workload.TRAINING, Workload.FINETUNE),
    ),
    **dict.fromkeys(
        ("questions", "held_out_percent", "scoring", "packed", "evaluate_every"), (Workload.FINETUNE,)
    ),
}  # fmt: skip
"""Fields that only some workloads use."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Model):
    """A Llama-family decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    name: str
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    ffn: Positive
    vocab: Positive
    rope_theta: float = 10000.0
    rope_scaling: dict[str, float] | None = None
    """Llama 3.1 scaling (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings)."""
    norm_eps: float = 1e-5
    tied: bool = False
    sliding_window: int | None = None
    init_std: float = 0.02

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for RoPE")
        return self


class OptimizerConfig(_Model):
    """AdamW (optax), fp32 master weights and moments."""

    learning_rate: float = Field(3e-4, gt=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = Field(10, ge=0)
    decay_steps: Positive = 10_000
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float | None = Field(1.0, gt=0)
    """Global gradient norm at which gradients are clipped; null: never."""


class Training(_Model):
    """Shape of one step."""

    batch: Positive = 2
    sequence: Positive = 64
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    accumulate: Literal["float32", "compute"] = "float32"
    """dtype in which `reduce` adds the ranks' partials."""
    masked: bool = False
    """Whether targets of -1 are ignored: fine-tuning, whose loss is on the answers alone."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the mean squared log-sum-exp added to the cross entropy."""
    optimizer: OptimizerConfig = OptimizerConfig()


class Preset(_Model):
    """A model with the training shape that fits it; shipped as data under ``presets/``."""

    description: str
    model: ModelConfig
    training: Training


class RunSpec(_Model):
    """One run on one pair. Field names are those of the command line's flags."""

    workload: Workload = Workload.SUBMODULE
    kind: Kind = Kind.SUSPECT
    model: str = "tiny"
    """Name of a preset; not given beside weights: the preset with their model."""
    weights: Path | None = None
    """Directory with Hugging Face ``config.json`` and safetensors; replaces the preset's model and the random start."""
    data: list[Path] = []
    """Text files; empty: the source text of Python's standard library."""
    tokenizer: Path | None = None
    """A ``tokenizer.json`` or SentencePiece model; none: bytes."""
    tp: Positive = 2
    steps: int | None = Field(20, gt=0, lt=2**31)
    """None if only `duration` was given."""
    duration: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds after which the run ends with the step it is in."""
    seed: int = Field(0, ge=0, lt=2**63)
    sync: SyncMode = SyncMode.OPTIMISTIC
    window: int = Field(64, gt=0, le=2**16)
    """Largest number of unconfirmed sites in optimistic mode."""
    fault: Path | None = None
    """A fault profile (TOML); makes the run synthetic for ever."""
    replays: int = Field(3, gt=0, le=64)
    replay_budget: int = Field(8, ge=0, le=2**16)
    """Mismatching sites replayed per step, the first in site order."""
    self_replays: int = Field(8, ge=2, le=1024)
    row_cap: int = Field(100_000, gt=0, le=100_000_000)
    """Mismatch rows kept per run; totals stay exact."""
    step_timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds without progress after which a step is hung."""
    peer_timeout: float = Field(20.0, gt=0, allow_inf_nan=False)
    """Seconds without any frame after which the peer is dead or the link half-open."""
    batch: Positive | None = None
    sequence: Positive | None = None
    compute: Literal["bfloat16", "float32"] | None = None
    accumulate: Literal["float32", "compute"] | None = None
    optimizer: dict[str, Any] = {}
    """Overrides of the preset's optimizer fields."""
    exchange_mib: int = Field(64, gt=0, le=1024)
    """Workloads with a whole-step program: most MiB of a differing tensor that are exchanged, and held, at once."""
    exact_every: int = Field(100, gt=0, lt=2**31)
    """Training, fine-tuning: the drift is measured exactly, per layer, every so many steps and at the end."""
    exact_mib: int = Field(256, ge=0, lt=2**31)
    """Training, fine-tuning: parameters of at most so many MiB a side are measured exactly also at every step whose
    sketch cannot be trusted; larger ones at the first, second, fourth, eighth ... of them."""
    baseline: Literal["seed"] | None = None
    """Training, fine-tuning: a later phase on the reference node with another seed, to compare with."""
    checkpoints: Path | None = None
    """Folder of the checkpoints, a folder of its own in it for each side."""
    checkpoint_every: int = Field(0, ge=0, lt=2**31)
    """Steps between checkpoints; 0: only at the end. Needs `checkpoints`."""
    resume: bool = False
    """Go on from the last step that both sides hold in `checkpoints`."""
    start: Path | None = None
    """One checkpoint from which both sides start, in place of random parameters."""
    questions: list[Path] = []
    """Fine-tuning: multiple-choice questions, one JSON Lines file a task."""
    held_out_percent: int = Field(20, ge=1, le=90)
    """Fine-tuning: share of the questions, by a hash of their ids, that is never trained on and is evaluated."""
    scoring: Literal["mean", "letter"] = "mean"
    """Fine-tuning: score of a choice: mean log-likelihood of its tokens, or that of its letter."""
    packed: bool = False
    """Fine-tuning: several questions a row, one after another, instead of one."""
    evaluate_every: int = Field(0, ge=0, lt=2**31)
    """Fine-tuning: steps between evaluations; 0: only at the end."""

    @model_validator(mode="before")
    @classmethod
    def _by_time(cls, values: Any) -> Any:
        """A duration without steps: time alone ends the run."""
        if isinstance(values, dict) and values.get("duration") is not None and "steps" not in values:
            return {**values, "steps": None}
        return values

    @field_validator("sync", mode="before")
    @classmethod
    def _sync(cls, value: Any) -> Any:
        """Offers the modes that a run may have."""
        if value not in tuple(SyncMode):
            raise ValueError(f"{value!r} is no mode: use {SyncMode.FULL}, {SyncMode.DIGEST} or {SyncMode.OPTIMISTIC}")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is None and self.duration is None:
            raise ValueError("give steps or duration, else the run never ends")
        if self.sync is SyncMode.NONE:
            raise ValueError("sync 'none' compares nothing; it exists for the benchmark only")
        for name, workloads in _OF_WORKLOADS.items():
            if self.workload not in workloads and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to workload {' or '.join(workloads)}, this one is {self.workload}")
        if self.checkpoints is None and (self.checkpoint_every or self.resume):
            raise ValueError(f"{'checkpoint_every' if self.checkpoint_every else 'resume'} needs checkpoints, a folder")
        if self.start is not None and self.weights is not None:
            raise ValueError("give start or weights, not both: each says what the training begins with")
        if self.workload is Workload.FINETUNE and not self.questions:
            raise ValueError("workload finetune needs questions: JSON Lines files, one a task")
        if self.workload is Workload.FINETUNE and self.weights and not self.tokenizer:
            raise ValueError("give the tokenizer of the weights: bytes mean nothing to them")
        return self


def preset_names() -> list[str]:
    """Names of the presets that ship with Tandem, smallest model first."""
    names = [p.name.removesuffix(".toml") for p in resources.files("tandem").joinpath("presets").iterdir()]
    return sorted(names, key=lambda n: (load_preset(n).model.hidden * load_preset(n).model.layers, n))


@cache
def load_preset(name: str) -> Preset:
    """A shipped preset; read once.

    Raises:
        SpecError: no preset has that name.
    """
    path = resources.files("tandem").joinpath("presets", f"{name}.toml")
    if "/" in name or not path.is_file():
        raise SpecError(f"unknown preset {name!r}: choose one of {', '.join(preset_names())}")
    return Preset.model_validate(tomllib.loads(path.read_text()))


def choose_preset(spec: RunSpec, model: ModelConfig | None) -> RunSpec:
    """The spec with the preset whose training shape it takes: with weights and no preset asked for, their own.

    Args:
        spec: what the user asked for.
        model: read from ``--weights``.

    Raises:
        SpecError: no preset has the weights' model, and the spec names none.
    """
    if model is None or "model" in spec.model_fields_set:
        return spec
    name = next((name for name in preset_names() if _alike(load_preset(name).model, model)), None)
    if name is None:
        raise SpecError(
            f"weights {spec.weights}: no preset has this model ({model.name}): "
            "name the one whose batch, sequence and optimizer the run takes, with --model"
        )
    return spec.model_copy(update={"model": name})


def model_name(spec: RunSpec, model: ModelConfig) -> str:
    """What really runs: the preset, or the weights' model with the preset whose training shape it takes."""
    alike = spec.weights is None or _alike(load_preset(spec.model).model, model)
    return spec.model if alike else f"{model.name} (shape of {spec.model})"


def _alike(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether they are one model, whatever its name and random start; some files hold their floats in fp32."""
    mine, theirs = (m.model_dump(exclude={"name", "init_std"}) for m in (one, other))
    return all(
        math.isclose(value, theirs[name], rel_tol=1e-6) if isinstance(value, float) else value == theirs[name]
        for name, value in mine.items()
    )


def resolve(spec: RunSpec, model: ModelConfig | None = None) -> tuple[ModelConfig, Training]:
    """Model and training shape of a run: the preset with the spec's overrides.

    Args:
        spec: what the user asked for.
        model: replaces the preset's model (read from ``--weights``).

    Raises:
        SpecError: an override is wrong, or ``tp`` does not divide what it must.
    """
    preset = load_preset(spec.model)
    model = model or preset.model
    training = preset.training.model_dump()
    for field in ("batch", "sequence", "compute", "accumulate"):
        if (value := getattr(spec, field)) is not None:
            training[field] = value
    training["optimizer"] |= spec.optimizer
    training["masked"] = spec.workload is Workload.FINETUNE
    shape = validate(Training, training, "training")
    check_tp(model, shape, spec.tp)
    return model, shape


def check_tp(model: ModelConfig, training: Training, tp: int) -> None:
    """Tensor parallelism must divide everything that it splits.

    Raises:
        SpecError: names the first quantity that ``tp`` does not divide, and the degrees that would do.
    """
    for name, value in _split(model, training).items():
        if value % tp:
            fits = " or ".join(map(str, degrees(model, training)))
            raise SpecError(f"tp {tp} does not divide {name} ({value}) of {model.name}: use --tp {fits}")


def degrees(model: ModelConfig, training: Training) -> list[int]:
    """Every ``tp`` over which a run can be split, the least, 1, first."""
    parts = _split(model, training).values()
    return [tp for tp in range(1, model.kv_heads + 1) if all(n % tp == 0 for n in parts)]


def _split(model: ModelConfig, training: Training) -> dict[str, int]:
    """What tensor parallelism splits."""
    return {
        "the KV heads": model.kv_heads,
        "the FFN width": model.ffn,
        "the vocabulary": model.vocab,
        "the sequence length": training.sequence,
    }


def validate(cls: type[T], values: Any, what: str) -> T:
    """Validate into a pydantic model; the first error becomes one line.

    Raises:
        SpecError: with the field, the fault and the value.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ": ".join(filter(None, (what, ".".join(str(part) for part in first["loc"]))))
        raise SpecError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
