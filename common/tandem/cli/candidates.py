"""``tandem candidates``: quarantined nodes, the references that they would get, and why others would not do."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem import formats
from tandem.cli import flags as f
from tandem.cli.output import JsonOption, emit_json, note, say
from tandem.cli.pair import missing

if TYPE_CHECKING:
    from tandem.kube.client import Kube
    from tandem.pairing.choose import World
    from tandem.pairing.policy import Policy


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


def candidates(
    namespace: f.NamespaceOption = None,
    context: f.ContextOption = None,
    kubeconfig: f.KubeconfigOption = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What to read from nodes (YAML).  [default: the shipped policy]"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List quarantined nodes, the reference that each would get now, and why other nodes would not do."""
    from tandem.kube.client import Kube

    kube = Kube.connect(kubeconfig=kubeconfig, context=context, namespace=namespace)
    rules = policy_of(policy)
    found = of_world(world(kube), rules)
    if json:
        emit_json({"candidates": [asdict(candidate) for candidate in found]})
        return
    if not found:
        say("no node is in quarantine by the signs of the policy")
        return
    for line in lines(found):
        say(line)


def policy_of(path: Path | None) -> Policy:
    """A policy from a file, or the shipped one.

    Raises:
        SpecError: the file cannot be read, or a field is wrong.
    """
    from tandem.pairing.policy import read_policy
    from tandem.yaml_file import read_mapping

    return read_policy({} if path is None else read_mapping(path, "policy"))


def world(kube: Kube) -> World:
    """What pairing would look at now.

    Raises:
        KubeError: nodes or PairRuns may not be read, or the API server does not answer.
    """
    from tandem.kube.errors import Forbidden, NotFound
    from tandem.kube.paths import NODES, PAIRRUNS, PODS
    from tandem.pairing.choose import World
    from tandem.pairing.claims import claims, served
    from tandem.pairing.nodes import PodUse, node_from, pod_use_from

    nodes = [node_from(obj) for obj in kube.list(NODES.path()).items]
    usage: dict[str, list[PodUse]] = defaultdict(list)
    try:
        for obj in kube.list(PODS.path(), field_selector="status.phase!=Succeeded,status.phase!=Failed").items:
            if (use := pod_use_from(obj)) is not None:
                usage[use.node].append(use)
    except Forbidden as error:
        note(f"note: what runs on the nodes is not known, every node counts as idle: {error}")
    try:
        pairruns = kube.list(PAIRRUNS.path(kube.namespace)).items
    except NotFound as error:
        raise missing(kube, error) from None
    return World(nodes=nodes, usage=usage, claims=claims(pairruns), served=served(pairruns))


def of_world(seen: World, policy: Policy) -> list[Candidate]:
    """Every quarantined node with what a PairRun that names it would get, in name order. Pure."""
    from tandem.pairing.choose import Pairing, choose
    from tandem.pairing.nodes import quarantine_signs
    from tandem.pairrun.spec import NodeChoice, PairRunSpec
    from tandem.vocabulary import Role

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
                device=str(choice.device) if isinstance(choice, Pairing) else None,
                devices=choice.devices if isinstance(choice, Pairing) else None,
                passed_over=[
                    PassedOver(p.node, p.reason, p.message)
                    for p in choice.passed_over
                    if p.role == Role.REFERENCE and not (paired and p.reason == "NotNeeded")
                ],
            )
        )
    return found


def lines(found: list[Candidate]) -> list[str]:
    """For people: one line per node, and below it why others would not do."""
    out = []
    for candidate in found:
        node = formats.clean(candidate.node)
        signs = formats.clean(", ".join(candidate.signs))
        why = formats.clean(candidate.why, 1000)
        if candidate.reference is None:
            out.append(f"{node} ({signs}): no reference: {why}")
        else:
            what = f"{candidate.devices} {candidate.device}" if candidate.device != "cpu" else "cpu"
            out.append(f"{node} ({signs}): {formats.clean(candidate.reference)} ({why}; {what})")
        out += [
            f"  not {formats.clean(p.node)}: {p.reason}: {formats.clean(p.message, 1000)}"
            for p in candidate.passed_over
        ]
    return out
