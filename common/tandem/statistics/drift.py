"""Training (RQ3): how fast parameters drift apart, when they first differ, and spikes of the loss. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from tandem.records import DriftRecord, StepRecord
from tandem.vocabulary import Arm

POINTS = 200
"""Points of a series from which slopes are taken; a longer one is thinned evenly, its ends kept."""
WINDOW = 64
LEAST_WINDOW = 8
DEVIATIONS = 6.0
FLOOR = 0.01


class DriftLine(msgspec.Struct, frozen=True, kw_only=True):
    """Drift of one arm from the reference over an attempt."""

    arm: str
    points: int
    """Steps with a drift that is known, finite and above 0."""
    first: int | None
    """First step with a drift above 0 (or not finite)."""
    last: int | None
    last_drift: float | None
    """||p_a - p_r|| at the last known point."""
    last_relative: float | None
    """The same / ||p_r||."""
    rate: float | None
    """Growth of ln drift per step (`log_slope`)."""
    nonfinite: int
    """Points that are NaN or infinite: the parameters of one side are."""


def best(records: Iterable[DriftRecord], arm: str, part: str = "") -> list[DriftRecord]:
    """The records of an arm's part, one a step in the order of steps: exact where there is one, else the sketch's."""
    chosen: dict[int, DriftRecord] = {}
    for r in records:
        if r.arm == arm and r.part == part and r.drift is not None:
            there = chosen.get(r.step)
            if there is None or (there.method != "exact" and r.method == "exact"):
                chosen[r.step] = r
    return [chosen[step] for step in sorted(chosen)]


def drift_lines(records: Sequence[DriftRecord]) -> list[DriftLine]:
    """A line for each arm that has any drift; the records of one attempt."""
    lines = []
    for arm in sorted({r.arm for r in records}):
        series = best(records, arm)
        odd = [r for r in series if not math.isfinite(r.drift or 0.0)]
        known = [(r.step, r.drift or 0.0, r.norm) for r in series if math.isfinite(r.drift or 0.0)]
        positive = [(step, value) for step, value, _ in known if value > 0]
        differing = [step for step, _ in positive] + [r.step for r in odd]
        last = known[-1] if known else None
        lines.append(
            DriftLine(
                arm=arm,
                points=len(positive),
                first=min(differing, default=None),
                last=last[0] if last else None,
                last_drift=last[1] if last else None,
                last_relative=_relative(last[1], last[2]) if last else None,
                rate=log_slope(positive),
                nonfinite=len(odd),
            )
        )
    return lines


def _relative(drift: float, norm: float | None) -> float | None:
    value = drift / norm if norm else math.inf
    return value if math.isfinite(value) else None


def log_slope(points: Sequence[tuple[int, float]]) -> float | None:
    """Growth of ln y per step: the median of the slopes of all pairs (Theil 1950, Sen 1968), which up to 29 % of wild
    points do not move.

    Args:
        points: (step, y > 0); thinned to `POINTS`.

    Returns:
        None for fewer than two steps.
    """
    thin = _thinned(sorted(points))
    logs = [(x, math.log(y)) for x, y in thin]
    slopes = [(b - a) / (v - u) for i, (u, a) in enumerate(logs) for v, b in logs[i + 1 :] if v != u]
    return median(slopes) if slopes else None


def loss_spikes(losses: Sequence[tuple[int, float | None]]) -> list[int]:
    """Steps at which a spike of the loss begins.

    Rule (Hampel's identifier over the past: Davies and Gather, JASA 88, 1993): a loss is out of line if it is not
    finite, or exceeds the median of the `WINDOW` losses before it that were in line by more than `DEVIATIONS` * 1.4826
    * their median absolute deviation, that product being at least `FLOOR` of the median. No step is judged before
    `LEAST_WINDOW` losses are there, unless it is not finite. Successive steps out of line are one spike.

    Args:
        losses: (step, loss) in the order of steps; None: not recorded.
    """
    past: list[float] = []
    begins: list[int] = []
    inside = False
    for step, loss in losses:
        if loss is None:
            continue
        out = not math.isfinite(loss)
        if not out and len(past) >= LEAST_WINDOW:
            window = past[-WINDOW:]
            centre = median(window)
            scale = 1.4826 * median(abs(x - centre) for x in window)
            out = loss - centre > max(DEVIATIONS * scale, FLOOR * abs(centre))
        if out and not inside:
            begins.append(step)
        inside = out
        if not out:
            past.append(loss)
    return begins


def spikes_of(steps: Iterable[StepRecord], drifts: Iterable[DriftRecord] = ()) -> dict[str, list[int]]:
    """Loss spikes by arm, of the steps of one attempt; arms without any are left out."""
    ordered = sorted(steps, key=lambda s: s.step)
    series: dict[str, list[tuple[int, float | None]]] = defaultdict(list)
    for s in ordered:
        series[Arm.REFERENCE].append((s.step, s.loss_reference))
        series[Arm.SUSPECT].append((s.step, s.loss_suspect))
    for d in best((r for r in drifts if r.loss is not None), Arm.BASELINE):
        series[Arm.BASELINE].append((d.step, d.loss))
    return {str(arm): begins for arm, line in series.items() if (begins := loss_spikes(line))}


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(points) <= POINTS:
        return list(points)
    return [points[round(i * (len(points) - 1) / (POINTS - 1))] for i in range(POINTS)]
