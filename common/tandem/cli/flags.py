"""Options that several commands share: what a pair runs, and which cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.spec import RunSpec
from tandem.vocabulary import Workload

WorkloadOption = Annotated[Workload | None, typer.Option(help="What the pair runs.  [default: submodule]")]
ModelOption = Annotated[
    str | None, typer.Option(metavar="PRESET", help="Model preset.  [default: tiny, or that of the weights]")
]
WeightsOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Hugging Face config.json and safetensors to start from.")
]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text to train on, may be repeated.  [default: Python's source]"),
]
TokenizerOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="tokenizer.json or tokenizer.model; without it, bytes.")
]
TpOption = Annotated[int | None, typer.Option(help="Tensor-parallel ranks, one device each.  [default: 2]")]
NodeTpOption = Annotated[
    int | None,
    typer.Option(help="Tensor-parallel ranks, one device each.  [default: as many of the node's as fit; on CPUs 2]"),
]
StepsOption = Annotated[int | None, typer.Option(help="Optimizer steps.  [default: 20]")]
DurationOption = Annotated[float | None, typer.Option(metavar="SECONDS", help="End after this long.")]
SeedOption = Annotated[int | None, typer.Option(help="Of initial weights and data order.  [default: 0]")]
SyncOption = Annotated[str | None, typer.Option(help="full, digest or optimistic.  [default: optimistic]")]
WindowOption = Annotated[int | None, typer.Option(help="Most unconfirmed sites.  [default: 64]")]
FaultOption = Annotated[
    Path | None,
    typer.Option(metavar="TOML", help="Inject these faults (a file, or a shipped profile's name); synthetic for ever."),
]
BatchOption = Annotated[int | None, typer.Option(help="Sequences per step.  [default: the preset's]")]
SequenceOption = Annotated[int | None, typer.Option(help="Tokens per sequence.  [default: the preset's]")]
ComputeOption = Annotated[str | None, typer.Option(help="bfloat16 or float32.  [default: the preset's]")]

ExchangeOption = Annotated[int | None, typer.Option(help="Most MiB of a differing tensor at once.  [default: 64]")]
ExactEveryOption = Annotated[
    int | None, typer.Option(help="Training: steps between exact measurements of the drift.  [default: 100]")
]
BaselineOption = Annotated[
    str | None, typer.Option(metavar="seed", help="Training: then train the reference with another seed, to compare.")
]
CheckpointsOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Training: folder of the checkpoints, each side its own in it.")
]
CheckpointEveryOption = Annotated[
    int | None, typer.Option(help="Training: steps between checkpoints.  [default: only at the end]")
]
ResumeOption = Annotated[
    bool | None, typer.Option("--resume", help="Training: go on from the last step that both sides hold there.")
]
StartOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Training: one checkpoint whose weights both sides start from.")
]

QuestionsOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Finetune: multiple-choice questions (JSON Lines), a file a task."),
]
HeldOutOption = Annotated[
    int | None,
    typer.Option(help="Finetune: percent of the questions that are evaluated, not trained on.  [default: 20]"),
]
ScoringOption = Annotated[
    str | None, typer.Option(help="Finetune: mean (log-likelihood of a choice's text) or letter.  [default: mean]")
]
PackedOption = Annotated[bool | None, typer.Option("--packed", help="Finetune: several questions a row.")]
EvaluateEveryOption = Annotated[
    int | None, typer.Option(help="Finetune: steps between evaluations.  [default: only at the end]")
]

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace.  [default: the context's]")
]
ContextOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig.  [default: the current one]")
]
KubeconfigOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Kubeconfig.  [default: as kubectl: KUBECONFIG, ~/.kube/config]")
]
TimeoutOption = Annotated[
    float | None, typer.Option(min=0, metavar="SECONDS", help="Stop watching after this long.  [default: never]")
]


def asked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's arguments (its ``locals()``) those that are fields of a run's spec and were given."""
    return {name: value for name in RunSpec.model_fields if (value := arguments.get(name)) not in (None, [])}
