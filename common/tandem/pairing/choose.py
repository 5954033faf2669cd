"""Which two nodes run a pair: likeness first, then idle, then spread. Pure.

Nothing is left out silently: every node that could have been meant and was not chosen comes with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.pairing import nodes as n
from tandem.pairing.devices import (
    COUNT_LABELS,
    NoShare,
    Shape,
    Share,
    device_of,
    multi_host_slice,
    shape_of,
    share,
    whole,
)
from tandem.pairing.nodes import Node, PodUse
from tandem.pairing.policy import Policy
from tandem.pairrun.spec import Device, PairRunSpec
from tandem.pairrun.status import PassedOver
from tandem.vocabulary import Kind, Role

ATTEMPTS_USED = "AttemptsUsed"
PASSING = ("NodeNotReady", "Busy", "NoRoom")
"""Why a node may be no reference now, and may be one later without anybody's doing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A live run's hold on its two nodes."""

    pairrun: str
    """Namespace and name."""
    suspect: str
    reference: str


@dataclass(frozen=True, slots=True)
class World:
    """What pairing looks at besides the request."""

    nodes: Sequence[Node]
    usage: Mapping[str, Sequence[PodUse]]
    """Pods by node."""
    claims: Sequence[Claim] = ()
    """Of all other live runs."""
    tried: Mapping[str, int] = field(default_factory=dict)
    """Reference node -> attempts of this run on it that said nothing."""
    used_before: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Suspect -> references that it was already compared with; a swap takes another."""
    served: Mapping[str, int] = field(default_factory=dict)
    """Node -> runs that it served as a reference lately; fewer first."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two nodes, why these, and why no others."""

    suspect: Node
    reference: Node
    suspect_reason: str
    reference_reason: str
    share: Share
    """What the pods take of the nodes' devices."""
    tolerated: tuple[str, ...]
    """Keys of the suspect's taints that its pod must tolerate."""
    passed_over: tuple[PassedOver, ...] = ()


@dataclass(frozen=True, slots=True)
class NoPairing:
    """Why no two nodes could be chosen: a CamelCase reason and one sentence."""

    reason: str
    message: str
    passed_over: tuple[PassedOver, ...] = ()
    final: bool = False
    """Whether waiting cannot help."""

    @property
    def exhausted(self) -> bool:
        """Whether this run has used its attempts on every node that would do: none becomes free by waiting."""
        references = {each.reason for each in self.passed_over if each.role == Role.REFERENCE}
        return ATTEMPTS_USED in references and references.isdisjoint(PASSING)


def choose(spec: PairRunSpec, world: World, policy: Policy) -> Pairing | NoPairing:
    """The pair for a request, or why there is none.

    Args:
        spec: the request.
        world: nodes, what runs on them, other runs' claims.
        policy: signs and likeness fields.
    """
    named = _named(spec, world)
    if isinstance(named, NoPairing):
        return named
    shape = shape_of(spec)
    if isinstance(shape, NoShare):
        return NoPairing(shape.reason, shape.message, final=shape.final)
    passed: list[PassedOver] = []
    why_not: list[NoPairing] = []
    for suspect, reason in _suspects(spec, world, policy, passed):
        found = _partner(spec, shape, world, policy, suspect, reason)
        if isinstance(found, Pairing):
            return replace(found, passed_over=(*passed, *found.passed_over))
        why_not.append(found)
        passed.append(PassedOver(node=suspect.name, role=Role.SUSPECT, reason=found.reason, message=found.message))
        passed += found.passed_over
    if len(why_not) == 1:
        return NoPairing(why_not[0].reason, why_not[0].message, tuple(passed), why_not[0].final)
    if why_not:
        names = ", ".join(p.node for p in passed if p.role == Role.SUSPECT)
        if all(each.final for each in why_not):  # waiting helps none of them
            return NoPairing(
                why_not[0].reason,
                f"none of the suspects {names} will do: {why_not[0].message}",
                tuple(passed),
                final=True,
            )
        return NoPairing("NoPartner", f"none of the suspects {names} has a partner", tuple(passed))
    return _no_suspect(spec, passed)


def _named(spec: PairRunSpec, world: World) -> NoPairing | None:
    """A node that is named and does not exist."""
    known = {node.name for node in world.nodes}
    for role, choice in ((Role.SUSPECT, spec.suspect), (Role.REFERENCE, spec.reference)):
        if choice.node_name is not None and choice.node_name not in known:
            return NoPairing("UnknownNode", f"the {role} node {choice.node_name} does not exist")
    return None


def _no_suspect(spec: PairRunSpec, passed: Sequence[PassedOver]) -> NoPairing:
    of_suspects = [p for p in passed if p.role == Role.SUSPECT]
    if len(of_suspects) == 1:
        return NoPairing(of_suspects[0].reason, of_suspects[0].message, tuple(passed))
    what = "healthy" if spec.kind is Kind.NULL else "quarantined"
    where = " among those selected" if spec.suspect.selector is not None else ""
    counts = Counter(p.reason for p in of_suspects)
    tail = "; passed over: " + ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items())) if counts else ""
    return NoPairing("NoSuspect", f"there is no {what} node without a live run{where}{tail}", tuple(passed))


