"""``tandem show RUN``: what a run found, as tables."""

from __future__ import annotations

from tandem import formats
from tandem.cli.output import DbOption, JsonOption, RunArgument, database, emit_json, load, say
from tandem.runs.summary import RunSummary
from tandem.sites import COUNTED
from tandem.vocabulary import Workload


def show(run: RunArgument, db: DbOption = None, json: JsonOption = False) -> None:
    """Show what a run found, and what it did not check."""
    from tandem.runs.as_json import to_json
    from tandem.runs.summary import summarise

    with database(db) as engine:
        summary = summarise(load(engine, run))
    if json:
        emit_json(to_json(summary))
        return
    for line in lines(summary):
        say(line)


def lines(s: RunSummary) -> list[str]:
    """The whole page as text lines."""
    from tandem.runs import tables

    out = [formats.clean(s.headline, 2000), ""]
    out += _facts(s)
    for part in (tables.noise_lines(s), tables.drift_lines(s), tables.answer_lines(s)):
        out += ["", *part] if part else []
    if s.table or s.run.workload == Workload.SUBMODULE:
        out += ["", COUNTED.get(s.run.workload, ""), *tables.phase_module_table(s)]
    if other := tables.other_table(s):
        out += ["", "other tensors, outside the frequency", *other]
    if s.findings:
        out += ["", "findings outside every frequency: " + ", ".join(f"{k} {n:,}" for k, n in s.findings.items())]
    if bounds := tables.bound_lines(s):
        out += ["", *bounds]
    if faults := tables.fault_lines(s):
        out += ["", *faults]
    out += ["", *tables.control_table(s)]
    for control in s.controls:
        out += [f"  {control.name} ({control.role}) failed: {formats.clean(f)}" for f in control.failures]
    if s.first_rows:
        out += ["", "first mismatches"]
        for row in s.first_rows:
            amount = "tensor never received" if row.mismatched is None else f"{row.mismatched:,} of {row.elements:,}"
            out.append(f"  {tables.place(row)}: {amount}, {row.cause}, {row.replay.replace('_', ' ')}")
    out += ["", "not checked", *(f"  - {item}" for item in s.not_checked)]
    return out


def _facts(s: RunSummary) -> list[str]:
    asked = f" of {s.steps_asked:,}" if s.steps_asked is not None else ""
    facts = {
        "run": f"{s.run.run_id}{'  (synthetic: faults were injected)' if s.run.synthetic else ''}",
        "pair": f"suspect {formats.clean(s.run.suspect_node)}, reference {formats.clean(s.run.reference_node)}"
        f", kind {s.run.kind}",
        "workload": f"{s.run.workload}, model {formats.clean(s.run.model)}, tp {s.run.spec.get('tp', '-')},"
        f" sync {s.run.spec.get('sync', '-')}",
        "when": f"{formats.when(s.run.created_at)} to {formats.when(s.run.finished_at)}",
        "compared": f"{formats.plural(s.steps, 'step')}{asked}, {formats.short(s.sites)} tensors,"
        f" {formats.short(s.elements)} elements, {formats.device_hours(s.device_hours)} device-hours",
        "mismatching": f"{s.mismatched_sites:,} tensors, {s.mismatched_elements:,} elements",
    }
    if s.full_bytes:
        facts["link"] = f"{formats.size(s.link_bytes)}, {formats.percent(s.link_bytes / s.full_bytes)} of full exchange"
    if s.ranks:
        facts["ranks"] = ", ".join(f"{rank}: {n:,}" for rank, (n, _) in s.ranks.items()) + " (mismatching tensors)"
    if s.replays:
        facts["replays"] = ", ".join(f"{k.replace('_', ' ')} {n:,}" for k, n in s.replays.items())
    width = max(map(len, facts))
    return [f"{name.ljust(width)}  {value}" for name, value in facts.items()]
