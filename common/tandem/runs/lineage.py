"""Which steps of several attempts are one course of training. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.records import ControlRecord, RunRecords
from tandem.vocabulary import ControlName


def resumed_at(controls: Iterable[ControlRecord]) -> dict[int, int]:
    """Attempt -> step of the checkpoint from which it went on; attempts that began anew are not in it: those that were
    not to resume, and those whose sides held no checkpoint in common (step 0).
    """
    resumed = (c for c in controls if c.name is ControlName.RESUMED and c.step)
    return {c.attempt: c.step for c in sorted(resumed, key=lambda c: c.step)}


def lineage(records: RunRecords) -> dict[int, int | None]:
    """Attempts whose steps make up the last course -> the last step that counts of each (None: all that it has).

    The last attempt always counts. Where it went on from a checkpoint of step k, the attempt before it counts up to k,
    and so on backwards; an attempt that began anew has nothing before it.
    """
    known = {a.attempt for a in records.attempts} | {s.attempt for s in records.steps}
    resumed = resumed_at(records.controls)
    out: dict[int, int | None] = {}
    limit: int | None = None
    for attempt in sorted(known, reverse=True):
        out[attempt] = limit
        if attempt not in resumed:
            break
        step = resumed[attempt]
        limit = step if limit is None else min(limit, step)
    return dict(sorted(out.items()))


def counts(course: dict[int, int | None], attempt: int, step: int) -> bool:
    """Whether a step of an attempt belongs to the course that `lineage` gave."""
    if attempt not in course:
        return False
    limit = course[attempt]
    return limit is None or step <= limit
