"""``tandem demo``: a healthy pair that must match, and a corrupting one whose every corrupted element must be found."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import DbOption, console, database_url, say
from tandem.errors import SetupError
from tandem.records import RunRecords
from tandem.spec import RunSpec
from tandem.vocabulary import EXIT_INCONCLUSIVE, EXIT_MATCH, Cause, Kind, Verdict

PROFILE = "demo.toml"


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each pair.")] = 20,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for the HTML reports.")] = None,
    db: DbOption = None,
) -> None:
    """Show Tandem on this machine: a null pair and a synthetic corrupting pair.

    Exits 0 only if the first matches and the second is found with exactly the injected counts.
    """
    from tandem.home import home
    from tandem.progress import closing_lines
    from tandem.report.page import write
    from tandem.report.run_page import render
    from tandem.runs.summary import summarise

    folder = output or home() / "reports"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"the folder {folder} cannot be made ({error.strerror}): choose another with -o") from None
    right = []
    with database_url(db) as url, resources.as_file(resources.files("tandem") / "fault_profiles" / PROFILE) as profile:
        halves = (
            ("1 of 2: a healthy pair", RunSpec(kind=Kind.NULL, steps=steps), Verdict.MATCH),
            ("2 of 2: a corrupting suspect (injected faults)", RunSpec(steps=steps, fault=profile), Verdict.MISMATCH),
        )
        for title, spec, expected in halves:
            records, stopped = _pair(title, spec, url)
            for line in closing_lines(summarise(records)):
                say(line)
            good = records.run.verdict == expected
            if spec.fault is not None:
                found, injected, equal = against_truth(records)
                say(f"injected truth: {injected:,} elements changed, {found:,} found; site by site "
                    f"{'equal' if equal else 'NOT EQUAL'}")  # fmt: skip
                good = good and equal and injected > 0
            say(f"report: {write(render(records), folder / f'{records.run.run_id}.html')}")
            say()
            right.append(good)
            if stopped:
                raise KeyboardInterrupt
    for (title, _, expected), good in zip(halves, right, strict=True):
        say(f"{'right' if good else 'WRONG'}  {title}: expected {expected}")
    raise typer.Exit(EXIT_MATCH if all(right) else EXIT_INCONCLUSIVE)


def against_truth(records: RunRecords) -> tuple[int, int, bool]:
    """(elements found, elements injected, whether they are equal site by site) for faults at sites' outputs."""
    found = {
        (m.attempt, m.step, m.site, m.rank): m.mismatched or 0 for m in records.mismatches if m.cause is Cause.COMPUTE
    }
    injected = {(t.attempt, t.step, t.site, t.rank): t.changed for t in records.faults if t.level == "output"}
    return sum(found.values()), sum(injected.values()), found == injected


def _pair(title: str, spec: RunSpec, url: str) -> tuple[RunRecords, bool]:
    """The pair's records, and whether Ctrl-C ended it early."""
    from tandem.progress import Progress
    from tandem.supervisor import Local, Stop, run_local

    stop = Stop()
    head = f"{title} · {spec.model} · TP {spec.tp} · {spec.sync}"
    with stop.on_interrupt(), Progress(console(stderr=True), head) as progress:
        return run_local(spec, Local(url=url, on_progress=progress.update), stop), stop.requests > 0
