"""CURVE keys of one attempt, and the endpoint's form. Pure apart from the key generator."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import zmq

from tandem.errors import SetupError

_ENDPOINT = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+[\w]*\]|\*|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")
_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}")


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """What one side holds: its own pair and the only peer that it talks to. Z85 text, 40 characters each."""

    public: str
    secret: str = field(repr=False)
    peer_public: str


@dataclass(frozen=True, slots=True)
class PairKeys:
    """Keys of both sides of one attempt."""

    reference_public: str
    reference_secret: str = field(repr=False)
    suspect_public: str
    suspect_secret: str = field(repr=False)

    @property
    def reference(self) -> OwnKeys:
        return OwnKeys(self.reference_public, self.reference_secret, self.suspect_public)

    @property
    def suspect(self) -> OwnKeys:
        return OwnKeys(self.suspect_public, self.suspect_secret, self.reference_public)


def new_keys() -> PairKeys:
    """Fresh keys from the operating system's randomness; an attempt's keys are used for no other."""
    reference, suspect = zmq.curve_keypair(), zmq.curve_keypair()
    return PairKeys(*(key.decode() for key in (*reference, *suspect)))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``tcp://host:port``; host is a name, an IPv4 address, an IPv6 address in brackets, or ``*`` (bind only)."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read an endpoint.

        Raises:
            SetupError: it is not of that form.
        """
        found = _ENDPOINT.fullmatch(text)
        if not found or int(found["port"]) > 65535:
            raise SetupError(f"{text!r} is no address of a link: write tcp://HOST:PORT, IPv6 addresses in brackets")
        return cls(found["host"], int(found["port"]))

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def families(self) -> tuple[bool, ...]:
        """Values of ZMQ_IPV6 to try in turn: libzmq tries only the first address of a name."""
        if self.host.startswith("["):
            return (True,)
        return (False,) if _IPV4.fullmatch(self.host) else (True, False)
