"""``tandem pair NODE`` and ``tandem watch NAME``: a PairRun in a cluster, from its making to its verdict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tandem.cli import flags as f
from tandem.cli.output import JsonOption, emit_json, exit_code, note, say
from tandem.errors import UsageError
from tandem.vocabulary import EXIT_INCONCLUSIVE, Kind

if TYPE_CHECKING:
    from tandem.kube.client import Kube, Object

EXIT_INTERRUPTED = 130
PATHS = ("weights", "data", "tokenizer", "checkpoints", "start", "questions")
"""Fields of the workload that are paths in the pods."""
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_TAIL = 5
"""Of a generated name's end: none makes a word."""


def pair(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="The node under test.", show_default=False)
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", help="Two healthy nodes, which must match; without NODE any two.")
    ] = False,
    reference: Annotated[
        str | None, typer.Option(metavar="NODE", help="The healthy node.  [default: the most alike that is idle]")
    ] = None,
    swap: Annotated[bool, typer.Option("--swap", help="Compare with another reference than before.")] = False,
    workload: f.WorkloadOption = None,
    model: f.ModelOption = None,
    weights: f.WeightsOption = None,
    data: f.DataOption = None,
    tokenizer: f.TokenizerOption = None,
    tp: f.NodeTpOption = None,
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
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the PairRun.  [default: made from the node's]")
    ] = None,
    namespace: f.NamespaceOption = None,
    context: f.ContextOption = None,
    kubeconfig: f.KubeconfigOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Only make the PairRun; do not follow it.")] = False,
    timeout: f.TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Run a pair in a cluster: a node against a healthy one that is like it.

    Makes a PairRun and follows it to its verdict. Ctrl-C stops following, not the run. Paths are those in the pods.

    Exit codes: 0 match, 1 mismatch found, 2 inconclusive or not able to run, 64 wrong usage.
    """
    asked = f.asked(locals())
    from tandem.kube.client import Kube

    kind = _kind(node, null=null, swap=swap)
    spec = pairrun_spec(kind, node, reference, asked)
    kube = Kube.connect(kubeconfig=kubeconfig, context=context, namespace=namespace)
    for each in (node, reference):
        if each is not None:
            check_node(kube, each)
    made = create(kube, name or generated_name(node or kind), spec)
    name = str(made["metadata"]["name"])
    if detach:
        emit_json(as_json(made)) if json else say(name)
        note(_follow_with(kube, name))
        return
    note(f"PairRun {kube.namespace}/{name}")
    _to_the_end(kube, name, timeout, as_json_too=json, existed=True)


def watch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the PairRun.", show_default=False)],
    namespace: f.NamespaceOption = None,
    context: f.ContextOption = None,
    kubeconfig: f.KubeconfigOption = None,
    timeout: f.TimeoutOption = None,
    json: JsonOption = False,
) -> None:
    """Follow a PairRun to its verdict.

    Exit codes: 0 match, 1 mismatch found, 2 inconclusive or not able to run.
    """
    from tandem.kube.client import Kube

    kube = Kube.connect(kubeconfig=kubeconfig, context=context, namespace=namespace)
    _to_the_end(kube, name, timeout, as_json_too=json)


def _kind(node: str | None, *, null: bool, swap: bool) -> Kind:
    if null and swap:
        raise UsageError("give --null or --swap, not both: a null pair has no suspect")
    if node is None and not null:
        raise UsageError("name the node under test (`tandem candidates` lists those in quarantine), or give --null")
    return Kind.NULL if null else Kind.SWAP if swap else Kind.SUSPECT


def pairrun_spec(kind: Kind, node: str | None, reference: str | None, asked: dict[str, Any]) -> dict[str, Any]:
    """The spec of the PairRun.

    Raises:
        SpecError: a field is wrong, as the controller would find too.
    """
    from tandem.pairrun.spec import read_spec
    from tandem.pairrun.workload import from_run_spec
    from tandem.spec import RunSpec, validate

    run = validate(RunSpec, asked, "option")
    spec: dict[str, Any] = {"kind": str(kind), "workload": from_run_spec(run)}
    if node is not None:
        spec["suspect"] = {"nodeName": node}
    if reference is not None:
        spec["reference"] = {"nodeName": reference}
    read_spec(spec)
    for field in PATHS:
        for path in [found] if isinstance(found := spec["workload"].get(field, []), str) else found:
            if not path.startswith("/"):
                raise UsageError(f"--{field} {path}: give the path in the pods, which begins with /")
    _check_fault(run.fault)
    return spec


def _check_fault(fault: Path | None) -> None:
    """The file is in the pods; a name is one of those that ship with Tandem.

    Raises:
        UsageError: it is neither a path from the root nor such a name.
    """
    from tandem.faults.files import shipped_names

    if fault is not None and not fault.is_absolute() and str(fault) not in shipped_names():
        raise UsageError(
            f"--fault {fault}: use {', '.join(shipped_names())}, or give the path in the pods, which begins with /"
        )


def generated_name(stem: str) -> str:
    """A name that no other PairRun has."""
    tail = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(_TAIL))
    return f"{stem.lower()[:200].strip('-.')}-{tail}"


def is_generated(name: str, stem: str) -> bool:
    """Whether ``generated_name`` may have made a name from a stem, and not from one that begins with it."""
    return name[:-_TAIL] == generated_name(stem)[:-_TAIL] and set(name[-_TAIL:]) <= set(_LETTERS)


def check_node(kube: Kube, node: str) -> None:
    """Whether the cluster has that node; whoever may not look, asks the controller.

    Raises:
        UsageError: it has not.
    """
    from tandem.kube.errors import Forbidden, NotFound
    from tandem.kube.paths import NODES

    try:
        kube.get(NODES.path(name=node))
    except NotFound:
        raise UsageError(f"there is no node {node} in this cluster: list them with `kubectl get nodes`") from None
    except Forbidden:
        return


def create(kube: Kube, name: str, spec: dict[str, Any]) -> Object:
    """Make the PairRun.

    Raises:
        SetupError: the cluster has no PairRuns, or no such namespace; it may not be made; or a field is wrong.
    """
    from tandem.kube.errors import Conflict, KubeError, NotFound
    from tandem.kube.paths import PAIRRUNS
    from tandem.kube.world import missing
    from tandem.pairrun.names import API_VERSION, KIND

    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    try:
        return kube.create(PAIRRUNS.path(kube.namespace), body)
    except NotFound as error:
        raise missing(kube, error) from None
    except Conflict:
        raise UsageError(
            f"a PairRun {kube.namespace}/{name} exists already: "
            f"{_follow_with(kube, name)}, or choose another name with --name"
        ) from None
    except KubeError as error:
        if error.status == 422:
            raise UsageError(error.message) from None
        raise


def _follow_with(kube: Kube, name: str) -> str:
    return f"follow it with `tandem watch {name} --namespace {kube.namespace}`"


def _to_the_end(kube: Kube, name: str, timeout: float | None, *, as_json_too: bool, existed: bool = False) -> NoReturn:
    """Follow a PairRun, tell what changes, print how it ended, and exit with its code."""
    from tandem.kube.follow import follow
    from tandem.pairrun.changes import told
    from tandem.pairrun.status import PairRunStatus, read_status

    before: PairRunStatus | None = None
    last: Object | None = None
    try:
        trouble = lambda line: note(f"{line}; still trying")
        for last in follow(kube, name, existed=existed, timeout_s=timeout, on_trouble=trouble):
            status = read_status(last.get("status"))
            for line in told(before, status):
                note(line)
            before = status
    except KeyboardInterrupt:
        note(f"\nno longer followed, the run goes on: {_follow_with(kube, name)}")
        note(f"to end it: kubectl delete pairrun {name} --namespace {kube.namespace}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    status = before or PairRunStatus()
    if last is None and not existed:
        note(
            f"in {timeout:.0f} s nothing was heard of the PairRun {kube.namespace}/{name}: is the API server reachable?"
        )
        raise typer.Exit(EXIT_INCONCLUSIVE)
    if last is not None and as_json_too:
        emit_json(as_json(last))
    if not status.holds("Finished"):
        note(f"not finished after {timeout:.0f} s, the run goes on: {_follow_with(kube, name)}")
        raise typer.Exit(EXIT_INCONCLUSIVE)
    if not as_json_too:
        say(_ending(status))
        if status.run_id:
            note(f"run {status.run_id}: `tandem show` and `tandem report`, with --db, have the rest")
    raise typer.Exit(exit_code(status.verdict))


def _ending(status: Any) -> str:
    """The verdict as one line."""
    finished = status.condition("Finished")
    message = status.message or (finished.message if finished else "")
    verdict = status.verdict or "no verdict"
    return message if message.startswith(verdict) else f"{verdict}: {message or status.reason}"


def as_json(obj: Object) -> dict[str, Any]:
    """A PairRun as ``--json`` prints it."""
    meta, status = obj["metadata"], obj.get("status") or {}
    return {
        "pairrun": meta["name"],
        "namespace": meta.get("namespace"),
        "run": status.get("runId") or None,
        "verdict": status.get("verdict") or None,
        "reason": status.get("reason") or None,
        "message": status.get("message") or None,
        "spec": obj.get("spec"),
        "status": status,
    }
