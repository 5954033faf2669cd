"""``tandem verdict RUN``: a run's verdict and statistics, computed again from its stored records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem import formats
from tandem.cli.output import DbOption, JsonOption, RunArgument, database, emit_json, exit_code, load, note, say
from tandem.errors import SetupError

if TYPE_CHECKING:
    from tandem.nodes.run_profile import RunProfile


def verdict(run: RunArgument, db: DbOption = None, json: JsonOption = False) -> int:
    """Compute a run's verdict and statistics again from its records, and say whether they agree with what is stored."""
    from tandem.nodes.as_json import statistics_json
    from tandem.nodes.run_profile import profile_run
    from tandem.runs.verdict import decide

    with database(db) as engine:
        records = load(engine, run)
    stored = records.run
    if stored.records_dropped_at is not None:
        raise SetupError(
            f"the rows of run {stored.run_id} were dropped by retention: its verdict ({stored.verdict}) stands, "
            "and cannot be computed again"
        )
    decision = decide(records)
    summary = profile_run(records)
    agrees = stored.verdict is not None and (stored.verdict, stored.reason) == (decision.verdict, decision.reason)
    if json:
        emit_json(
            {
                "run": str(stored.run_id),
                "verdict": str(decision.verdict),
                "reason": decision.reason,
                "sentence": decision.sentence,
                "stored_verdict": stored.verdict,
                "stored_reason": stored.reason,
                "agrees": agrees,
                "attempts_counted": summary.attempts,
                "executables": summary.executables or None,
                "statistics": statistics_json(summary.detail),
            }
        )
        return exit_code(decision.verdict)
    say(formats.clean(decision.sentence, 2000))
    if stored.verdict is None:
        note("note: no verdict is stored yet: the run goes on")
    elif not agrees:
        note(
            f"note: stored is {stored.verdict} ({stored.reason}), by the rules and rows of "
            f"{formats.when(stored.finished_at)}"
        )
    for line in _lines(summary):
        say(line)
    return exit_code(decision.verdict)


def _lines(summary: RunProfile) -> list[str]:
    from tandem.nodes.tables import drift_words, interval, noise_words, timing_words
    from tandem.runs import tables
    from tandem.statistics.frequency import Sums, per_element, per_step

    d = summary.detail
    if not summary.attempts:
        return ["no statistics: the run has no conclusive attempt"]
    steps = per_step(Sums(clusters=d.timing.steps, affected=d.timing.affected))
    out = [
        "",
        f"affected steps  {d.timing.affected:,} of {d.timing.steps:,}, {interval(steps)} of all (exact)",
        f"time            {timing_words(d.timing)}",
    ]
    if d.noise is not None:
        out.append(f"gradient noise  {noise_words(d.noise)}")
    out += [f"drift           {drift_words(line)}" for line in d.drifts]
    out += [f"loss spikes     {arm}: steps {', '.join(map(str, at[:20]))}" for arm, at in d.loss_spikes.items()]
    rows = []
    for name, c in d.classes.items():
        element, step = per_element(c.sums), per_step(c.sums)
        rows.append(
            (
                name,
                formats.short(c.sums.elements),
                formats.count(c.sums.mismatched),
                "-" if element is None else formats.scientific(element.value),
                interval(element),
                f"{c.sums.affected:,} of {c.sums.clusters:,}",
                interval(step),
            )
        )
    header = ("site class", "elements", "bad", "per element", "interval", "bad steps", "per step")
    return [
        *out, "", "per element with steps as clusters, per step exact; intervals at 95 %", *tables.align(header, rows)
    ]  # fmt: skip
