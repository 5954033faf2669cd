"""What pages show, from what the REST API answers: order of lines, words, numbers with their units. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem import formats

SIGNS = {
    "corrupting": "✗", "suspected": "!", "clean": "✓", "unknown": "?",
    "mismatch": "✗", "match": "✓", "inconclusive": "?", "failed": "✗",
}  # fmt: skip
"""Beside a verdict's word, never alone."""
CLASSES = {
    "corrupting": "mismatch", "suspected": "inconclusive", "clean": "match", "unknown": "none",
    "mismatch": "mismatch", "match": "match", "inconclusive": "inconclusive", "failed": "mismatch",
}  # fmt: skip
"""Verdict -> class of the reports' style sheet."""
SORTS = {"urgency": "what needs a person first", "node": "name", "since": "longest in its verdict", "last": "last run"}
PAGE = 200
"""Nodes on one page."""


def sign(verdict: str | None) -> str:
    return SIGNS.get(verdict or "", "…")


def style(verdict: str | None) -> str:
    return CLASSES.get(verdict or "", "none")


def sorted_fleet(lines: Sequence[Mapping[str, Any]], sort: str) -> list[Mapping[str, Any]]:
    """Lines in the order that was asked for; they come by urgency."""
    match sort:
        case "node":
            return sorted(lines, key=lambda line: line["node"])
        case "since":
            return sorted(lines, key=lambda line: (line["since"] is None, line["since"] or 0.0, line["node"]))
        case "last":
            return sorted(lines, key=lambda line: (-(line["last_run_at"] or 0.0), line["node"]))
    return list(lines)


def evidence(line: Mapping[str, Any]) -> str:
    """What was found; for a clean node the bound that it proves."""
    if line["evidence"]:
        return str(line["evidence"])
    sentence = str(line["sentence"])
    return sentence.removeprefix(f"{line['verdict']}: ")


@dataclass(frozen=True, slots=True)
class Now:
    """How a run stands."""

    verdict: str | None
    over: bool
    headline: str
    reason: str
    facts: list[tuple[str, str, str]]
    """(number, what it counts, more) of the strip."""
    lines: list[tuple[str, str]]
    """(name, text) below it."""
    title: str
    synthetic: bool
    place: str | None
    """Of the last event that is contained in it; None: begin anew."""


def now(answer: Mapping[str, Any], at: float) -> Now:
    """A run as it stands.

    Args:
        answer: as ``GET /v1/runs/{id}`` has it; ``stored`` may be missing while the database is away.
        at: UTC seconds.
    """
    stored, launch = answer.get("stored"), answer.get("launch")
    head = stored or launch or {}
    told = (launch or {}).get("progress") or {}
    done = (stored or {}).get("progress") or {}
    spec = head.get("spec") or {}
    state = str(answer["state"])
    verdict = (stored or {}).get("verdict") or ("failed" if state == "failed" else None)
    over = state in ("finished", "failed")
    return Now(
        verdict=verdict,
        over=over,
        headline=_headline(state, stored, launch, told, done, spec),
        reason=_reason(stored, launch),
        facts=_facts(stored, done, told, at, over, _asked(spec)),
        lines=_lines(done, told, launch, over),
        title=_title(head, spec, stored),
        synthetic=bool(head.get("synthetic")),
        place=_place(done),
    )


def _headline(
    state: str, stored: Any, launch: Any, told: Mapping[str, Any], done: Mapping[str, Any], spec: Mapping[str, Any]
) -> str:
    if stored and stored.get("verdict"):
        return str(stored["sentence"] or stored["verdict"])
    if state == "failed":
        return f"not run: {launch['message'] or launch['reason']}" if launch else "not run"
    if state == "pending":
        return f"waiting: {launch['message'] or launch['reason'] or 'its turn comes'}" if launch else "waiting"
    step = max(done.get("step") or 0, told.get("step") or 0)
    of = _asked(spec)
    where = f"step {step:,}" + (f" of {of:,}" if of else "") if step else str(told.get("phase") or "starting")
    found = done.get("mismatched_sites") or 0
    return f"running: {where}; " + (
        f"{formats.plural(found, 'mismatching tensor')} so far" if found else "no mismatch so far"
    )


