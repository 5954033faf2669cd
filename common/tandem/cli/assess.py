"""``tandem assess NODE``: every run that a node needs for its verdict, one after another."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from uuid import UUID

import typer

from tandem import formats
from tandem.cli import flags as f
from tandem.cli.nodes import NODE_EXITS
from tandem.cli.output import DbOption, JsonOption, database, emit_json, note, say
from tandem.errors import SetupError, UsageError
from tandem.nodes.assess import Ended, Wanted
from tandem.pairrun.names import FINISHED
from tandem.spec import RunSpec, validate
from tandem.vocabulary import Kind, Verdict

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from tandem.pairrun.status import PairRunStatus

LEAST_S = 60
"""A run shorter than this is not begun: compiling and the controls would be most of it."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Followed(NamedTuple):
    """A PairRun that came to its end."""

    name: str
    kind: str
    run_id: UUID
    status: PairRunStatus


Make = Callable[[Wanted, int], Followed]
"""Makes a run of at most so many seconds, and waits for its end."""


def assess(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="The node, in a cluster.", show_default=False)
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Rehearse the procedure on this machine; it says nothing of a node.")
    ] = False,
    budget: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Begin no run after this long: 90m, 4h, 2d.")
    ] = "4h",
    each: Annotated[str, typer.Option(metavar="TIME", help="Length of each run.")] = "15m",
    model: Annotated[str, typer.Option(metavar="PRESET", help="Model preset; tiny never clears a node.")] = "small",
    tp: f.NodeTpOption = None,
    namespace: f.NamespaceOption = None,
    context: f.ContextOption = None,
    kubeconfig: f.KubeconfigOption = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Where the node's report goes.")
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> int:
    """Run what a node needs for its verdict: null control, submodules, gradients, findings again elsewhere.

    An interrupted assessment goes on where it was. The first Ctrl-C of a rehearsal ends its run regularly.

    Exit codes: 0 clean, 1 corrupting or suspected, 2 unknown.
    """
    if local == (node is not None):
        raise UsageError("name the node (`tandem candidates` lists those in quarantine), or give --local")
    seconds, length = duration(budget, "--for"), duration(each, "--each")
    deadline = time.monotonic() + seconds
    asked: dict[str, Any] = {"model": model} | ({} if tp is None else {"tp": tp})
    validate(RunSpec, asked, "option")
    if local:
        from tandem.cli.rehearsal import rehearse

        _only_local({"--namespace": namespace, "--context": context, "--kubeconfig": kubeconfig, "--out": out})
        return rehearse(asked, length, deadline, db, json=json)
    if db is None:
        raise UsageError(
            "give --db (or TANDEM_DB), the database of the cluster's controller: the verdict is made of it"
        )
    assert node is not None
    runner = _pair_runner(node, asked, namespace, context, kubeconfig)
    return _cluster(node, model, runner, length, deadline, db, out, json=json)


def _only_local(others: dict[str, object]) -> None:
    """Refuse options that a rehearsal would ignore."""
    given = [option for option, value in others.items() if value is not None]
    if "--out" in given:
        raise UsageError("--local writes a page for each run, tandem-RUN.html in this folder: leave --out out")
    if given:
        raise UsageError(f"--local runs on this machine, without a cluster: leave {given[0]} out")


