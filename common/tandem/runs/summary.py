"""What a run's records say, as one structure: the input of ``show``, ``--json`` and the report. Pure.

Exact totals come from the step records, which are never capped; severity, bits, ranks, layers and the first mismatch
come from the mismatch rows, which may be (`RunSummary.capped`). Counts of several attempts are added. The verdict is
not made here: it is a column of the stored run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem import formats
from tandem.records import ControlRecord, MismatchRecord, RunRecords, RunRow
from tandem.runs import parts
from tandem.runs.attempt import devices_of_node, of_attempt, unequal_answers
from tandem.runs.drift import DriftSummary, summarise_drift
from tandem.runs.drift import not_measured as drift_not_measured
from tandem.runs.independent import independent
from tandem.runs.lineage import resumed_at
from tandem.runs.noise import NoiseSummary, summarise_noise
from tandem.runs.noise import not_measured as noise_not_measured
from tandem.runs.parts import Bound, ControlLine, Counts, FaultTruth, MapRow, StepPoint
from tandem.runs.rates import Rates, class_rates, overall, timing_of
from tandem.sites import in_frequency
from tandem.statistics.timing import Timing
from tandem.vocabulary import UNSYNCHRONISED, Arm, AttemptState, Cause, ReplayClass, Verdict, Workload

if TYPE_CHECKING:
    from tandem.answers import ArmResult

__all__ = ["Bound", "ControlLine", "Counts", "FaultTruth", "MapRow", "RunSummary", "StepPoint", "summarise"]


@dataclass(frozen=True)
class RunSummary:
    """Everything that the reading commands show of one run."""

    run: RunRow
    attempts: int
    attempts_closed: int
    fingerprint: str | None
    parity: dict[str, str]
    reference_host: str
    suspect_host: str
    steps: int
    """Steps compared, over all attempts; step 0 (the initial parameters) is not counted."""
    steps_asked: int | None
    sites: int
    elements: int
    mismatched_sites: int
    """Cause ``compute`` only, exact: with equal inputs, so that what follows from a difference is not among them."""
    mismatched_elements: int
    table: list[Counts]
    """One line per phase x module: per-rank partials (the paper's table), or gradient leaves; empty where no value is
    kept equal. All counts of classes, rates and times are of the steps that count (`tandem.runs.independent`)."""
    others: list[Counts]
    """Every other tensor family, a line each."""
    findings: dict[str, int]
    """Outside every frequency: cause other than ``compute`` -> rows, ``self_replay`` -> programs of the suspect that
    differed from themselves, ``unequal_answers`` -> answers of it whose scores differed."""
    uncounted: int
    """Mismatch rows whose tensor was never received."""
    first: MismatchRecord | None
    """Least (step, site number, rank) over all causes."""
    first_rows: list[MismatchRecord]
    """The ten first rows."""
    ranks: dict[int, tuple[int, int]]
    """Rank -> (mismatching tensors, elements)."""
    layers: dict[int, tuple[int, int]]
    replays: dict[str, int]
    """Replay class -> mismatch rows of cause ``compute``."""
    extents: dict[str, int]
    bits: dict[int, list[int]]
    """Width of the dtype in bits -> how often each bit differed, least significant first."""
    severities: dict[int, int]
    """floor(log10(median severity)) -> rows."""
    no_severity: int
    """Rows of cause ``compute`` in which no mismatching element has a finite non-zero relative difference."""
    nonfinite: int
    nullified: int
    zero_reference: int
    over_steps: list[StepPoint]
    site_map: list[MapRow]
    """Site x layer."""
    rank_map: list[MapRow]
    """Site x rank."""
    rates: dict[tuple[str, str], Rates]
    """(phase, module) of the paper's table -> frequency per step and per element with intervals."""
    overall: Rates
    """The same of all site classes together."""
    timing: Timing
    """When steps mismatched."""
    controls: list[ControlLine]
    devices: list[str]
    device_hours: float
    bound: Bound | None
    """Only of a run whose verdict is ``match``: an inconclusive run excludes nothing."""
    rows: int
    """Mismatch rows stored."""
    rows_total: int
    """Mismatch rows before the cap."""
    capped: bool
    link_bytes: int
    full_bytes: int
    busy_share: float | None
    """Share of the steps' wall time in which the reference did not wait for its peer."""
    duration_s: float
    noise: NoiseSummary | None
    """RQ2; only of workload ``gradient``."""
    drift: DriftSummary | None
    """RQ3; only of workloads ``training`` and ``finetune``."""
    answers: dict[int, list[ArmResult]]
    """Step -> the fine-tuning table after it (`tandem.answers`); empty for other workloads."""
    faults: FaultTruth | None
    """Only for a synthetic run."""
    not_checked: list[str]

    @property
    def found(self) -> bool:
        """Whether anything at all differed."""
        return bool(self.mismatched_sites or self.rows_total or self.findings)

    @property
    def headline(self) -> str:
        """The verdict sentence; for a run without a verdict, its state."""
        if self.run.sentence:
            return self.run.sentence
        if self.run.verdict is None:
            return f"{self.run.state}: no verdict yet" + (f" ({self.run.reason})" if self.run.reason else "")
        return f"{self.run.verdict}: {self.run.reason or 'no reason was stored'}"


def summarise(records: RunRecords) -> RunSummary:
    """Everything that is shown of a run, from its stored records; the order of the records does not matter."""
    workload = records.run.workload
    steps = sorted(records.steps, key=lambda s: (s.attempt, s.step))
    rows = sorted(records.mismatches, key=parts.row_order)
    compute = [row for row in rows if row.cause is Cause.COMPUTE]
    counted = independent(steps, workload, resumed_at(records.controls))
    lines = parts.class_counts(counted, compute)
    compared = [c for s in steps for c in s.classes.values()]
    mismatched_sites = sum(c.mismatched_sites for c in lines)
    elements = sum(c.elements for c in compared)
    real_steps = sum(s.step > 0 for s in steps)
    hours = parts.device_hours(records)
    rows_total = max(sum(s.rows for s in steps), len(rows))
    capped = any(c.capped for c in records.closings) or rows_total > len(rows)
    duration = sum(s.duration_s for s in steps)
    last = max(records.attempts, key=lambda a: a.attempt, default=None)
    findings = dict(Counter(row.cause.value for row in rows if row.cause is not Cause.COMPUTE))
    if unlike := parts.unlike_itself(records):
        findings["self_replay"] = unlike
    asked = records.attempts if records.evaluations else []
    if unequal := sum(len(unequal_answers(of_attempt(records, a))) for a in asked):
        findings["unequal_answers"] = unequal
    steps_asked = records.run.spec.get("steps")
    extents, severities = Counter[str](), Counter[int]()
    for row in compute:
        extents[row.extent.value if row.extent else "unknown"] += 1
        if row.severity_median:
            severities[parts.decade(row.severity_median)] += 1
    summary = RunSummary(
        run=records.run,
        attempts=len(records.attempts),
        attempts_closed=sum(a.state == AttemptState.CLOSED for a in records.attempts),
        fingerprint=last.fingerprint if last else None,
        parity=dict(last.parity) if last else {},
        reference_host=last.reference_host if last else "",
        suspect_host=last.suspect_host if last else "",
        steps=real_steps,
        steps_asked=steps_asked if isinstance(steps_asked, int) else None,
        sites=sum(c.sites for c in compared),
        elements=elements,
        mismatched_sites=mismatched_sites,
        mismatched_elements=sum(c.mismatched_elements for c in lines),
        table=[c for c in lines if in_frequency(c.family, workload)],
        others=[c for c in lines if not in_frequency(c.family, workload)],
        findings=findings,
        uncounted=sum(row.mismatched is None and row.cause is not Cause.DERIVED for row in rows),
        first=rows[0] if rows else None,
        first_rows=rows[:10],
        ranks=parts.group(rows, lambda row: row.rank),
        layers=parts.group(rows, lambda row: row.layer),
        replays={c.value: n for c in ReplayClass if (n := sum(row.replay is c for row in compute))},
        extents=dict(extents.most_common()),
        bits=parts.bits(compute),
        severities=dict(sorted(severities.items())),
        no_severity=sum(row.mismatched is not None and not row.severity_median for row in compute),
        nonfinite=sum(row.nonfinite or 0 for row in compute),
        nullified=sum(row.nullified or 0 for row in compute),
        zero_reference=sum(row.zero_reference or 0 for row in compute),
        over_steps=[parts.point(s, workload) for s in steps],
        site_map=parts.site_map(rows),
        rank_map=parts.site_map(rows, lambda row: row.rank),
        rates=class_rates(counted, workload),
        overall=overall(counted),
        timing=timing_of(counted),
        controls=parts.controls(records),
        devices=sorted({d for c in records.closings for d in c.devices}),
        device_hours=hours,
        bound=parts.bound(real_steps, hours, elements) if records.run.verdict == Verdict.MATCH else None,
        rows=len(rows),
        rows_total=rows_total,
        capped=capped,
        link_bytes=sum(s.link_bytes for s in steps),
        full_bytes=sum(s.full_bytes for s in steps),
        busy_share=sum(s.busy_s for s in steps) / duration if duration > 0 else None,
        duration_s=duration,
        noise=summarise_noise(records) if records.run.workload == Workload.GRADIENT else None,
        drift=summarise_drift(records) if records.run.workload in UNSYNCHRONISED else None,
        answers=_answers(records) if records.run.workload == Workload.FINETUNE else {},
        faults=parts.fault_truth(records.faults, compute) if records.run.synthetic else None,
        not_checked=[],
    )
    summary.not_checked.extend(_not_checked(summary, records))
    return summary


def _answers(records: RunRecords) -> dict[int, list[ArmResult]]:
    from tandem.answers import results, steps_evaluated  # the only part that needs numpy

    return {step: results(records.evaluations, step) for step in steps_evaluated(records.evaluations)}


def _not_answered(s: RunSummary) -> list[str]:
    if not s.answers:
        return ["What the training did to the answers: no held-out question was evaluated."]
    last = [r for r in s.answers[max(s.answers)] if not r.task]
    missing = sum(r.against.missing for r in last if r.against)
    out = [f"{formats.plural(missing, 'question')} that only one of two arms answered."] if missing else []
    if Arm.SUSPECT not in {r.arm for r in last}:
        out.append("The suspect's answers: it was not evaluated after the last step at which the reference was.")
    return [*out, "Other questions, prompts and seeds: the intervals are over these questions only."]


def _control_name(control: ControlLine) -> str:
    side = "" if control.role == parts.BOTH else f" ({control.role})"
    return control.name.replace("_", " ") + side


def _by_attempt(records: RunRecords) -> list[list[ControlRecord]]:
    return [[c for c in records.controls if c.attempt == a.attempt] for a in records.attempts]


def _not_checked(s: RunSummary, records: RunRecords) -> list[str]:
    """What a reader must not conclude from this run, most important first."""
    out = []
    missing = [_control_name(c) for c in s.controls if c.status == "missing"]
    if missing:
        out.append(f"Controls that were never recorded: {', '.join(missing)}.")
    if s.attempts > s.attempts_closed:
        open_ = s.attempts - s.attempts_closed
        out.append(f"{formats.plural(open_, 'attempt')} of {s.attempts} ended without a closing record.")
    reached = s.steps + (s.drift.started_from if s.drift is not None else 0)
    if s.steps_asked is not None and reached < s.steps_asked:
        out.append(f"Steps {reached + 1} to {s.steps_asked}: the run ended after {formats.plural(s.steps, 'step')}.")
    if s.uncounted:
        out.append(
            f"The extent of {formats.plural(s.uncounted, 'mismatch', 'mismatches')}: the tensor was never received."
        )
    if s.capped:
        out.append(
            f"Severity, bits, place and replay class of {s.rows_total - s.rows:,} of {s.rows_total:,} mismatch rows: "
            "the cap of rows per run was reached (the totals are exact)."
        )
    if unplayed := s.replays.get(ReplayClass.NOT_REPLAYED, 0):
        out.append(
            f"Whether {formats.plural(unplayed, 'mismatch', 'mismatches')} would repeat: outside the replay budget."
        )
    tp, has = records.run.spec.get("tp"), max((devices_of_node(c) for c in _by_attempt(records)), default=0)
    if s.devices and has > len(s.devices):
        out.append(f"{has - len(s.devices)} of the node's {has} devices: compared were {', '.join(s.devices)}.")
    elif isinstance(tp, int) and s.devices and len(s.devices) < tp:
        out.append(f"Devices other than {', '.join(s.devices)}.")
    if not s.devices:
        out.append("Which devices were covered: no closing record names them.")
    mode = records.run.spec.get("sync")
    if mode in ("digest", "optimistic"):
        out.append(
            "The bits of a tensor whose 64-bit digests are equal: a digest can collide (see the docs for its bound)."
        )
    if s.run.reference_node == s.run.suspect_node:
        out.append(
            "Another machine: both workers ran on this one and share its processor and memory, so a fault that meets "
            "both alike is not seen."
        )
    out.append(
        "Communication between nodes, other models, shapes, dtypes and executables, and other temperatures, clocks and "
        "loads than those of this run."
        + ("" if s.drift else " Keeping the sides in step can lower utilisation, and with it the rate of errors.")
    )
    if s.run.workload == Workload.SUBMODULE:
        out.append(
            "What corruption does to a gradient or to a whole training: backward programs take the reference's inputs "
            "and recompute their forward from them, so no error reaches a later site."
        )
    if s.run.workload == Workload.GRADIENT:
        out.append(
            "Which submodule computed wrongly: a wrong value inside the step spreads to nearly every gradient; the "
            "workload submodule tells them apart."
        )
    if s.noise is not None:
        out += noise_not_measured(s.noise, records.mismatches)
    if s.drift is not None:
        out += drift_not_measured(s.drift, asked=records.run.spec.get("baseline") is not None)
    if s.run.workload == Workload.FINETUNE:
        out += _not_answered(s)
    if s.run.verdict == Verdict.MATCH:
        out.append("Corruption that is rarer than the bound above: one clean run does not clear a node.")
    return out
