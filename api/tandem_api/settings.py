"""What one installation of the API may do: read once, at start."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(min_length=1, max_length=253)]


def _network(text: str) -> str:
    try:
        found = ipaddress.ip_network(text)
    except ValueError:
        raise ValueError("is no address and no network such as 10.0.0.0/8") from None
    if found.prefixlen == 0:
        raise ValueError("is everybody: whoever asks could claim any address")
    return str(found)


Network = Annotated[str, Field(min_length=1, max_length=43), AfterValidator(_network)]
"""IP addresses, or one."""


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


class WriteLimit(_Model):
    """How often one user may write."""

    burst: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Writes at once."""
    per_minute: Annotated[int, Field(ge=1, le=100_000)] = 60
    """Writes in the long run."""


class EventSettings(_Model):
    """The live streams."""

    poll_seconds: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """How often the database is asked what is new, for all streams together."""
    ping_seconds: Annotated[float, Field(ge=0.1, le=300)] = 15.0
    """A comment is sent after so much silence, so that a dead connection is noticed."""
    send_seconds: Annotated[float, Field(ge=0.1, le=300)] = 10.0
    """A client that takes nothing for so long is dropped; it may come back and go on where it was."""
    clients: Annotated[int, Field(ge=1, le=10_000)] = 500
    """Streams at once."""
    kept: Annotated[int, Field(ge=10, le=100_000)] = 500
    """Events of a run that are held for those who lag; older ones are read again from the database."""


class Settings(_Model):
    """Everything that the chart, or ``tandem serve``, sets."""

    namespace: Name = "default"
    """Whose PairRuns are launched and shown, and on which rights are asked for."""
    audiences: list[Name] = ["tandem"]
    """A token must be made for one of these; empty: for the Kubernetes API itself."""
    anonymous_reads: bool = False
    """Whether reading needs no token. Writing always does."""
    hosts: list[Name] = []
    """Host headers that are answered; empty: any. Always this machine's own names with ``tandem serve``."""
    loopback_only: bool = False
    """Refuse every client that is not on this machine."""
    trusted_proxies: list[Network] = []
    """Proxies whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are believed; those of all others are ignored."""
    body_limit: Annotated[int, Field(ge=1024, le=64 << 20)] = 256 << 10
    """Largest request body, in bytes."""
    body_seconds: Annotated[float, Field(ge=0.1, le=600)] = 10.0
    """How long a client may take to send a request's body."""
    head_seconds: Annotated[float, Field(ge=0.1, le=600)] = 10.0
    """How long it may take to send its head."""
    writes: WriteLimit = WriteLimit()
    query_seconds: Annotated[float, Field(ge=0.1, le=600)] = 10.0
    """After which the database gives up a page's query."""
    report_seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """The same for reports, summaries and exports, which read a whole run."""
    export_seconds: Annotated[float, Field(ge=1, le=86_400)] = 1800.0
    """How long a client may take for a whole file; then it is cut off. Few are made at once."""
    pool: Annotated[int, Field(ge=1, le=100)] = 10
    """Database connections for pages; reports, exports and decisions have a few of their own."""
    fleet_seconds: Annotated[float, Field(ge=0, le=60)] = 2.0
    """How long the list of nodes is kept."""
    auth_seconds: Annotated[float, Field(ge=0, le=300)] = 30.0
    """How long an answer about a token or a right is believed."""
    events: EventSettings = EventSettings()
