"""Names that the cluster sees: API group, labels, annotations, conditions and their reasons, children. Pure."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from uuid import UUID

from tandem.ids import new_run_id
from tandem.vocabulary import Role

GROUP = "tandem.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "PairRun"
PLURAL = "pairruns"
SINGULAR = "pairrun"
SHORT = "pr"

FIELD_MANAGER = "tandem-controller"
"""Field owner of everything that the controller applies."""
LEASE = "tandem-controller"
"""Name of the Lease that elects the one active replica."""
FINALIZER = "tandem.dev/release-node"
"""Only on PairRuns whose nodes carry marks: removed once the marks are."""

LABEL_PAIRRUN = "tandem.dev/pairrun"
"""Name of the PairRun, on every child."""
LABEL_ATTEMPT = "tandem.dev/attempt"
"""Number of the attempt, on every child."""
LABEL_ROLE = "tandem.dev/role"
"""``reference`` or ``suspect``, on what belongs to one side."""
LABEL_PAIR = "tandem.dev/pair"
"""Unique per attempt: UID of the PairRun and number of the attempt; what NetworkPolicies and Services select by."""
LABEL_VERDICT = "tandem.dev/verdict"
"""Opt-in node mark: the last run's verdict."""
LABEL_SESSION = "tandem.dev/session"
"""Opt-in node mark: ``running`` while a pair runs on the node."""
ANNOTATION_LAST_RUN = "tandem.dev/last-run"
"""Opt-in node mark: the run's id and time."""
NODE_CONDITION = "SilentDataCorruption"
"""Opt-in node condition: Unknown until tested, then True or False."""

PAIRED = "Paired"
"""Both nodes are chosen; else the reason says why not."""
RUNNING = "Running"
"""Both pods of the current attempt run."""
RECORDS_DELIVERED = "RecordsDelivered"
"""Everything that the reference wrote is in PostgreSQL; Unknown while PostgreSQL does not answer."""
FINISHED = "Finished"
"""Terminal: the run has a verdict, or will never have one; the reason says which."""
SUCCEEDED = "Succeeded"
"""Terminal, for consumers: the verdict is ``match``."""
FAILED = "Failed"
"""Terminal, for consumers: the verdict is ``mismatch`` or ``inconclusive``; the reason tells them apart."""

REFUSED = "Refused"
"""True while the API server refuses something that the run needs done; the message names the verb that is missing."""

LINK_PORT = 7733
"""Port on which the reference listens."""
METRICS_PORT = 7734
"""Port on which the reference answers Prometheus."""
NAME_LIMIT = 63


def run_id_of(uid: str, created_at: str) -> UUID:
    """The run of a PairRun: a UUIDv7 made of its UID and creation time, so that no two controllers make two runs.

    Args:
        uid: ``metadata.uid``.
        created_at: ``metadata.creationTimestamp`` (RFC 3339).
    """
    created = datetime.fromisoformat(created_at.replace("Z", "+00:00")).astimezone(UTC)
    return new_run_id(created.timestamp(), hashlib.sha256(uid.encode()).digest()[:10])


def child_name(pairrun: str, uid: str, attempt: int, role: Role | None = None) -> str:
    """Name of a child of an attempt: a DNS label that carries the attempt's number, unique for the PairRun's UID.

    A long PairRun name is cut: its UID's digest keeps the child's name unique.
    """
    tail = f"-{attempt}" + (f"-{role}" if role else "")
    mark = hashlib.sha256(uid.encode()).hexdigest()[:6]
    # Pod names of a Job get five more characters and a dash.
    room = NAME_LIMIT - 6 - len(tail) - len(mark) - 1
    stem = pairrun.replace(".", "-")[:room].strip("-")
    return f"{stem}-{mark}{tail}"


def pair_label(uid: str, attempt: int) -> str:
    """Value of LABEL_PAIR: one pair of pods in the whole cluster."""
    return f"{uid}-{attempt}"
