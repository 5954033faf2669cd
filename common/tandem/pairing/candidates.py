"""Quarantined nodes, the references that they would get, and why others would not do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.pairing.choose import Pairing, World, choose
from tandem.pairing.nodes import quarantine_signs
from tandem.pairing.policy import Policy
from tandem.pairrun.spec import NodeChoice, PairRunSpec
from tandem.vocabulary import Role


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A node that would not be the reference."""

    node: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One quarantined node."""

    node: str
    signs: list[str]
    """Why it counts as quarantined."""
    reference: str | None
    """The node that it would be compared with; None if there is none now."""
    why: str
    """Why that one, or why none."""
    device: str | None
    devices: int | None
    """How many of it each pod would ask for."""
    passed_over: list[PassedOver]


def of_world(seen: World, policy: Policy) -> list[Candidate]:
    """Every quarantined node with what a PairRun that names it would get, in name order."""
    found = []
    for node in sorted(seen.nodes, key=lambda node: node.name):
        if not (signs := quarantine_signs(node, policy)):
            continue
        choice = choose(PairRunSpec(suspect=NodeChoice(node_name=node.name)), seen, policy)
        paired = isinstance(choice, Pairing)
        found.append(
            Candidate(
                node=node.name,
                signs=signs,
                reference=choice.reference.name if isinstance(choice, Pairing) else None,
                why=choice.reference_reason if isinstance(choice, Pairing) else choice.message,
                device=str(choice.share.device) if isinstance(choice, Pairing) else None,
                devices=choice.share.devices if isinstance(choice, Pairing) else None,
                passed_over=[
                    PassedOver(p.node, p.reason, p.message)
                    for p in choice.passed_over
                    if p.role == Role.REFERENCE and not (paired and p.reason == "NotNeeded")
                ],
            )
        )
    return found
