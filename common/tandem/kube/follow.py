"""One PairRun, from now to its end, through every hiccup of the API server."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator

from tandem.errors import SetupError
from tandem.kube.client import WATCH_S, Kube, Object
from tandem.kube.errors import Forbidden, Gone, KubeError, NotFound
from tandem.kube.paths import PAIRRUNS
from tandem.pairrun.status import finished

PATIENCE_S = 300.0
"""How long the API server may be away before following it is given up."""
LAST_BACKOFF_S = 5.0
_QUIET_S = 15.0


def follow(
    kube: Kube,
    name: str,
    *,
    existed: bool = False,
    timeout_s: float | None = None,
    on_trouble: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Object]:
    """The object now and after every change, until it is finished or the time is up.

    Args:
        kube: the cluster; the object is in its namespace.
        name: of the PairRun.
        existed: whether the caller knows that it was there: one that is not is then one that was deleted.
        timeout_s: when to stop; None: never.
        on_trouble: told, once per trouble, that the API server does not answer.
        clock: monotonic seconds.
        sleep: waits.

    Raises:
        SetupError: there is no such PairRun, or it was deleted.
        KubeError: it may not be read, or the API server was away for too long.
    """
    path, until = PAIRRUNS.path(kube.namespace, name), math.inf if timeout_s is None else clock() + timeout_s
    well, failures, seen = clock(), 0, existed
    version: str | None = None
    while clock() < until:
        try:
            if version is None:
                obj = kube.get(path)
                seen, well, failures = True, clock(), 0
                version = str(obj["metadata"]["resourceVersion"])
                yield obj
                if finished(obj):
                    return
            for obj in _changes(kube, name, version, until - clock()):
                well, failures = clock(), 0
                version = str(obj["metadata"]["resourceVersion"])
                yield obj
                if finished(obj):
                    return
            well = clock()
        except Gone:
            version = None
        except NotFound:
            raise _absent(kube, name, deleted=seen) from None
        except Forbidden:
            raise
        except KubeError as error:
            if clock() - well > PATIENCE_S:
                raise
            if failures == 0:
                on_trouble(str(error))
            failures += 1
            version = None
            sleep(min(0.2 * 2.0 ** min(failures, 10), LAST_BACKOFF_S) * (0.5 + 0.5 * random.random()))


def _changes(kube: Kube, name: str, version: str, left_s: float) -> Iterator[Object]:
    seconds = max(1, int(min(left_s, WATCH_S)))
    path = PAIRRUNS.path(kube.namespace)
    for event in kube.watch(path, version, field_selector=f"metadata.name={name}", seconds=seconds, quiet_s=_QUIET_S):
        if event.kind == "DELETED":
            raise _absent(kube, name, deleted=True)
        if event.kind != "BOOKMARK":
            yield event.object


def _absent(kube: Kube, name: str, *, deleted: bool) -> SetupError:
    where = f"PairRun {kube.namespace}/{name}"
    if deleted:
        return SetupError(f"{where} was deleted: its run, as far as it went, is in the database")
    return SetupError(f"there is no {where}: list them with `kubectl get pairruns --namespace {kube.namespace}`")