def _reason(stored: Any, launch: Any) -> str:
    if stored and stored.get("verdict"):
        return f"Reason: {stored['reason']}." if stored.get("reason") else ""
    return str((launch or {}).get("message") or "")


def _asked(spec: Mapping[str, Any]) -> int | None:
    """Steps asked for, of a run's spec or a PairRun's."""
    found = spec.get("steps")
    if found is None and isinstance(spec.get("workload"), dict):
        found = spec["workload"].get("steps")
    return found if isinstance(found, int) else None


def _facts(
    stored: Any, done: Mapping[str, Any], told: Mapping[str, Any], at: float, over: bool, asked: int | None
) -> list[tuple[str, str, str]]:
    out = []
    rate, left = told.get("steps_per_s"), told.get("eta_s")
    if not rate and (rate := done.get("steps_per_s")):  # in a cluster nobody but the database tells
        left = max(0, asked - (done.get("step") or 0)) / rate if asked else None
    if not over and rate:
        eta = f"about {formats.duration(left)} left" if left is not None else ""
        out.append((f"{rate:.3g}", "steps a second", eta))
    if stored:
        end = stored.get("finished_at") or at
        out.append((formats.duration(max(0.0, end - stored["created_at"])), "took" if over else "since it began", ""))
    if done:
        out += [
            (formats.short(done["sites_compared"]), "tensors compared", "step × site × rank"),
            (formats.short(done["elements_compared"]), "elements compared", ""),
            (formats.count(done["mismatched_sites"]), "mismatching tensors", "with equal inputs"),
            (formats.count(done["mismatched_elements"]), "mismatching elements", ""),
        ]
        if done.get("other_findings"):
            out.append((formats.count(done["other_findings"]), "other findings", "outside every frequency"))
    return out


def _lines(done: Mapping[str, Any], told: Mapping[str, Any], launch: Any, over: bool) -> list[tuple[str, str]]:
    out = []
    if first := done.get("first_mismatch"):
        size = (
            "tensor never received" if first["mismatched"] is None else formats.plural(first["mismatched"], "element")
        )
        out.append(
            ("first mismatch", f"attempt {first['attempt']}, step {first['step']:,}, {first['site']}, "
                               f"rank {first['rank']}: {size}")
        )  # fmt: skip
    if over:
        return out
    if told.get("phase"):
        out.append(("phase", str(told["phase"])))
    if told.get("controls"):
        out.append(("controls", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in told["controls"].items())))
    if told.get("full_bytes"):
        share = formats.percent(told.get("link_bytes", 0) / told["full_bytes"])
        out.append(("link", f"{formats.size(told.get('link_bytes', 0))}, {share} of full exchange"))
    if told.get("window_limit"):
        out.append(("window", f"{told.get('window_used', 0)} of {told['window_limit']} unconfirmed sites"))
    if told.get("records_put"):
        put, safe = told["records_put"], told.get("records_acknowledged", 0)
        spooled = told.get("records_spooled", 0)
        more = f", {spooled:,} wait in the spool" if spooled else ""
        out.append(("records", f"{safe:,} of {put:,} stored{more}"))
    out += [
        (f"condition {c['type']}", f"{c['status']}: {c['reason']}" + (f" ({c['message']})" if c["message"] else ""))
        for c in (launch or {}).get("conditions") or ()
    ]
    return out


def _title(head: Mapping[str, Any], spec: Mapping[str, Any], stored: Any) -> str:
    if not head:
        return ""
    inner = spec["workload"] if isinstance(spec.get("workload"), dict) else spec
    tp = inner.get("tp")
    pair = (
        f"{stored['suspect_node']} against {stored['reference_node']}"
        if stored
        else f"{head.get('node') or 'any quarantined node'} against {head.get('reference') or 'the most like it'}"
    )
    parts = [f"{head['kind']} pair", pair, str(head["workload"]), str(head["model"])]
    return " · ".join([*parts, f"TP {tp}"] if tp else parts)


def _place(done: Mapping[str, Any]) -> str | None:
    """Behind all that the page shows already: the stream goes on from there."""
    from tandem_api.live.events import AFTER_ROWS, Place

    step = done.get("step")
    return None if step is None else str(Place(done["attempt"], step, AFTER_ROWS))
