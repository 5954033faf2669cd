"""Controllers as processes of their own, on the test's namespace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.replica import Replica

from cluster.api.hands import Hands, settings


@contextmanager
def replica(hands: Hands, folder: Path, kubeconfig: Path | None = None, **values: object) -> Iterator[Replica]:
    """A controller process of its own; killed if the test did not end it."""
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig or hands.server.kubeconfig)}
    chosen = settings(hands.namespace, **values).model_dump(mode="json", by_alias=True)
    running = Replica(environment, folder, hands.database, chosen)
    try:
        yield running
    finally:
        running.kill()
