"""The instrument check: what Tandem reads back from fault profiles of which it is known what they hold. Pure.

It says that Tandem measures what is there. It is no reproduction of the paper's hardware, models or data: the profiles
were made from the published values (``common/tandem/fault_profiles/node-*.toml`` says which of their own are fitted).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem import formats
from tandem.faults.files import load_profile
from tandem.installed import made_here
from tandem.paper import published
from tandem.paper.events import CONFIDENCE, ENOUGH_EVENTS, Column, of_run
from tandem.records import RunRecords
from tandem.runs.summary import summarise
from tandem.spec import RunSpec
from tandem.statistics import noise
from tandem.statistics.drift import best, spikes_of
from tandem.vocabulary import Arm, Verdict, Workload

LABEL = (
    "Instrument check: Tandem reads back what is known to be there; not a reproduction of the hardware. "
    "The faults are injected by profiles that were made from the published values."
)

NOT_EQUAL = "NOT EQUAL"

# -- what is run and what is read from it --------------------------------------------------------------


class Check(NamedTuple):
    """One run of the instrument check: a shipped profile on the preset ``tiny``."""

    profile: str
    workload: Workload
    steps: int
    quick: int
    """Steps with ``--quick``; 0: left out then."""
    batch: int | None = None
    """Sequences per step where the preset's own would show too few elements."""
    least: int = 1
    """Steps below which nothing of it can be seen."""

    def length(self, *, quick: bool, most: int | None = None) -> int:
        """Steps of its run, of at most ``most``; 0: it is left out."""
        steps = min(self.quick if quick else self.steps, most or self.steps)
        return steps if steps >= self.least else 0

    def why_left_out(self, *, quick: bool, most: int | None = None) -> str:
        """Why it is left out; empty if it is not."""
        if self.length(quick=quick, most=most):
            return ""
        return "left out of the quick check" if quick and not self.quick else f"it takes {self.least} steps or more"

    def spec(self, *, quick: bool, most: int | None = None) -> RunSpec:
        """What `tandem run` would be asked for; replays are of no interest here."""
        return RunSpec(
            workload=self.workload, steps=self.length(quick=quick, most=most), batch=self.batch,
            fault=Path(self.profile), self_replays=2, replays=1, replay_budget=0,
        )  # fmt: skip


CHECKS = (
    Check("node-1", Workload.SUBMODULE, 1900, 150, batch=16),
    Check("node-2", Workload.SUBMODULE, 200, 20),
    Check("node-3", Workload.SUBMODULE, 200, 20),
    Check("node-10", Workload.SUBMODULE, 1500, 150),
    Check("node-11", Workload.SUBMODULE, 1500, 150),
    Check("node-6", Workload.SUBMODULE, 60, 42, least=42),
    Check("node-13", Workload.SUBMODULE, 470, 0, least=470),
    Check("node-6", Workload.TRAINING, 60, 50, least=50),
    Check("node-13", Workload.TRAINING, 470, 0, least=470),
    Check("node-1", Workload.GRADIENT, 200, 0),
    Check("node-4", Workload.GRADIENT, 200, 0),
    Check("node-11", Workload.GRADIENT, 200, 0),
)
WCNTS_TOLERANCE = 0.25
"""Relative difference at which a fitted WCNTS still counts as read back: a maximum over few spikes has no interval, and
another processor's rounding leads to other parameters after a hundred steps."""
ONSET, ONSET_TOLERANCE = 450, 25
"""Step at which node 13 begins; published as "about"."""
SEVERITY = 1e12
"""Order of the largest severities; published as "about"."""
SPIKE = range(40, 48)
"""Steps at which node 6's profile acts: that its training has a spike is published, where is not."""
NOT_MEASURED = (
    ("node 13", "how fast its parameters drift", "no number is published"),
    ("most nodes", "drift rate that is alike, loss curves that stay nearly equal", "no number is published"),
)
"""Published, and not read back here."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One published value beside what was measured."""

    node: str
    quantity: str
    published: float
    published_text: str
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    """Of the interval at `CONFIDENCE`; None where the quantity has none."""
    events: int | None = None
    steps: int = 0
    elements: int = 0
    fitted: bool
    """Whether the profile was fitted to this very value."""
    status: str
    """``read back``, ``too few events`` (the interval holds the value, but rests on fewer than `ENOUGH_EVENTS`; or the
    run is shorter than the one that a largest value was fitted on), ``missed`` or ``not measured``."""
    why: str = ""
    """How it was judged, or why it was not measured."""
    run: str = ""


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """A run behind the lines."""

    run: str
    profile: str
    workload: str
    steps: int
    verdict: str | None
    sentence: str
    duration_s: float
    truth: str
    """Whether the elements found are those that the injector's own log names."""


