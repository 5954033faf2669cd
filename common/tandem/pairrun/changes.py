"""What changed in a PairRun's status, as lines for people. Pure."""

from __future__ import annotations

from tandem import formats
from tandem.pairrun import names
from tandem.pairrun.status import AttemptStatus, PairRunStatus


def told(before: PairRunStatus | None, now: PairRunStatus) -> list[str]:
    """One line for each thing that people wait for and that changed.

    Args:
        before: the last status that was told of; None: nothing was.
        now: the status now.
    """
    old = before or PairRunStatus()
    lines = []
    if (line := _pairing(now)) and line != _pairing(old):
        lines.append(line)
    for attempt in now.attempts:
        known = next((a for a in old.attempts if a.number == attempt.number), None)
        if attempt.running_at and not (known and known.running_at):
            lines.append(f"attempt {attempt.number} runs")
        if attempt.ended_at and not (known and known.ended_at):
            lines.append(_ended(attempt))
    if now.step != old.step or now.counts != old.counts:
        lines.append(_progress(now))
    if now.first_mismatch is not None and old.first_mismatch is None:
        lines.append(_first(now))
    if (line := _records(now)) and line != _records(old):
        lines.append(line)
    return [formats.clean(line, 2000) for line in lines]


def _pairing(status: PairRunStatus) -> str:
    paired = status.condition(names.PAIRED)
    if paired is None:
        return ""
    if paired.status != "True":
        return f"no pair yet: {paired.message or paired.reason}"
    if status.suspect is None or status.reference is None:
        return ""
    sides = (("suspect", status.suspect), ("reference", status.reference))
    return ", ".join(f"{role} {node.node}" + (f" ({node.reason})" if node.reason else "") for role, node in sides)


def _ended(attempt: AttemptStatus) -> str:
    tail = f": {attempt.message}" if attempt.message else ""
    return f"attempt {attempt.number} ended: {attempt.reason}{tail}"


def _progress(status: PairRunStatus) -> str:
    counts = status.counts
    of = f"/{formats.count(status.steps)}" if status.steps is not None else ""
    parts = [f"step {formats.count(status.step)}{of}", f"elements {formats.short(counts.elements)}"]
    if counts.mismatched_sites or counts.other_findings:
        sites = formats.plural(counts.mismatched_sites, "site")
        parts.append(f"mismatching {formats.count(counts.mismatched_elements)} in {sites}")
        if counts.other_findings:
            parts.append(f"other findings {formats.count(counts.other_findings)}")
    else:
        parts.append("mismatching none")
    return " · ".join(parts)


def _first(status: PairRunStatus) -> str:
    first = status.first_mismatch
    assert first is not None
    amount = "" if first.mismatched is None else f", {formats.count(first.mismatched)} elements"
    return f"first mismatch: step {formats.count(first.step)} {first.site} rank {first.rank}{amount}"


def _records(status: PairRunStatus) -> str:
    """Only trouble is worth a line."""
    delivered = status.condition(names.RECORDS_DELIVERED)
    if delivered is None or delivered.status == "True" or not delivered.message:
        return ""
    return f"records: {delivered.message}"
