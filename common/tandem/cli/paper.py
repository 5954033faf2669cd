"""``tandem paper``: the instrument check, published and measured values side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.output import DbOption, JsonOption, console, database_url, emit_json, note, say
from tandem.errors import TandemError, UsageError
from tandem.formats import plural
from tandem.vocabulary import EXIT_INCONCLUSIVE, EXIT_MATCH, EXIT_MISMATCH

if TYPE_CHECKING:
    from tandem.paper.check import Check
    from tandem.records import RunRecords
    from tandem.spec import RunSpec
    from tandem.supervisor import Stop

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
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Cut each run to so many steps; what they cannot show is left out.", show_default=False
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what an earlier call measured.")] = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Check the instrument: what Tandem reads back from faults of which it is known what they are.

    Runs the shipped profiles of the paper's nodes on this machine and puts published and measured values side by side.
    This is not a reproduction of the paper's hardware. Runs of an earlier call are used again, so a call that was
    interrupted goes on where it was.

    Exit codes: 0 all that was measured is read back, 1 something is not, or is not what the injector logged, 2 a run
    was inconclusive or could not be made.
    """
    from tandem.paper.check import CHECKS, paper

    names = list(dict.fromkeys(check.profile for check in CHECKS))
    if unknown := [name for name in profile or [] if name not in names]:
        raise UsageError(f"no check has the profile {unknown[0]!r}: choose from {', '.join(names)}")
    chosen = [check for check in CHECKS if not profile or check.profile in profile]
    done: dict[Check, RunRecords | str] = {
        check: why for check in chosen if (why := check.why_left_out(quick=quick, most=steps))
    }
    todo = [check for check in chosen if check not in done]
    with database_url(db) as url:
        done |= _measure_all({check: check.spec(quick=quick, most=steps) for check in todo}, url, fresh=fresh)
    found = paper({check: done[check] for check in chosen}, quick=quick, most=steps)
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
    raise typer.Exit(EXIT_MISMATCH if found.failed else EXIT_INCONCLUSIVE if failed else EXIT_MATCH)


def _usable(records: RunRecords | str) -> bool:
    from tandem.paper.check import unusable

    return not unusable(records)


def _measure_all(specs: Mapping[Check, RunSpec], url: str, *, fresh: bool) -> dict[Check, RunRecords | str]:
    """The records of each check, or why there are none.

    Raises:
        KeyboardInterrupt: a signal asked to stop. What was measured is stored.
    """
    from tandem.supervisor import Stop

    done: dict[Check, RunRecords | str] = {}
    stop = Stop()
    with stop.on_interrupt():
        for number, (check, spec) in enumerate(specs.items(), start=1):
            title = f"{number} of {len(specs)}: {check.profile} · {check.workload} · {plural(spec.steps or 0, 'step')}"
            done[check] = found = _measure(check, spec, title, url, stop, fresh=fresh)
            if stop.requests:
                cut = isinstance(found, str) or len(found.steps) <= (spec.steps or 0)
                note(f"{number - cut} of {plural(len(specs), 'check')} measured: the same command goes on from there")
                raise KeyboardInterrupt
    return done


def _measure(check: Check, spec: RunSpec, title: str, url: str, stop: Stop, *, fresh: bool) -> RunRecords | str:
    """The check's records, of an earlier run or a new one; or why there are none."""
    from tandem.faults.files import shipped_profile
    from tandem.progress import Progress
    from tandem.supervisor import Local, run_local

    if shipped_profile(Path(check.profile)) is None:
        raise UsageError(f"a file {check.profile!r} lies here and would be taken for the profile: use another folder")
    if not fresh and (earlier := _earlier(check, spec, url)) is not None:
        note(f"{title}: measured already, run {earlier.run.run_id}")
        return earlier
    try:
        with Progress(console(stderr=True), title) as progress:
            return run_local(spec, Local(url=url, on_progress=progress.update), stop)
    except TandemError as error:
        if not stop.requests:
            note(f"{title}: {error}")
        return str(error)


def _earlier(check: Check, spec: RunSpec, url: str) -> RunRecords | None:
    """A run of the same check by the same code on the same CPU, to its end; the newest."""
    from tandem.db.engine import connect
    from tandem.db.queries import list_runs, load_run
    from tandem.installed import here
    from tandem.paper.check import same

    engine = connect(url)
    try:
        for row in list_runs(engine, KEPT_RUNS, synthetic=True, state="finished", workload=str(check.workload)):
            if row.run.spec == spec.model_dump(mode="json") and row.steps == (spec.steps or 0) + 1:
                records = load_run(engine, row.run.run_id)
                if same(check, records, here()):
                    return records
        return None
    finally:
        engine.dispose()


def _json(found: object) -> object:
    import msgspec

    return msgspec.to_builtins(found)