class Paper(msgspec.Struct, frozen=True, kw_only=True):
    """The instrument check as a whole."""

    label: str = LABEL
    quick: bool
    most: int | None = None
    """Steps that each run was cut to, where it was."""
    lines: list[Line]
    runs: list[Ran]
    confidence: float = CONFIDENCE
    enough_events: int = ENOUGH_EVENTS

    @property
    def measured(self) -> list[Line]:
        """What was measured."""
        return [line for line in self.lines if line.status != "not measured"]

    @property
    def missed(self) -> list[Line]:
        """What was measured and is not what was known to be there."""
        return [line for line in self.lines if line.status == "missed"]

    @property
    def unequal(self) -> list[Ran]:
        """Conclusive runs that found other elements than the injector's log names."""
        return [r for r in self.runs if r.truth == NOT_EQUAL and r.verdict in (Verdict.MATCH, Verdict.MISMATCH)]

    @property
    def failed(self) -> bool:
        """Whether anything that was measured is not what was there."""
        return bool(self.missed or self.unequal)


def paper(done: Mapping[Check, RunRecords | str], *, quick: bool, most: int | None = None) -> Paper:
    """Published and measured values side by side.

    Args:
        done: each check's records, or why there are none.
        quick: whether the runs were the short ones.
        most: steps that each run was cut to.
    """
    lines: list[Line] = []
    worst: list[Line] = []
    for check, records in done.items():
        node = check.profile.replace("-", " ")
        if check.workload is Workload.TRAINING:
            lines += _training(node, records)
        elif check.workload is Workload.GRADIENT:
            worst += _gradient(node, records, check.steps)
            lines += worst[-1:]
        else:
            lines += _submodule(node, records)
    if any(check.workload is Workload.GRADIENT for check in done):
        lines.append(_order(worst))
    lines += _answers()
    lines += [_not(node, what, 0.0, "see the paper", why) for node, what, why in NOT_MEASURED]
    runs = [_ran(check, records) for check, records in done.items() if not isinstance(records, str)]
    return Paper(quick=quick, most=most, lines=lines, runs=runs)


def _ran(check: Check, records: RunRecords) -> Ran:
    summary = summarise(records)
    truth = "faults inside submodules and steps spread: not comparable element by element"
    if summary.faults is not None and check.workload is Workload.SUBMODULE and not operands(records):
        equal = summary.faults.exact and not summary.faults.unexplained_sites
        truth = "equal, site by site" if equal else NOT_EQUAL
        if summary.capped:
            truth = "the cap of rows was reached: not comparable site by site"
    return Ran(
        run=str(records.run.run_id), profile=check.profile, workload=check.workload, steps=summary.steps,
        verdict=records.run.verdict, sentence=records.run.sentence, duration_s=summary.duration_s, truth=truth,
    )  # fmt: skip


def operands(records: RunRecords) -> bool:
    """Whether any fault acted inside a submodule."""
    return any(t.level != "output" for t in records.faults)


def _submodule(node: str, records: RunRecords | str) -> list[Line]:
    known = {n.name: n for n in published.NODES}.get(node)
    lines = []
    for column in published.COLUMNS if known else ():
        value = known.frequency[column] if known else None
        if value is not None:
            lines.append(_frequency(node, column, value, records))
    if node == "node 6":
        lines.append(_severity(node, records))
    if node == "node 13":
        lines.append(_onset(node, records))
    return lines


def unusable(records: RunRecords | str) -> str:
    """Why a run's numbers count for nothing; empty if they count."""
    if isinstance(records, str):
        return records
    if records.run.verdict not in (Verdict.MATCH, Verdict.MISMATCH):
        return f"its run is {records.run.verdict or 'not finished'}: {records.run.reason}"
    return ""


