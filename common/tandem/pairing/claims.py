"""What live runs hold, read from the PairRuns themselves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tandem.pairing.choose import Claim
from tandem.pairrun import names
from tandem.pairrun.status import PairRunStatus, read_status

StatusOf = Callable[[Mapping[str, Any]], PairRunStatus]
"""Reads the status of a PairRun; whoever asks often gives one that remembers."""


def _status(obj: Mapping[str, Any]) -> PairRunStatus:
    return read_status(obj.get("status"))


def claims(
    objects: Iterable[Mapping[str, Any]], own_uid: str | None = None, status_of: StatusOf = _status
) -> list[Claim]:
    """Nodes that live runs hold: the suspect until the run finishes, the reference while an attempt goes on.

    Args:
        objects: PairRuns as the cluster holds them.
        own_uid: of the one that asks: it does not stand in its own way.
        status_of: reads a status.
    """
    found = []
    for obj in objects:
        meta, status = obj["metadata"], status_of(obj)
        mine = own_uid is not None and meta.get("uid") == own_uid
        if mine or not status.attempts or status.holds(names.FINISHED):
            continue
        last = status.attempts[-1]
        live = last.ended_at is None
        if not live and (obj.get("spec") or {}).get("suspend"):
            continue
        reference = last.reference.node if live else ""
        found.append(Claim(f"{meta.get('namespace')}/{meta['name']}", last.suspect.node, reference))
    return found


def served(objects: Iterable[Mapping[str, Any]], status_of: StatusOf = _status) -> dict[str, int]:
    """Node -> PairRuns that it served as the reference."""
    statuses = (status_of(obj) for obj in objects)
    return dict(Counter(status.reference.node for status in statuses if status.reference is not None))
