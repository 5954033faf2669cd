"""The parts of a run's summary, each computed from the records by one function. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from tandem.records import ControlRecord, FaultRecord, MismatchRecord, RunRecords, StepRecord
from tandem.sites import in_frequency
from tandem.statistics.bounds import CONFIDENCE, rate_bound, zero_bound
from tandem.vocabulary import Cause, ControlName, Module, Phase, Role

_PHASES = {p.value: i for i, p in enumerate(Phase)}
_MODULES = {m.value: i for i, m in enumerate(Module)}

BOTH = "pair"
"""Side of a control that is about both together."""

CONTROLS: tuple[tuple[ControlName, str], ...] = (
    (ControlName.PARITY, BOTH),
    (ControlName.KNOWN_REDUCTION, BOTH),
    (ControlName.SELF_REPLAY_START, Role.REFERENCE.value),
    (ControlName.SELF_REPLAY_START, Role.SUSPECT.value),
    (ControlName.POSITIVE_START, BOTH),
    (ControlName.POSITIVE_END, BOTH),
    (ControlName.SELF_REPLAY_END, Role.REFERENCE.value),
    (ControlName.SELF_REPLAY_END, Role.SUSPECT.value),
    (ControlName.REPLAY_REFERENCE, Role.REFERENCE.value),
    (ControlName.CLOSING, BOTH),
)
"""Controls that every conclusive run shows, in the order of the report."""

SELF_REPLAYS = (ControlName.SELF_REPLAY_START, ControlName.SELF_REPLAY_END)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one class of sites over the whole run."""

    phase: str
    module: str
    family: str
    """``out`` or ``dx`` count in the frequency; each other family stands alone."""
    sites: int
    """Compared tensors: step x site x rank."""
    elements: int
    mismatched_sites: int
    mismatched_elements: int
    severity_mean: float | None
    """Mean of the finite non-zero relative differences: the rows' means, weighted by `with_severity`."""
    severity_median: float | None
    """Median of the rows' medians."""
    severity_max: float | None

    @property
    def frequency(self) -> float | None:
        """Mismatching elements / all elements; None if nothing was compared."""
        return self.mismatched_elements / self.elements if self.elements else None


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step on the time axis; only what counts in the workload's table enters ``frequency``."""

    attempt: int
    step: int
    elements: int
    mismatched_elements: int
    mismatched_sites: int
    partial_elements: int
    partial_mismatched: int

    @property
    def frequency(self) -> float:
        return self.partial_mismatched / self.partial_elements if self.partial_elements else 0.0


@dataclass(frozen=True, slots=True)
class MapRow:
    """One line of the site x layer map, or of another map of sites."""

    phase: str
    module: str
    tensor: str
    """The tensor's family."""
    cells: dict[int, tuple[int, int]]
    """Layer (-1: none), or rank -> (mismatching tensors, mismatching elements)."""


@dataclass(frozen=True, slots=True)
class ControlLine:
    """One control on one side, over all attempts."""

    name: str
    role: str
    """``reference``, ``suspect``, or ``pair`` for a control of both together."""
    status: str
    """``ok``, ``failed`` or ``missing``."""
    records: int
    failed: int
    repeats: int
    """Least number of repeats of any record."""
    subjects: int
    failures: tuple[str, ...]
    """What the first failures were, in words; untrusted text."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What is excluded at `CONFIDENCE` when nothing was found: ``1 - (1 - c) ** (1 / n)`` per trial."""

    confidence: float
    steps: int
    per_step: float | None
    """Largest share of steps that may be corrupt."""
    device_hours: float
    per_device_hour: float | None
    """Largest rate of corrupting events per device-hour (Poisson: -ln(1 - c) / hours)."""
    elements: int
    per_element: float | None
    """Beside the others only: corruption comes in bursts, so elements are not independent."""


@dataclass(frozen=True, slots=True)
class FaultTruth:
    """The injector's log of a synthetic run beside what the comparison found."""

    records: int
    changed_elements: int
    by_level: dict[str, tuple[int, int]]
    """Level -> (records, elements whose bits really changed)."""
    output_sites: int
    """Step x site x rank that only output faults changed."""
    output_changed: int
    found_sites: int
    """Of `output_sites`, those with a mismatch row of cause ``compute``."""
    found_elements: int
    """Mismatching elements of those rows."""
    unequal: int
    """Of `output_sites`, those whose mismatch count differs from the log, the missed ones included."""
    unexplained_sites: int
    """Mismatch rows of cause ``compute`` whose step, site and rank the log does not name. Operand faults spread to
    their program's other outputs, so this is a sign of an error only if all faults act on outputs."""

    @property
    def exact(self) -> bool:
        """Whether every output fault was found with exactly the logged number of elements."""
        return self.unequal == 0