def duration(text: str, option: str) -> float:
    """Seconds of ``90m``, ``4h`` ...

    Raises:
        UsageError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"{option} {text}: give a time such as 90m, 4h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def _cluster(
    node: str,
    model: str,
    make: Make,
    length: float,
    deadline: float,
    db: str,
    out: Path | None,
    *,
    json: bool,
) -> int:
    from tandem.db.profiles import load_node, next_of_node
    from tandem.nodes.as_json import to_json
    from tandem.report import node_page
    from tandem.report.page import write

    made, stuck = 0, ""
    while not stuck:
        with database(db) as engine:
            wanted = next_of_node(engine, node, model)
        rest = deadline - time.monotonic()
        if isinstance(wanted, Ended) or rest < LEAST_S:
            break
        made += 1
        note(f"run {made}: {wanted.why} (kind {wanted.kind}, workload {wanted.workload})")
        done = make(wanted, int(max(LEAST_S, min(length, rest))))
        with database(db) as engine:
            stuck = _uncounted(engine, node, done)
    why = stuck or (wanted.why if isinstance(wanted, Ended) else f"the time is up; next would be {wanted.why}")
    with database(db) as engine:
        try:
            profile = load_node(engine, node)
        except UsageError:  # no run names it
            raise SetupError(f"nothing is known of {node}: {why}") from None
    path = write(node_page.render(profile), out or Path(f"tandem-{re.sub(r'[^A-Za-z0-9._-]', '_', node)}.html"))
    if json:
        emit_json({"ended": why, "runs_made": made, "report": str(path), "profile": to_json(profile)})
    else:
        say(profile.sentence)
        say(f"ended after {formats.plural(made, 'run')}: {why}")
        for line in profile.missing:
            say(f"missing: {line}")
        say(f"report: {path}")
    return NODE_EXITS[profile.verdict]


def _uncounted(engine: Engine, node: str, done: Followed) -> str:
    """Why the next run would be the same again: the ended one left nothing that the procedure counts; else empty."""
    from tandem.db.queries import has_run

    name, status = done.name, done.status
    if has_run(engine, done.run_id):
        sides = [side.node for side in (status.suspect, status.reference) if side is not None]
        if done.kind == Kind.NULL and node in sides:
            return f"the null control {name} took {node} itself: quarantine it (kubectl cordon {node}) and call again"
        return ""
    finished = status.condition(FINISHED)
    message = status.message or (finished.message if finished else "") or status.reason or "no reason was given"
    told = formats.clean(message.removeprefix(f"{Verdict.INCONCLUSIVE}: "), 500)
    if status.attempts:
        return f"PairRun {name} ended ({told}), and this database has no run of it: give the controller's with --db"
    return f"PairRun {name} ended without a run ({told}): mend that first"


def _pair_runner(
    node: str, asked: dict[str, Any], namespace: str | None, context: str | None, kubeconfig: str | None
) -> Make:
    """Makes a PairRun and follows it to its end; one that an interrupted assessment left unfinished comes first."""
    from tandem.cli.pair import check_node, create, generated_name, is_generated, pairrun_spec
    from tandem.kube.client import Kube
    from tandem.kube.follow import follow
    from tandem.kube.paths import PAIRRUNS
    from tandem.pairrun.changes import told
    from tandem.pairrun.names import run_id_of
    from tandem.pairrun.status import PairRunStatus, finished, read_status

    kube = Kube.connect(kubeconfig=kubeconfig, context=context, namespace=namespace)
    check_node(kube, node)
    stem = f"assess-{node}"

    def watch(name: str) -> Followed:
        before = PairRunStatus()
        for obj in follow(kube, name, existed=True, on_trouble=lambda line: note(f"{line}; still trying")):
            status = read_status(obj.get("status"))
            for line in told(before, status):
                note(f"  {line}")
            before = status
        meta = obj["metadata"]
        kind = str(obj["spec"].get("kind", Kind.SUSPECT))
        return Followed(name, kind, run_id_of(meta["uid"], meta["creationTimestamp"]), before)

    def make(wanted: Wanted, seconds: int) -> Followed:
        left = [
            obj["metadata"]["name"]
            for obj in kube.get(PAIRRUNS.path(kube.namespace))["items"]
            if is_generated(obj["metadata"]["name"], stem) and not finished(obj)
        ]
        if left:
            note(f"  first {left[0]}, which was begun before")
            return watch(left[0])
        fields = asked | {"workload": wanted.workload, "duration": seconds}
        spec = pairrun_spec(wanted.kind, None if wanted.kind is Kind.NULL else node, None, fields)
        made = create(kube, generated_name(stem), spec)
        return watch(str(made["metadata"]["name"]))

    return make
