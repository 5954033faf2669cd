"""``tandem runs``: the runs that are stored, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem import formats
from tandem.cli.output import DbOption, JsonOption, database, emit_json, say
from tandem.vocabulary import Kind, Verdict, Workload

if TYPE_CHECKING:
    from tandem.db.queries import RunSummaryRow


def runs(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many, newest first.")] = 20,
    verdict: Annotated[Verdict | None, typer.Option(help="Only runs with this verdict.")] = None,
    workload: Annotated[Workload | None, typer.Option(help="Only runs of this workload.")] = None,
    kind: Annotated[Kind | None, typer.Option(help="Only runs of this kind.")] = None,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs with this node on either side.")] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """List the stored runs, newest first."""
    from tandem.db.queries import list_runs
    from tandem.lists_json import run_json

    with database(db) as engine:
        found = list_runs(engine, limit=limit, verdict=verdict, workload=workload, kind=kind, node=node)
    if json:
        emit_json({"runs": [run_json(run) for run in found]})
        return
    if not found:
        say("no run is stored yet: start one with `tandem run`")
        return
    from tandem.runs import tables

    header = ("run", "created", "workload", "kind", "model", "suspect", "steps", "mismatching", "verdict")
    for line in tables.align(header, (_row(run) for run in found), left=6):
        say(line)


def _row(run: RunSummaryRow) -> list[str]:
    row = run.run
    return [
        str(row.run_id),
        formats.when(row.created_at),
        row.workload,
        row.kind + (" (synthetic)" if row.synthetic else ""),
        formats.clean(row.model, 40),
        formats.clean(row.suspect_node, 40),
        formats.count(max(run.steps - run.attempts, 0)),  # each attempt begins with step 0, the initial parameters
        formats.count(run.mismatched_sites),
        row.verdict or row.state,
    ]