def _not(node: str, quantity: str, value: float, text: str, why: str, fitted: bool = False) -> Line:
    return Line(
        node=node, quantity=quantity, published=value, published_text=text, fitted=fitted, status="not measured",
        why=why,
    )  # fmt: skip


def _frequency(node: str, column: Column, value: float, records: RunRecords | str) -> Line:
    quantity = f"mismatch frequency {column[0]}/{column[1]}"
    text = formats.scientific(value) if value else "none seen"
    why = unusable(records)
    m = None if isinstance(records, str) or why else of_run(records).get(column)
    if m is None or isinstance(records, str):
        return _not(node, quantity, value, text, why or "nothing was compared", fitted=value > 0)
    if value == 0:
        right, how = m.mismatched == 0, f"0 of {m.elements:,} elements"
    else:
        right = m.holds(value)
        how = f"{m.mismatched:,} of {m.elements:,} elements in {formats.plural(m.events, 'event')}"
    status = "read back" if right else "missed"
    if right and value and m.events < ENOUGH_EVENTS:
        status = "too few events"
    return Line(
        node=node, quantity=quantity, published=value, published_text=text, measured=m.frequency, low=m.low,
        high=m.high, events=m.events, steps=m.steps, elements=m.elements, fitted=value > 0, status=status, why=how,
        run=str(records.run.run_id),
    )  # fmt: skip


def _onset(node: str, records: RunRecords | str) -> Line:
    quantity, text = "first step with corruption", f"about {ONSET}"
    if (why := unusable(records)) or isinstance(records, str):
        return _not(node, quantity, ONSET, text, why)
    first = min((m.step for m in records.mismatches), default=None)
    right = first is not None and abs(first - ONSET) <= ONSET_TOLERANCE
    return Line(
        node=node, quantity=quantity, published=ONSET, published_text=text, measured=first, fitted=False,
        steps=_steps(records), status="read back" if right else "missed",
        why=f"within {ONSET_TOLERANCE} steps: the onset is in the profile as published", run=str(records.run.run_id),
    )  # fmt: skip


def _severity(node: str, records: RunRecords | str) -> Line:
    quantity, text = "largest severity of an element", "about 1e12 (on a node that is not named)"
    if (why := unusable(records)) or isinstance(records, str):
        return _not(node, quantity, SEVERITY, text, why)
    most = max((m.severity_max for m in records.mismatches if m.severity_max is not None), default=None)
    right = most is not None and SEVERITY / 10 <= most <= SEVERITY * 10
    return Line(
        node=node, quantity=quantity, published=SEVERITY, published_text=text, measured=most, fitted=False,
        steps=_steps(records), status="read back" if right else "missed",
        why="within a factor of 10: the size is in the profile as published", run=str(records.run.run_id),
    )  # fmt: skip


def _training(node: str, records: RunRecords | str) -> list[Line]:
    """What a training without synchronisation shows of a node."""
    return [_loss_spike(node, records)] if node == "node 6" else [_divergence(node, records)]


def _loss_spike(node: str, records: RunRecords | str) -> Line:
    quantity, text = "first step of the loss spike in training", "a spike that wrecks the weights, no step"
    if (why := unusable(records)) or isinstance(records, str):
        return _not(node, quantity, 0.0, text, why)
    spikes = spikes_of(s for s in records.steps if s.step > 0)
    begins = spikes.get(Arm.SUSPECT, [])
    first = begins[0] if begins else None
    # The loss of a step is that of the parameters before it.
    right = first is not None and SPIKE.start < first <= SPIKE.stop and Arm.REFERENCE not in spikes
    far = max((d.drift / d.norm for d in best(records.drifts, Arm.SUSPECT) if d.drift and d.norm), default=0.0)
    return Line(
        node=node, quantity=quantity, published=0.0, published_text=text, measured=first, fitted=False,
        steps=_steps(records), status="read back" if right else "missed", run=str(records.run.run_id),
        why=f"the profile acts at steps {SPIKE.start} to {SPIKE.stop - 1} (ours); then drift / norm {far:.2g}, and the "
        f"reference has {'a spike too' if Arm.REFERENCE in spikes else 'no spike'}",
    )  # fmt: skip


