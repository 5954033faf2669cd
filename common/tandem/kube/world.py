"""What pairing looks at, read from the cluster now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from tandem.errors import SetupError
from tandem.kube.client import Kube
from tandem.kube.errors import Forbidden, NotFound
from tandem.kube.paths import NODES, PAIRRUNS, PODS
from tandem.pairing.choose import World
from tandem.pairing.claims import claims, served
from tandem.pairing.nodes import PodUse, node_from, pod_use_from


def world(kube: Kube, note: Callable[[str], None] = lambda _: None) -> World:
    """What pairing would look at now.

    Args:
        kube: the cluster.
        note: told, in one line, what could not be looked at.

    Raises:
        SetupError: the cluster has no PairRuns, or no such namespace.
        KubeError: nodes or PairRuns may not be read, or the API server does not answer.
    """
    nodes = [node_from(obj) for obj in kube.list(NODES.path()).items]
    usage: dict[str, list[PodUse]] = defaultdict(list)
    try:
        for obj in kube.list(PODS.path(), field_selector="status.phase!=Succeeded,status.phase!=Failed").items:
            if (use := pod_use_from(obj)) is not None:
                usage[use.node].append(use)
    except Forbidden as error:
        note(f"what runs on the nodes is not known, every node counts as idle: {error}")
    try:
        pairruns = kube.list(PAIRRUNS.path(kube.namespace)).items
    except NotFound as error:
        raise missing(kube, error) from None
    return World(nodes=nodes, usage=usage, claims=claims(pairruns), served=served(pairruns))


def missing(kube: Kube, error: Exception) -> SetupError:
    """Why a collection of PairRuns is not there."""
    if "namespaces" in str(error):
        return SetupError(f"there is no namespace {kube.namespace}: choose one with --namespace")
    return SetupError(
        "this cluster knows no PairRun (tandem.dev/v1alpha1): install Tandem's chart there, or choose another --context"
    )
