"""``tandem run``: one pair on this machine, from flags or a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from tandem.cli import flags as f
from tandem.cli.output import DbOption, JsonOption, console, database_url, emit_json, exit_code, note, say
from tandem.errors import SpecError, UsageError
from tandem.records import RunRecords
from tandem.spec import RunSpec, load_preset, resolve, validate
from tandem.vocabulary import Kind

if TYPE_CHECKING:
    from tandem.supervisor import Stop

PATHS = ("weights", "tokenizer", "checkpoints", "start")
"""Fields with one path."""


def run(
    ctx: typer.Context,
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="YAML file with a run spec; flags win over it.")
    ] = None,
    workload: f.WorkloadOption = None,
    kind: Annotated[Kind | None, typer.Option(help="Kind of the run.  [default: suspect]")] = None,
    model: f.ModelOption = None,
    weights: f.WeightsOption = None,
    data: f.DataOption = None,
    tokenizer: f.TokenizerOption = None,
    tp: f.TpOption = None,
    steps: f.StepsOption = None,
    duration: f.DurationOption = None,
    seed: f.SeedOption = None,
    sync: f.SyncOption = None,
    window: f.WindowOption = None,
    fault: f.FaultOption = None,
    batch: f.BatchOption = None,
    sequence: f.SequenceOption = None,
    compute: f.ComputeOption = None,
    exchange_mib: f.ExchangeOption = None,
    exact_every: f.ExactEveryOption = None,
    baseline: f.BaselineOption = None,
    checkpoints: f.CheckpointsOption = None,
    checkpoint_every: f.CheckpointEveryOption = None,
    resume: f.ResumeOption = None,
    start: f.StartOption = None,
    questions: f.QuestionsOption = None,
    held_out_percent: f.HeldOutOption = None,
    scoring: f.ScoringOption = None,
    packed: f.PackedOption = None,
    evaluate_every: f.EvaluateEveryOption = None,
    run_id: Annotated[str | None, typer.Option(metavar="UUID", help="Id of the run (UUIDv7).  [default: new]")] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=1, max=65535, help="Tell Prometheus of the pair, on this machine alone."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run nothing: print the spec as a PairRun for a cluster.")
    ] = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Run a pair on this machine, compare it bit by bit, and store what differs.

    Exit codes: 0 match, 1 mismatch found, 2 inconclusive or not able to run, 64 wrong usage.
    """
    asked = read_spec(spec, f.asked(locals()))
    if dry_run:
        _only_dry(ctx, {"db": "--db", "run_id": "--run-id", "metrics_port": "--metrics-port", "json": "--json"})
        say(as_pairrun(asked).rstrip())
        return
    records = execute(asked, db, run_id=_uuid(run_id), metrics_port=metrics_port)
    raise typer.Exit(report(records, as_json=json))


def _only_dry(ctx: typer.Context, others: dict[str, str]) -> None:
    """Refuse options that a dry run would ignore; the environment's database is no request."""
    for name, option in others.items():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--dry-run stores no run and prints YAML: leave {option} out")


def read_spec(path: Path | None, flags: dict[str, Any]) -> RunSpec:
    """The spec from a YAML file and flags.

    Raises:
        SpecError: the file cannot be read, or a field is wrong.
    """
    values: dict[str, Any] = {}
    if path is not None:
        from tandem.yaml_file import read_mapping

        values = read_mapping(path, "spec")
        if values.get("kind", "") is None:
            values["kind"] = str(Kind.NULL)  # YAML reads the bare word null as no value
    spec = validate(RunSpec, values | flags, f"spec {path}" if path else "option")
    load_preset(spec.model)
    return _absolute(spec)


def _absolute(spec: RunSpec) -> RunSpec:
    """Paths that mean the same in every folder: the spec is stored, and repeated elsewhere."""
    paths = {name: path.absolute() for name in PATHS if (path := getattr(spec, name))}
    if spec.fault is not None:
        from tandem.faults.files import check_name, shipped_profile

        check_name(spec.fault)
        if shipped_profile(spec.fault) is None:
            paths["fault"] = spec.fault.absolute()
    return spec.model_copy(
        update={
            **paths,
            "data": [path.absolute() for path in spec.data],
            "questions": [path.absolute() for path in spec.questions],
        }
    )


def as_pairrun(spec: RunSpec) -> str:
    """A local spec as the YAML of a PairRun, for ``kubectl create``; its paths are then those in the pods.

    Raises:
        SpecError: a field has no equal there.
    """
    import yaml

    from tandem.pairrun.names import API_VERSION, KIND
    from tandem.pairrun.spec import read_spec
    from tandem.pairrun.workload import from_run_spec

    if spec.weights is None:
        resolve(spec)
    values = {"kind": str(spec.kind), "workload": from_run_spec(spec)}
    read_spec(values)
    body = {
        "apiVersion": API_VERSION, "kind": KIND, "metadata": {"generateName": f"{spec.kind}-"}, "spec": values,
    }  # fmt: skip
    return yaml.safe_dump(body, sort_keys=False, width=120, allow_unicode=True)


def execute(
    spec: RunSpec,
    db: str | None,
    *,
    run_id: UUID | None = None,
    metrics_port: int | None = None,
    stop: Stop | None = None,
) -> RunRecords:
    """Run a spec with progress on standard error.

    Args:
        spec: what to run.
        db: where the records go; None: the embedded database.
        run_id: None: a new one.
        metrics_port: where Prometheus finds the pair.
        stop: of whoever runs several; Ctrl-C counts there.
    """
    from tandem.progress import Progress
    from tandem.supervisor import Local, Stop, run_local

    stop = stop or Stop()
    model = spec.model if spec.weights is None else f"weights {spec.weights.name}"
    title = f"{spec.kind} · {spec.workload} · {model} · TP {spec.tp} · {spec.sync}"
    if spec.fault is not None:
        title += f" · synthetic: {spec.fault.name}"
    with database_url(db) as url, stop.on_interrupt(), Progress(console(stderr=True), title) as progress:
        local = Local(url=url, run_id=run_id, metrics_port=metrics_port, on_progress=progress.update)
        return run_local(spec, local, stop)


def report(records: RunRecords, *, as_json: bool) -> int:
    """Print the verdict with its table; returns the exit code."""
    from tandem.progress import closing_lines
    from tandem.runs.as_json import to_json
    from tandem.runs.summary import summarise

    summary = summarise(records)
    if as_json:
        emit_json(to_json(summary))
    else:
        for line in closing_lines(summary):
            say(line)
        if summary.run.synthetic:
            note("synthetic: faults were injected, so this run says nothing about its node")
        if records.attempts and records.attempts[-1].reason == "stopped":
            note(f"stopped early, as asked, after {max(len(records.steps) - 1, 0):,} steps: the verdict is about those")
        note(f"report: tandem report {records.run.run_id}")
    return exit_code(records.run.verdict)


def _uuid(text: str | None) -> UUID | None:
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise SpecError(f"run id {text!r} is no UUID: leave --run-id out to get a new one") from None