# -- the suspect -------------------------------------------------------------------------------------


def _suspects(spec: PairRunSpec, world: World, policy: Policy, passed: list[PassedOver]) -> list[tuple[Node, str]]:
    """Nodes that may be the suspect, in name order, each with why; the others go to ``passed``."""
    found = []
    for node in sorted(world.nodes, key=lambda node: node.name):
        if not spec.suspect.matches(node.name, node.labels):
            continue
        signs = n.quarantine_signs(node, policy)
        asked_by_name = spec.suspect.node_name is not None
        if spec.kind is not Kind.NULL and not signs and not asked_by_name:
            continue  # a healthy node: nobody asked for it
        why = _not_a_suspect(spec, node, signs, world, policy)
        if why is None:
            found.append((node, "named" if asked_by_name else ", ".join(signs) or "healthy"))
        else:
            passed.append(PassedOver(node=node.name, role=Role.SUSPECT, reason=why[0], message=why[1]))
    return found


def _not_a_suspect(
    spec: PairRunSpec, node: Node, signs: Sequence[str], world: World, policy: Policy
) -> tuple[str, str] | None:
    if (label := n.opted_out(node, policy)) is not None:
        return "OptedOut", f"{node.name} asks to be left alone ({label})"
    if multi_host_slice(node, world.nodes, policy):
        return "MultiHostSliceUnsupported", (
            f"{node.name} is one host of a TPU slice of several "
            f"({node.labels[policy.tpu_topology_label]}): such a host cannot compute alone"
        )
    if not node.ready:
        return "NodeNotReady", f"{node.name} is not Ready"
    if spec.kind is Kind.NULL and signs:
        return "Quarantined", f"{node.name} is quarantined ({', '.join(signs)}): a null pair takes two healthy nodes"
    for claim in world.claims:
        if claim.suspect == node.name:
            return "SuspectBusy", f"{node.name} is already the suspect of {claim.pairrun}"
        if claim.reference == node.name:
            return "SuspectBusy", f"{node.name} is the reference of {claim.pairrun}"
    return None


# -- the reference -----------------------------------------------------------------------------------


def _partner(
    spec: PairRunSpec,
    shape: Shape,
    world: World,
    policy: Policy,
    suspect: Node,
    reason: str,
) -> Pairing | NoPairing:
    taken = share(spec, shape, suspect, policy)
    if isinstance(taken, NoShare):
        return NoPairing(taken.reason, taken.message, final=taken.final)
    needs = _needs(spec, taken)
    asked = spec.template.tolerations
    if (taint := n.untolerated(suspect, n.tolerated_taints(suspect, policy), asked, policy)) is not None:
        return NoPairing(
            "UntoleratedTaint",
            f"the taint {taint} keeps pods off {suspect.name}: add it to the policy's quarantine list, "
            "or to template.tolerations",
        )
    if (short := _short(suspect, needs, world.usage.get(suspect.name, ()))) is not None:
        return NoPairing("SuspectNotDrained" if short.holders else "SuspectTooSmall", short.sentence(suspect.name))
    passed: list[PassedOver] = []
    found = []
    for node in world.nodes:
        if node.name == suspect.name or not spec.reference.matches(node.name, node.labels):
            continue
        why = _not_a_reference(spec, node, suspect, needs, world, policy)
        if why is None:
            found.append(node)
        else:
            passed.append(PassedOver(node=node.name, role=Role.REFERENCE, reason=why[0], message=why[1]))
    passed.sort(key=lambda p: p.node)
    if not found:
        return NoPairing("NoReference", _no_reference(suspect, passed), tuple(passed))
    found.sort(key=lambda node: (*_order(node, needs, world), node.name))
    best = found[0]
    passed += [
        PassedOver(node=node.name, role=Role.REFERENCE, reason="NotNeeded", message=f"{best.name} comes first")
        for node in found[1:]
    ]
    tried, busy, *_ = _order(best, needs, world)
    because = "named" if spec.reference.node_name else "like the suspect, " + ("idle" if not busy else "has room")
    if tried:
        because += f", tried {tried} times"
    reason = "; ".join(filter(None, (reason, taken.sentence)))
    return Pairing(suspect, best, reason, because, taken, tuple(n.tolerated_taints(suspect, policy)), tuple(passed))


def _order(node: Node, needs: Mapping[str, float], world: World) -> tuple[int, int, int, int]:
    """Least first: attempts that failed on it, whether anything computes on it, runs it serves, runs it has served."""
    pods = world.usage.get(node.name, ())
    devices = [name for name in needs if name not in ("cpu", "memory", "pods")] or ["cpu"]
    busy = any(pod.requests.get(name, 0) >= (1 if name == "cpu" else 1e-9) for pod in pods for name in devices)
    serving = sum(claim.reference == node.name for claim in world.claims)
    return world.tried.get(node.name, 0), int(busy), serving, world.served.get(node.name, 0)


