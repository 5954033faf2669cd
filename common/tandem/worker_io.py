"""How a local supervisor and its workers talk: JSON lines over standard input and output. Pure.

To a worker: one `WorkerConfig` line, so that no secret is an argument; later perhaps ``stop``. Standard
input then stays open: its end means that the supervisor died, and the worker ends. From a worker:
`Bound`, progress events (`tandem.progress`), and at most one `Failed`. A check answers `Checked` or `Failed`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from tandem.vocabulary import Role

STOP = b"stop\n"
"""Drain, run the end controls and close normally."""

LINK_FOLDER = "/etc/tandem/link"
"""In a pod: the link's keys, as files named by `KeyFile`."""
DATABASE_FOLDER = "/etc/tandem/database"
"""In the reference's pod, and nowhere else: the file ``uri`` with the database's URL."""
HOME_FOLDER = "/var/lib/tandem"
"""In a pod: where the spool lies."""


class KeyFile(StrEnum):
    """Files of a side's link keys (Z85)."""

    OWN_PUBLIC = "own.public"
    OWN_SECRET = "own.secret"  # noqa: S105 - a file's name
    PEER_PUBLIC = "peer.public"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is started with."""

    role: Role
    run_id: UUID
    attempt: int
    spec: dict[str, Any]
    """A `tandem.spec.RunSpec` as JSON."""
    endpoint: str
    """Where the reference binds (port 0: any) and the suspect connects."""
    own_public: str
    own_secret: str
    """CURVE keys of this attempt (Z85)."""
    peer_public: str
    database: str | None = None
    """Reference only."""
    spool: str | None = None
    """Reference only: directory of the local spool."""
    node: str = ""
    """Name of the node that it runs on, in a cluster."""
    node_devices: int = 0
    """How many devices the suspect's node has, those that its plugin dropped included; 0: those that are seen."""
    suspect_node: str = ""
    """Reference only: name of the node under test."""
    metrics_port: int | None = None
    """Reference only: where Prometheus finds the pair's metrics; None: nowhere."""
    metrics_host: str = ""
    """Address to listen on for that; empty: all."""
    sync_schedule: list[str] = []
    """Benchmark only: sync mode of step i is entry (i - 1) modulo the length; empty: the spec's."""
    link_delay_s: float = 0.0
    """Benchmark only: one-way delay added to the link."""


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """The reference listens."""

    endpoint: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker ends without a result."""

    reason: str
    """Stable name, which becomes the run's reason."""
    message: str
    """One line: cause and mend."""
    exit_code: int = 2


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """All that the spec names can be used."""

    preset: str
    """Where the training shape comes from."""
    model: str
    """What really runs, for the run's row."""


Message = Bound | Failed | Checked
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message | WorkerConfig) -> bytes:
    """One JSON line, newline included."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message | None:
    """A message of a worker; None for anything else (progress, a library's own output)."""
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None
