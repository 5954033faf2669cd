"""``tandem candidates``: quarantined nodes, the references that they would get, and why others would not do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem import formats
from tandem.cli import flags as f
from tandem.cli.output import JsonOption, emit_json, note, say

if TYPE_CHECKING:
    from tandem.pairing.candidates import Candidate
    from tandem.pairing.policy import Policy


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
    from tandem.kube.world import world
    from tandem.pairing.candidates import of_world

    kube = Kube.connect(kubeconfig=kubeconfig, context=context, namespace=namespace)
    rules = policy_of(policy)
    found = of_world(world(kube, lambda line: note(f"note: {line}")), rules)
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
