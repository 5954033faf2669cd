"""``tandem assess --local``: the runs of an assessment on this machine, which say nothing of a node."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli.output import database_url, emit_json, note, say
from tandem.spec import RunSpec, validate
from tandem.vocabulary import EXIT_INCONCLUSIVE, EXIT_MATCH, EXIT_MISMATCH, Kind, Verdict

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from tandem.records import RunRecords
    from tandem.supervisor import Stop

LEAST_S = 60
"""With less time left no run is begun, unless it is shorter itself."""
RECENT_S = 86400.0
"""What ran to its end so lately need not run again."""
TOLD = "a rehearsal: both workers ran on this machine, so it says nothing of a node"


def rehearse(asked: dict[str, Any], length: float, deadline: float, db: str | None, *, json: bool) -> int:
    """The null control and each workload once, each with its page. Called again, it does what is left.

    Args:
        asked: fields of every run's spec.
        length: of each run, in seconds.
        deadline: no run begins after it, in seconds of the monotonic clock.
        db: the database; None: the embedded one.
        json: print one JSON object.

    Returns:
        The exit code, as of ``tandem run``.
    """
    from tandem.supervisor import Stop

    stop = Stop()
    with database_url(db) as url, stop.on_interrupt():
        done = [
            _done(validate(RunSpec, asked | {"kind": kind, "workload": workload, "duration": length}, "option"),
                  url, deadline, stop, quiet=json)
            for kind in (Kind.NULL, Kind.SUSPECT)
            for workload in ("submodule", "gradient")
        ]  # fmt: skip
    left = sum(each["verdict"] is None for each in done)
    if stop.requests:
        note(f"stopped, as asked, with {left} of {len(done)} runs not made: call it again to go on")
    if json:
        emit_json({"ended": TOLD, "runs": done})
    else:
        say(TOLD)
    verdicts = {each["verdict"] for each in done}
    if Verdict.MISMATCH in verdicts:
        return EXIT_MISMATCH
    return EXIT_MATCH if verdicts == {Verdict.MATCH} and not stop.requests else EXIT_INCONCLUSIVE


def _done(spec: RunSpec, url: str, deadline: float, stop: Stop, *, quiet: bool) -> dict[str, Any]:
    """One of the runs: made lately, made now, or left out."""
    from tandem.cli.run import execute
    from tandem.db.engine import connect
    from tandem.report import run_page
    from tandem.report.page import write

    line: dict[str, Any] = {"kind": str(spec.kind), "workload": str(spec.workload)}
    engine = connect(url)
    try:
        records = _earlier(engine, spec)
    finally:
        engine.dispose()
    if records is None:
        rest = deadline - time.monotonic()
        if stop.requests or rest < min(LEAST_S, spec.duration or 0.0):
            why = "stopped" if stop.requests else "the time is up"
            line |= {"run": None, "verdict": None, "sentence": f"not run: {why}", "report": None}
            if not quiet:
                say(f"{spec.kind} {spec.workload}: {line['sentence']}")
            return line
        records = execute(spec, url, stop=stop)
    run = records.run
    path = write(run_page.render(records), Path(f"tandem-{run.run_id}.html"))
    line |= {"run": str(run.run_id), "verdict": run.verdict, "sentence": run.sentence, "report": str(path)}
    if not quiet:
        say(f"{spec.kind} {spec.workload}: {run.sentence}")
        say(f"  report: {path}")
    return line


def _earlier(engine: Engine, spec: RunSpec) -> RunRecords | None:
    """The newest of the runs that count for this one (`counts`)."""
    from tandem.db.queries import list_runs, load_run
    from tandem.installed import here

    found = list_runs(engine, 200, workload=str(spec.workload), kind=str(spec.kind), synthetic=False, state="finished")
    for line in found:
        if line.run.spec == spec.model_dump(mode="json"):
            records = load_run(engine, line.run.run_id)
            if counts(records, spec, here(), time.time()):
                return records
    return None


def counts(records: RunRecords, spec: RunSpec, code: Mapping[str, str], now: float) -> bool:
    """Whether a stored run is as good as a new one: a conclusive run of the same spec, by this code and CPU
    (``installed.here``), that lately came to its own end: a stopped one has not run its length.
    """
    from tandem.installed import made_here

    run, last = records.run, records.attempts[-1] if records.attempts else None
    return (
        last is not None and last.reason == "completed" and made_here(last.parity, code)
        and run.created_at > now - RECENT_S and run.spec == spec.model_dump(mode="json")
        and run.verdict in (Verdict.MATCH, Verdict.MISMATCH)
    )  # fmt: skip
