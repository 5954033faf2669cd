"""What the JSON objects of a run and of a node have in common. Pure; the keys are documented in ``docs/json.md``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.runs.parts import Bound, Counts
from tandem.statistics.timing import Timing

if TYPE_CHECKING:
    from tandem.nodes.profile import ClassProfile


def counts_json(c: Counts | ClassProfile) -> dict[str, Any]:
    """Counts and severity of one class of sites."""
    return {
        "phase": c.phase,
        "module": c.module,
        "tensor": c.family,
        "sites": c.sites,
        "elements": c.elements,
        "mismatched_sites": c.mismatched_sites,
        "mismatched_elements": c.mismatched_elements,
        "severity_mean": c.severity_mean,
        "severity_median": c.severity_median,
        "severity_max": c.severity_max,
    }


def timing_json(t: Timing) -> dict[str, Any]:
    """When mismatches came."""
    return {
        "steps": t.steps,
        "affected": t.affected,
        "onset": t.onset,
        "bursts": t.bursts,
        "longest_burst": t.longest_burst,
        "gaps": t.gaps,
        "mean_gap": t.mean_gap,
        "longest_gap": t.longest_gap,
        "burstiness": t.burstiness,
    }


def bound_json(b: Bound | None) -> dict[str, Any] | None:
    """What is excluded where nothing was found."""
    return None if b is None else {
        "confidence": b.confidence,
        "steps": b.steps,
        "per_step": b.per_step,
        "device_hours": b.device_hours,
        "per_device_hour": b.per_device_hour,
        "elements": b.elements,
        "per_element": b.per_element,
    }  # fmt: skip


def cells_json(cells: Mapping[int, tuple[int, int]]) -> dict[str, dict[str, int]]:
    """Rank or layer -> mismatching tensors and elements."""
    return {str(key): {"sites": sites, "elements": elements} for key, (sites, elements) in cells.items()}


def bits_json(bits: Mapping[int, list[int]]) -> dict[str, list[int]]:
    """Width of the element in bits -> how often each bit differed."""
    return {str(width): counts for width, counts in bits.items()}
