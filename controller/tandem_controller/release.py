"""What an uninstall has to do before the controller goes: end live pairs, take every mark off the nodes.

Finished PairRuns stay, as objects: they are what a kept CRD keeps. A controller may be at its side, or not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tandem.errors import SetupError
from tandem.kube.client import Kube, Object
from tandem.kube.errors import Forbidden, NotFound
from tandem.kube.paths import NODES, PAIRRUNS
from tandem.pairrun import names
from tandem.pairrun.status import finished
from tandem_controller import marks

log = logging.getLogger("tandem.controller")
PATIENCE_S = 30.0
"""How long a controller at its side gets to free the nodes of the PairRuns that were deleted."""
POLL_S = 0.5


def release(kube: Kube, namespace: str, *, patience_s: float = PATIENCE_S) -> None:
    """Delete every live PairRun, drop what would hold the others back, and leave the nodes as they were found.

    Raises:
        KubeError: the API server refused something that is needed, or did not answer.
        SetupError: a node keeps its marks, since nobody granted the right to take them off; the rest is done, but for
            the finalizers, which are there to bring the marks off.
    """
    objects = kube.list(PAIRRUNS.path(namespace)).items
    live = [obj for obj in objects if not finished(obj)]
    for obj in live:
        log.info("ending %s", obj["metadata"]["name"])
        kube.delete(PAIRRUNS.path(namespace, obj["metadata"]["name"]), uid=obj["metadata"]["uid"])
    uids = {obj["metadata"]["uid"] for obj in live}
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        there = {obj["metadata"]["uid"] for obj in kube.list(PAIRRUNS.path(namespace)).items}
        if not there & uids:
            break
        time.sleep(POLL_S)
    kept = [name for node in kube.list(NODES.path()).items if (name := _unmark(kube, namespace, node))]
    if kept:
        raise SetupError(
            f"{', '.join(kept[:5])} {'keep their' if len(kept) > 1 else 'keeps its'} marks: not allowed to patch nodes "
            "in the whole cluster: have it granted (helm upgrade with controller.markNodes=true), and uninstall again"
        )
    for obj in kube.list(PAIRRUNS.path(namespace)).items:
        _let_go(kube, namespace, obj)


def _let_go(kube: Kube, namespace: str, obj: Object) -> None:
    finalizers = obj["metadata"].get("finalizers") or []
    if names.FINALIZER in finalizers:
        left = [f for f in finalizers if f != names.FINALIZER]
        with suppress(NotFound):
            kube.patch(PAIRRUNS.path(namespace, obj["metadata"]["name"]), {"metadata": {"finalizers": left}})


def _unmark(kube: Kube, namespace: str, node: Mapping[str, Any]) -> str:
    """Take this installation's marks off a node that has any; returns its name if that was refused."""
    meta, name = node["metadata"], str(node["metadata"]["name"])
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    marked = {names.LABEL_SESSION, names.LABEL_VERDICT} & set(labels) or names.ANNOTATION_LAST_RUN in annotations
    operations = marks.condition_off((node.get("status") or {}).get("conditions") or [])
    if marks.foreign(namespace, meta):
        return ""
    try:
        # The annotation goes last: it says whose the rest is.
        if operations:
            kube.patch(NODES.path(None, name, "status"), operations, manager=names.FIELD_MANAGER)
        if marked:
            log.info("taking the marks off %s", name)
            kube.patch(NODES.path(None, name), marks.all_off(), manager=names.FIELD_MANAGER)
    except NotFound:
        return ""
    except Forbidden as error:
        log.warning("%s keeps its marks: %s", name, error)
        return name
    return ""
