"""``tandem nodes`` and ``tandem node NAME``: what the records say of nodes, and a person's decision about one."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING, Annotated

import typer

from tandem import formats
from tandem.cli.output import DbOption, JsonOption, database, emit_json, say
from tandem.errors import UsageError
from tandem.vocabulary import (
    EXIT_INCONCLUSIVE,
    EXIT_MATCH,
    EXIT_MISMATCH,
    NodeAction,
    NodeVerdict,
)

if TYPE_CHECKING:
    from tandem.db.nodes import FleetLine

NODE_EXITS = {
    NodeVerdict.CLEAN: EXIT_MATCH,
    NodeVerdict.CORRUPTING: EXIT_MISMATCH,
    NodeVerdict.SUSPECTED: EXIT_MISMATCH,
    NodeVerdict.UNKNOWN: EXIT_INCONCLUSIVE,
}
"""Only `clean` is 0: what gates a node's return to service must not let an untested one through."""


def nodes(db: DbOption = None, json: JsonOption = False) -> None:
    """List the nodes that real runs name, those that need a person first at the top."""
    from tandem.db.profiles import load_fleet
    from tandem.lists_json import fleet_counts, nodes_json

    with database(db) as engine:
        found = load_fleet(engine)
    if json:
        emit_json(nodes_json(found))
        return
    if not found:
        say("no real run of two hosts is stored yet: start one with `tandem pair NODE`")
        return
    from tandem.runs import tables

    say(", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in fleet_counts(found).items()))
    say()
    header = ("node", "verdict", "since", "evidence", "last run", "missing")
    for line in tables.align(header, (_row(x) for x in found), left=len(header)):
        say(line)


def _row(x: FleetLine) -> list[str]:
    more = f" (and {len(x.decided.missing) - 1} more)" if len(x.decided.missing) > 1 else ""
    evidence = x.evidence or (x.decided.sentence.partition(": ")[2] if not x.decided.references else "")
    return [
        formats.clean(x.node, 60),
        str(x.decided.verdict),
        formats.when(x.decided.since),
        formats.clean(evidence, 100) or "-",
        formats.when(x.last_run_at),
        formats.clean(x.decided.missing[0], 100) + more if x.decided.missing else "-",
    ]


def node(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the node.", show_default=False)],
    action: Annotated[
        NodeAction | None,
        typer.Argument(metavar="[clear]", help="Record that what was found on it counts no more.", show_default=False),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why it is cleared; needed for clear.", show_default=False)
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who decided.  [default: the user of this machine]")
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> int:
    """Show what the records say of a node, or record a decision about it.

    Exit codes: 0 clean (or cleared), 1 corrupting or suspected, 2 unknown.
    """
    from tandem.db.profiles import clear, load_node
    from tandem.nodes.as_json import to_json
    from tandem.nodes.tables import lines

    if action is None and (reason is not None or by is not None):
        raise UsageError(f"--reason and --by belong to a decision: `tandem node {name} clear --reason TEXT`")
    if action is NodeAction.CLEAR and not (reason or "").strip():
        raise UsageError(f"a decision needs a reason: `tandem node {name} clear --reason TEXT`")
    with database(db) as engine:
        if action is NodeAction.CLEAR:
            before = clear(engine, name, reason or "", by if by is not None else getpass.getuser())
        profile = load_node(engine, name)
    if json:
        emit_json(to_json(profile))
    else:
        if action is NodeAction.CLEAR:
            say(f"recorded: {formats.clean(name, 100)} is cleared; it was {before.verdict} before")
        for line in lines(profile):
            say(line)
    return EXIT_MATCH if action is NodeAction.CLEAR else NODE_EXITS[profile.verdict]