def row_order(row: MismatchRecord) -> tuple[int, int, int, int, str]:
    """Order in which "first" is meant: least step, site number, rank."""
    return (row.step, row.site, row.rank, row.attempt, row.tensor)


def bound(steps: int, hours: float, elements: int) -> Bound:
    """What a run that found nothing excludes at `CONFIDENCE`."""
    return Bound(
        confidence=CONFIDENCE,
        steps=steps,
        per_step=zero_bound(steps, CONFIDENCE) if steps else None,
        device_hours=hours,
        per_device_hour=rate_bound(hours, CONFIDENCE) if hours > 0 else None,
        elements=elements,
        per_element=zero_bound(elements, CONFIDENCE) if elements else None,
    )


def class_counts(steps: Iterable[StepRecord], rows: Iterable[MismatchRecord]) -> list[Counts]:
    totals: dict[str, tuple[int, int, int, int]] = {}
    for step in steps:
        for name, c in step.classes.items():
            a, b, d, e = totals.get(name, (0, 0, 0, 0))
            totals[name] = (a + c.sites, b + c.elements, d + c.mismatched_sites, e + c.mismatched_elements)
    by_class: dict[str, list[MismatchRecord]] = defaultdict(list)
    for row in rows:
        by_class[f"{row.phase}/{row.module}/{row.tensor.split('.', 1)[0]}"].append(row)
    out = []
    for name in sorted(totals, key=class_order):
        phase, module, family = [*name.split("/"), "", ""][:3]
        out.append(Counts(phase, module, family, *totals[name], *_severity(by_class[name])))
    return out


def class_order(name: str) -> tuple[int, int, str]:
    phase, module, family = [*name.split("/"), "", ""][:3]
    return _PHASES.get(phase, len(_PHASES)), _MODULES.get(module, len(_MODULES)), family


def _severity(rows: list[MismatchRecord]) -> tuple[float | None, float | None, float | None]:
    weighted = [(r.severity_mean, with_severity(r)) for r in rows if r.severity_mean is not None]
    weight = sum(w for _, w in weighted)
    mean = sum(m * (w / weight) for m, w in weighted) if weight else None
    medians = [r.severity_median for r in rows if r.severity_median is not None]
    largest = [r.severity_max for r in rows if r.severity_max is not None]
    return mean, median(medians) if medians else None, max(largest, default=None)


def with_severity(row: MismatchRecord) -> int:
    """Elements of a row that have a finite relative difference; at least 1 where a mean was stored.

    Exact unless an element is both NaN or infinite on the suspect and zero on the reference, which a row counts twice
    (then it is too small), or a healthy reference's value was not finite (then too large): a row does not store it.
    """
    return max(1, (row.mismatched or 0) - (row.zero_reference or 0) - (row.nonfinite or 0))


def device_hours(records: RunRecords) -> float:
    """From the closing records; an attempt without one counts its steps' wall time times the devices of the spec."""
    closed = {c.attempt: c.device_seconds for c in records.closings}
    tp = records.run.spec.get("tp")
    devices = tp if isinstance(tp, int) else 1
    seconds = sum(closed.values())
    seconds += sum(s.duration_s * devices for s in records.steps if s.attempt not in closed)
    return seconds / 3600


def point(step: StepRecord, workload: str) -> StepPoint:
    partial = [c for name, c in step.classes.items() if in_frequency(name.rsplit("/", 1)[-1], workload)]
    return StepPoint(
        attempt=step.attempt,
        step=step.step,
        elements=sum(c.elements for c in step.classes.values()),
        mismatched_elements=sum(c.mismatched_elements for c in step.classes.values()),
        mismatched_sites=sum(c.mismatched_sites for c in step.classes.values()),
        partial_elements=sum(c.elements for c in partial),
        partial_mismatched=sum(c.mismatched_elements for c in partial),
    )


def group(rows: Iterable[MismatchRecord], key: Callable[[MismatchRecord], int]) -> dict[int, tuple[int, int]]:
    out: dict[int, tuple[int, int]] = {}
    for row in rows:
        sites, elements = out.get(key(row), (0, 0))
        out[key(row)] = sites + 1, elements + (row.mismatched or 0)
    return dict(sorted(out.items()))