def _divergence(node: str, records: RunRecords | str) -> Line:
    quantity, text = "first step of drift in training", f"about {ONSET}"
    if (why := unusable(records)) or isinstance(records, str):
        return _not(node, quantity, ONSET, text, why)
    drifts = best(records.drifts, Arm.SUSPECT)
    first = min((d.step for d in drifts if d.drift), default=None)
    right = first is not None and abs(first - ONSET) <= ONSET_TOLERANCE
    last = next((d.drift / d.norm for d in reversed(drifts) if d.drift and d.norm), 0.0)
    return Line(
        node=node, quantity=quantity, published=ONSET, published_text=text, measured=first, fitted=False,
        steps=_steps(records), status="read back" if right else "missed", run=str(records.run.run_id),
        why=f"within {ONSET_TOLERANCE} steps: the onset is in the profile as published; drift / norm {last:.2g} at the "
        "end",
    )  # fmt: skip


def _answers() -> list[Line]:
    """Accuracy and disagreement of the fine-tuned models, which no profile was made from."""
    why = "a large model on its own questions: `tandem run --workload finetune` makes this table of yours"
    lines = []
    for run in published.ANSWERS:
        for quantity, values in (("accuracy", run.accuracy), ("disagreement with the healthy run", run.disagreement)):
            lines += [
                _not(run.name, f"fine-tuning {quantity} on {task}", value, f"{value:.2f} %", why)
                for task, value in (values or {}).items()
            ]
    return lines


def _gradient(node: str, records: RunRecords | str, fitted_on: int) -> list[Line]:
    """The line of a run's WCNTS, for a profile that was fitted on so many steps: fewer can only show a smaller one."""
    value = published.WCNTS[node]
    quantity = "WCNTS"
    if (why := unusable(records)) or isinstance(records, str):
        return [_not(node, quantity, value, f"{value:g}", why, fitted=True)]
    found = noise.noise(records.gradients, _steps(records))
    apart = math.inf if found.wcnts is None else found.wcnts / value - 1
    right, short = abs(apart) <= WCNTS_TOLERANCE, found.steps < fitted_on
    why = f"largest of {found.noisy} noisy steps of {found.steps}, so without an interval"
    if short and apart <= WCNTS_TOLERANCE:
        status, why = "too few events", f"{why}; fitted on {fitted_on} steps"
    else:
        status, why = "read back" if right else "missed", f"within {WCNTS_TOLERANCE:.0%}; {why}"
    return [
        Line(
            node=node, quantity=quantity, published=value, published_text=f"{value:g}", measured=found.wcnts,
            steps=found.steps, fitted=True, status=status, run=str(records.run.run_id), why=why,
        )
    ]  # fmt: skip


def same(check: Check, records: RunRecords, now: Mapping[str, str]) -> bool:
    """Whether a stored run of the check's spec counts for it: of this code and CPU (``installed.here``), of the same
    profile, conclusive.
    """
    parity = records.attempts[-1].parity if records.attempts else {}
    digest = load_profile(Path(check.profile)).digest
    return not unusable(records) and made_here(parity, now) and parity.get("faults") == digest


def _order(lines: Sequence[Line]) -> Line:
    names = ("node 11", "node 1", "node 4")
    quantity, text = "order of the WCNTS", "node 11 > node 1 > node 4"
    worst = {line.node: line.measured for line in lines if line.measured is not None}
    missing = [name for name in names if name not in worst]
    if missing:
        return _not("nodes 11, 1, 4", quantity, 0.0, text, f"no WCNTS of {', '.join(missing)}", fitted=True)
    status = "read back" if worst["node 11"] > worst["node 1"] > worst["node 4"] else "missed"
    if any(line.status == "too few events" for line in lines):
        status = "too few events"
    return Line(
        node="nodes 11, 1, 4", quantity=quantity, published=0.0, published_text=text, fitted=True, status=status,
        why=", ".join(f"{n}: {worst[n]:.3f}" for n in names),
    )  # fmt: skip


def _steps(records: RunRecords) -> int:
    last = max((s.attempt for s in records.steps), default=0)
    return sum(s.attempt == last and s.step > 0 for s in records.steps)
