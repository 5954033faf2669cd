"""Run ids: UUIDv7 (RFC 9562, section 5.7), so that ids sort by time and a month is a range of ids. Pure."""

from __future__ import annotations

from uuid import UUID


def new_run_id(now: float, entropy: bytes) -> UUID:
    """A UUIDv7.

    Args:
        now: UTC seconds since the epoch.
        entropy: 10 random bytes (``os.urandom(10)``); 74 of their bits are used.
    """
    if len(entropy) != 10:
        raise ValueError("entropy must be 10 bytes")
    value = (int(now * 1000) & (2**48 - 1)) << 80 | int.from_bytes(entropy, "big")
    value &= ~(0xF << 76) & ~(0x3 << 62)
    return UUID(int=value | 0x7 << 76 | 0x2 << 62)


def made_at(run_id: UUID) -> float:
    """UTC seconds since the epoch that a UUIDv7 was made with."""
    return (run_id.int >> 80) / 1000
