"""What the records say of one node, as one structure: the input of ``tandem node`` and of its report. Pure.

Statistics are of *counted* runs only: real, on two hosts, with the node as suspect and a verdict `match` or `mismatch`,
not older than the last decision that cleared the node; and of their conclusive attempts. All other real runs are listed
(`runs`) and enter no number.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from tandem.nodes.run_profile import TimelineBin
from tandem.nodes.verdict import NodeDecision, RunFacts
from tandem.runs.parts import Bound, MapRow
from tandem.statistics.drift import DriftLine
from tandem.statistics.frequency import Rate
from tandem.statistics.noise import Noise
from tandem.statistics.timing import Timing
from tandem.vocabulary import NodeVerdict

SHOWN = 100
"""Newest runs that pages for people list one by one; every number is of all that count, and ``--json`` has them all."""


@dataclass(frozen=True, slots=True)
class ClassProfile:
    """One site class (phase x module x tensor family) over all counted runs."""

    phase: str
    module: str
    family: str
    """``out`` and ``dx`` are the paper's frequency; every other family stands alone."""
    sites: int
    """Compared tensors: step x site x rank."""
    elements: int
    mismatched_sites: int
    mismatched_elements: int
    steps: int
    """Steps in which the class was compared."""
    affected_steps: int
    per_element: Rate | None
    """Mismatching / all elements, steps as clusters (``tandem.statistics.frequency``)."""
    per_step: Rate | None
    """Share of steps with a mismatch in this class; exact."""
    severity_mean: float | None
    """Mean of the finite non-zero relative differences, tensors weighted by their elements."""
    severity_median: float | None
    """Median of the tensors' medians, to within ``sketch.RELATIVE_ERROR``."""
    severity_max: float | None


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One of the node's accelerators."""

    name: str
    """Its UUID where the driver tells one, else what the worker calls it (``cuda:3``)."""
    rank: int | None
    """Tensor-parallel rank that ran on it, where it was the same in all counted runs."""
    hours: float
    """Compared on it, in counted runs."""
    mismatched_sites: int
    """Mismatching tensors of its rank, all causes."""
    mismatched_elements: int
    present: bool = True
    """False: it was replaced, as later runs of the node named other devices, as many as the node has."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """One real run with the node on either side, newest first in `NodeProfile.runs`."""

    facts: RunFacts
    """The run itself: id, kind, workload, model, other side, verdict, times, coverage, findings."""
    counted: bool
    """Whether it is in the statistics."""
    note: str
    """Why it is not counted, or what else must be known of it; empty otherwise."""
    timeline: tuple[TimelineBin, ...]
    """Mismatches over its steps, in at most ``run_profile.BINS`` bins; empty unless counted."""
    timing: Timing | None
    """Onset, gaps and bursts, all site classes together; None unless counted."""
    noise: Noise | None
    """Workload ``gradient``: noise-to-signal, WCNTS, frequency per leaf; None for other workloads."""
    drifts: tuple[DriftLine, ...]
    """Workloads ``training`` and ``finetune``: drift of each arm; empty for other workloads."""
    loss_spikes: dict[str, list[int]]
    """Arm -> steps at which a spike of its loss begins (``drift.loss_spikes``)."""


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Everything that the reading commands and the report show of a node."""

    node: str
    verdict: NodeVerdict
    rule: str
    """Stable name of the rule that decided (``tandem.nodes.verdict``)."""
    sentence: str
    """The verdict with its rule, for people, one line."""
    evidence: str
    """In a few words: ``rank 5, fwd/attn, 3e-3, transient, 2 references``; empty if nothing was found."""
    since: float | None
    """UTC seconds: when the last piece of what the verdict rests on was there; None for `unknown`."""
    missing: tuple[str, ...]
    """What is missing for the next, firmer verdict, in words, the first step first; empty if nothing is."""
    runs: tuple[RunLine, ...]
    """All real runs on two hosts with the node as suspect, newest first; of those with it as reference the ones that
    say something against it."""
    as_reference: int
    """Finished real runs on two hosts in which it was the reference."""
    counted_runs: int
    matches: int
    """Of the counted runs, those that matched."""
    references: tuple[str, ...]
    """Nodes that counted runs compared it with."""
    workloads: tuple[str, ...]
    """Of the counted runs."""
    steps: int
    """Compared in counted runs; step 0 (the initial parameters) is not counted."""
    affected_steps: int
    """Of them, those in which anything differed, for any cause."""
    per_step: Rate | None
    """Share of affected steps; exact, the primary rate; None if no step was compared."""
    sites: int
    """Compared tensors: step x site x rank."""
    elements: int
    device_hours: float
    mismatched_sites: int
    mismatched_elements: int
    bound: Bound | None
    """What is excluded; only if nothing was found in any counted run, and one was counted."""
    classes: tuple[ClassProfile, ...]
    """In the order of phases and modules."""
    devices: tuple[DeviceProfile, ...]
    """Every device that a counted run covered."""
    device_count: int
    """Devices that the node has, as far as its workers told; 0: unknown."""
    ranks: dict[int, tuple[int, int]]
    """Rank -> (mismatching tensors, elements), all causes."""
    layer_map: tuple[MapRow, ...]
    """Phase x module x family -> layer (-1: none) -> (mismatching tensors, elements)."""
    rank_map: tuple[MapRow, ...]
    """Phase x module x family -> rank -> (mismatching tensors, elements): with `devices` the map device x module."""
    bits: dict[int, list[int]]
    """Width of the element in bits -> how often each bit differed, least significant first."""
    severities: dict[int, int]
    """Bin of ``tandem.statistics.sketch`` -> tensors, by their median severity."""
    extents: dict[str, int]
    replays: dict[str, int]
    """Replay class -> mismatching tensors of cause ``compute``."""
    findings: dict[str, int]
    """Outside every frequency: ``state``, ``digest`` -> rows, ``self_replay`` -> programs that differed from
    themselves, ``unequal_answers`` -> answers whose scores differed."""
    nonfinite: int
    """Mismatching elements that are NaN or infinite on the node."""
    nullified: int
    """Mismatching elements that are zero on the node only."""
    zero_reference: int
    uncounted: int
    """Mismatching tensors that were never received."""
    timing: Timing
    """Of all counted attempts together."""
    wcnts: float | None
    """Largest noise-to-signal ratio of any counted step; infinite where one has no bound; None without gradient
    runs."""
    wcnts_run: UUID | None
    """The run that it is from."""
    leaves: dict[str, float]
    """Gradient leaf -> mismatching / compared elements, over counted gradient runs of the models and tp in which it
    ever differed."""
    drift_rate: float | None
    """Median over counted training runs of the growth of ln drift per step (suspect against reference)."""
    decisions: tuple[NodeDecision, ...]
    """By people, newest first."""
    not_checked: tuple[str, ...]
    """What must not be concluded, most important first."""

    @property
    def covered(self) -> int:
        """Of the devices that the node has now, those that a counted run covered."""
        return sum(d.present for d in self.devices)