def _not_a_reference(
    spec: PairRunSpec,
    node: Node,
    suspect: Node,
    needs: Mapping[str, float],
    world: World,
    policy: Policy,
) -> tuple[str, str] | None:
    if (label := n.opted_out(node, policy)) is not None:
        return "OptedOut", f"asks to be left alone ({label})"
    if signs := n.quarantine_signs(node, policy):
        return "Quarantined", f"quarantined itself ({', '.join(signs)})"
    if multi_host_slice(node, world.nodes, policy):
        return "MultiHostSliceUnsupported", "one host of a TPU slice of several cannot compute alone"
    if (field_ := _unlike(spec, suspect, node, policy)) is not None:
        return "Unlike", f"differs from {suspect.name} in {field_}"
    if not node.ready:
        return "NodeNotReady", "not Ready"
    if (taint := n.untolerated(node, (), spec.template.tolerations, policy)) is not None:
        return "UntoleratedTaint", f"the taint {taint} keeps pods off it"
    for claim in world.claims:
        if claim.suspect == node.name:
            return "Busy", f"is the suspect of {claim.pairrun}"
    serving = [claim.pairrun for claim in world.claims if claim.reference == node.name]
    if len(serving) >= policy.runs_per_reference:
        return "Busy", f"serves {', '.join(serving)}"
    if world.tried.get(node.name, 0) >= spec.retry.max_attempts_per_node:
        return ATTEMPTS_USED, f"{world.tried[node.name]} attempts on it said nothing"
    if (
        spec.kind is Kind.SWAP
        and node.name in world.used_before.get(suspect.name, ())
        and spec.reference.node_name is None
    ):
        return "UsedBefore", f"{suspect.name} was compared with it before: a swap takes another reference"
    if (short := _short(node, needs, world.usage.get(node.name, ()))) is not None:
        return ("NoRoom" if short.holders else "TooSmall"), short.sentence(node.name)
    return None


def _no_reference(suspect: Node, passed: Sequence[PassedOver]) -> str:
    if not passed:
        return f"no node may be the reference of {suspect.name}"
    if len(passed) == 1:
        return f"no reference for {suspect.name}: {passed[0].node} {passed[0].message}"
    counts = Counter(p.reason for p in passed)
    first = passed[0]
    tally = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items()))
    return f"no reference for {suspect.name} among {len(passed)} nodes ({tally}); {first.node} {first.message}"


# -- devices and room --------------------------------------------------------------------------------


def _unlike(spec: PairRunSpec, suspect: Node, node: Node, policy: Policy) -> str | None:
    """What two nodes differ in; with ``devices: allocatable`` how many devices they have is no difference.

    Kernels and rings follow the number, and not every label tells it; where a run takes what a plugin has left, the
    labels that count follow the loss.
    """
    device = device_of(suspect, spec.resources.device)
    some = spec.resources.devices == "allocatable"
    if (field_ := n.unlike(suspect, node, policy, COUNT_LABELS.get(device, ()) if some else ())) is not None:
        return field_
    if device is Device.CPU or some:
        return None
    mine, theirs = (whole(each, device, policy) for each in (suspect, node))
    return None if mine == theirs else f"its number of {device} ({mine}, {theirs})"


def _needs(spec: PairRunSpec, taken: Share) -> dict[str, float]:
    needs = {"cpu": n.quantity(spec.resources.cpu), "memory": n.quantity(spec.resources.memory), "pods": 1.0}
    if taken.device is not Device.CPU:
        needs[taken.device] = float(taken.devices)
    return needs


@dataclass(frozen=True, slots=True)
class _Short:
    resource: str
    needed: float
    free: float
    allocatable: float
    holders: tuple[str, ...]
    """Pods that hold it, where the node would do if they were gone."""

    def sentence(self, node: str) -> str:
        amount = (
            f"{_amount(self.resource, self.free)} of {_amount(self.resource, self.allocatable)} {self.resource} free"
        )
        text = f"{node} has {amount}, the pod needs {_amount(self.resource, self.needed)}"
        if self.holders:
            shown = ", ".join(self.holders[:5]) + (
                f" and {len(self.holders) - 5} more" if len(self.holders) > 5 else ""
            )
            text += f": held by {shown}"
        return text


def _short(node: Node, needs: Mapping[str, float], pods: Sequence[PodUse]) -> _Short | None:
    """The first resource of which the node has not enough free, devices first; None if a pod fits."""
    for resource in sorted(needs, key=lambda name: (name in ("cpu", "memory", "pods"), name)):
        allocatable = node.allocatable.get(resource, 0.0)
        held = {p.namespace + "/" + p.name: p.requests.get(resource, 0.0) if resource != "pods" else 1.0 for p in pods}
        free = allocatable - sum(held.values())
        if needs[resource] > free + 1e-9:
            fits_empty = needs[resource] <= allocatable + 1e-9
            holders = tuple(sorted(name for name, amount in held.items() if amount > 0)) if fits_empty else ()
            return _Short(resource, needs[resource], max(free, 0.0), allocatable, holders)
    return None


def _amount(resource: str, value: float) -> str:
    return f"{value / 2**30:.3g}Gi" if resource == "memory" else f"{value:.3g}"
