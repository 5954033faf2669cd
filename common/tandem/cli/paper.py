"""``tandem paper``: the instrument check, published and measured values side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.output import DbOption, JsonOption, console, database_url, emit_json, note, say
from tandem.errors import TandemError, UsageError
from tandem.vocabulary import EXIT_INCONCLUSIVE, EXIT_MATCH, EXIT_MISMATCH

if TYPE_CHECKING:
    from tandem.paper import Check
    from tandem.records import RunRecords

KEPT_RUNS = 500
"""Newest synthetic runs among which one of the same check is looked for."""


def paper(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the page as one HTML file; '-' is standard output."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="Only checks of this profile; may be repeated.  [default: all]", show_default=False),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short runs: minutes, but few fault events and no gradient noise.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what an earlier call measured.")] = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Check the instrument: what Tandem reads back from faults of which it is known what they are.

    Runs the shipped profiles of the paper's nodes on this machine and puts published and measured values side by side.
    This is not a reproduction of the paper's hardware. Runs of an earlier call are used again.

    Exit codes: 0 all that was measured is read back, 1 something is not, 2 a run was inconclusive or could not be made.
    """
    from tandem.paper import CHECKS, paper

    names = list(dict.fromkeys(check.profile for check in CHECKS))
    if unknown := [name for name in profile or [] if name not in names]:
        raise UsageError(f"no check has the profile {unknown[0]!r}: choose from {', '.join(names)}")
    chosen = [check for check in CHECKS if not profile or check.profile in profile]
    todo = [check for check in chosen if check.quick or not quick]
    done: dict[Check, RunRecords | str] = {
        check: "left out of the quick check" for check in chosen if check not in todo
    }
    with database_url(db) as url:
        for number, check in enumerate(todo, start=1):
            done[check] = _measure(check, f"{number} of {len(todo)}", url, quick=quick, fresh=fresh)
    found = paper({check: done[check] for check in chosen}, quick=quick)
    if json:
        emit_json(_json(found))
    elif output == Path("-"):
        from tandem.report.paper import render

        say(render(found))
    else:
        from tandem.report.paper import text_lines

        for line in text_lines(found):
            say(line)
    if output is not None and output != Path("-"):
        from tandem.report.page import write
        from tandem.report.paper import render

        note(f"page: {write(render(found), output)}")
    failed = [check for check in todo if not _usable(done[check])]
    raise typer.Exit(EXIT_MISMATCH if found.missed else EXIT_INCONCLUSIVE if failed else EXIT_MATCH)


def _usable(records: RunRecords | str) -> bool:
    from tandem.paper import unusable

    return not unusable(records)


def _measure(check: Check, place: str, url: str, *, quick: bool, fresh: bool) -> RunRecords | str:
    """The check's records, of an earlier run or a new one; or why there are none."""
    from tandem.fault_files import shipped_profile
    from tandem.progress import Progress
    from tandem.supervisor import Local, Stop, run_local

    spec = check.spec(quick=quick)
    title = f"{place}: {check.profile} · {check.workload} · {formats_steps(spec.steps)}"
    if shipped_profile(Path(check.profile)) is None:
        raise UsageError(f"a file {check.profile!r} lies here and would be taken for the profile: use another folder")
    if not fresh and (earlier := _earlier(check, url, quick=quick)) is not None:
        note(f"{title}: measured already, run {earlier.run.run_id}")
        return earlier
    stop = Stop()
    try:
        with stop.on_interrupt(), Progress(console(stderr=True), title) as progress:
            records = run_local(spec, Local(url=url, on_progress=progress.update), stop)
    except TandemError as error:
        if stop.requests:
            raise KeyboardInterrupt from None
        note(f"{title}: {error}")
        return str(error)
    if stop.requests:
        raise KeyboardInterrupt
    return records


def formats_steps(steps: int | None) -> str:
    """``1,500 steps``."""
    from tandem.formats import plural

    return plural(steps or 0, "step")


def _earlier(check: Check, url: str, *, quick: bool) -> RunRecords | None:
    """A run of the same check by the same Tandem, to its end; the newest."""
    from tandem.db.engine import connect
    from tandem.db.queries import list_runs, load_run
    from tandem.paper import same

    spec = check.spec(quick=quick)
    engine = connect(url)
    try:
        for row in list_runs(engine, KEPT_RUNS, synthetic=True, state="finished", workload=str(check.workload)):
            if row.run.spec == spec.model_dump(mode="json") and row.steps == (spec.steps or 0) + 1:
                records = load_run(engine, row.run.run_id)
                if same(check, records):
                    return records
        return None
    finally:
        engine.dispose()


def _json(found: object) -> object:
    import msgspec

    return msgspec.to_builtins(found)
