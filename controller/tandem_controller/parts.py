"""What reconciling works with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.kube.client import Kube
from tandem.pairing.policy import Policy
from tandem_controller import world
from tandem_controller.cache import Caches
from tandem_controller.facts import FactStore
from tandem_controller.metrics import Metrics
from tandem_controller.refusals import PodRefusals
from tandem_controller.settings import Settings
from tandem_controller.verdicts import Verdicts


@dataclass(frozen=True)
class Parts:
    """What a reconcile works with."""

    kube: Kube
    caches: Caches
    facts: FactStore
    verdicts: Verdicts
    policy: Policy
    settings: Settings
    metrics: Metrics
    snapshot: world.PodSnapshot
    nodes: world.Nodes
    refusals: PodRefusals
    clock: Callable[[], float] = time.time