def bits(rows: Iterable[MismatchRecord]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for row in rows:
        if row.bits:
            total = out.setdefault(len(row.bits), [0] * len(row.bits))
            for i, n in enumerate(row.bits):
                total[i] += n
    return dict(sorted(out.items()))


def decade(severity: float) -> int:
    """floor(log10(severity)), by way of the decimal text so that no rounding of log10 moves a power of ten."""
    return int(f"{severity:.16e}".partition("e")[2]) if severity != float("inf") else 400


def site_map(
    rows: Iterable[MismatchRecord], column: Callable[[MismatchRecord], int] = lambda row: row.layer
) -> list[MapRow]:
    """Mismatches of all causes by site; ``column`` says what else they are told apart by."""
    grouped: dict[tuple[str, str, str], list[MismatchRecord]] = defaultdict(list)
    for row in rows:
        tensor = row.tensor if row.cause is Cause.STATE else row.tensor.split(".", 1)[0]
        grouped[row.phase.value, row.module.value, tensor].append(row)
    keys = sorted(grouped, key=lambda k: (*class_order(f"{k[0]}/{k[1]}/"), k[2]))
    return [MapRow(*key, group(grouped[key], column)) for key in keys]


def controls(records: RunRecords) -> list[ControlLine]:
    """Every expected control, recorded or not, then those that only some runs have (``transport``)."""
    grouped: dict[tuple[str, str], list[ControlRecord]] = defaultdict(list)
    sided = {name for name, side in CONTROLS if side != BOTH}
    for control in records.controls:
        grouped[control.name.value, control.role.value if control.name in sided else BOTH].append(control)
    expected = [(name.value, side) for name, side in CONTROLS]
    lines = [
        _control_line(name, side, grouped.get((name, side), []))
        for name, side in [*expected, *sorted(set(grouped) - set(expected))]
        if name != ControlName.CLOSING
    ]
    closed = len(records.closings)
    closing = ControlLine(ControlName.CLOSING.value, BOTH, "ok" if closed else "missing", closed, 0, 0, 0, ())
    return [*lines, closing]


def _control_line(name: str, side: str, found: list[ControlRecord]) -> ControlLine:
    failures = sorted((c for c in found if not c.ok), key=lambda c: (c.attempt, c.step, c.subject))
    return ControlLine(
        name=name,
        role=side,
        status="missing" if not found else "failed" if failures else "ok",
        records=len(found),
        failed=len(failures),
        repeats=min((c.repeats for c in found), default=0),
        subjects=len({c.subject for c in found}),
        failures=tuple(
            " ".join(filter(None, (f"step {c.step}", c.subject, *(f"{k}={v}" for k, v in c.detail.items()))))
            for c in failures[:5]
        ),
    )


def unlike_itself(records: RunRecords) -> int:
    """Programs in which the suspect differed from itself while the reference, as often repeated, did not."""
    steady = {
        (c.attempt, c.name, c.subject): c.repeats
        for c in records.controls
        if c.name in SELF_REPLAYS and c.role is Role.REFERENCE and c.ok
    }
    return sum(
        c.name in SELF_REPLAYS
        and c.role is Role.SUSPECT
        and not c.ok
        and steady.get((c.attempt, c.name, c.subject), 0) >= c.repeats
        for c in records.controls
    )


def fault_truth(faults: list[FaultRecord], rows: list[MismatchRecord]) -> FaultTruth:
    by_level: dict[str, tuple[int, int]] = {}
    outputs: dict[tuple[int, int, int, int], int] = {}
    mixed: set[tuple[int, int, int, int]] = set()
    for fault in faults:
        n, changed = by_level.get(fault.level, (0, 0))
        by_level[fault.level] = n + 1, changed + fault.changed
        key = (fault.attempt, fault.step, fault.site, fault.rank)
        if fault.level == "output":
            if fault.changed:
                outputs[key] = outputs.get(key, 0) + fault.changed
        else:
            mixed.add(key)
    found = {(r.attempt, r.step, r.site, r.rank): r.mismatched for r in rows}
    pure = {key: n for key, n in outputs.items() if key not in mixed}
    return FaultTruth(
        records=len(faults),
        changed_elements=sum(f.changed for f in faults),
        by_level=dict(sorted(by_level.items())),
        output_sites=len(pure),
        output_changed=sum(pure.values()),
        found_sites=sum(key in found for key in pure),
        found_elements=sum(found.get(key) or 0 for key in pure),
        unequal=sum(found.get(key) != n for key, n in pure.items()),
        unexplained_sites=sum(key not in outputs and key not in mixed for key in found),
    )
