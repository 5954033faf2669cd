"""How Tandem writes numbers, durations and untrusted text for people. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def count(n: int) -> str:
    """An exact count with thousands separators: ``1,204``."""
    return f"{n:,}"


def short(n: float) -> str:
    """A count at a glance: exact below a million, then ``1.3 M``, ``4.2e11``.

    Three digits above a million in steps of 1000; from 1e11 on in scientific notation.
    """
    if n < 1e6:
        return f"{int(n):,}"
    if n >= 1e11:
        return scientific(n, 1)
    for size, unit in _UNITS:
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g}"


def scientific(x: float, digits: int = 2) -> str:
    """``4.78e-3`` (no padding of the exponent); ``0`` for zero, ``inf`` and ``nan`` as they are."""
    if x == 0:
        return "0"
    mantissa, sign, exponent = f"{x:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if sign else mantissa


def percent(share: float) -> str:
    """A share of 1 in percent with two significant digits: ``0.15 %``, ``100 %``, ``< 0.0001 %``."""
    value = share * 100
    if value == 0:
        return "0 %"
    if 0 < value < 1e-4:
        return "< 0.0001 %"
    if 99.995 > value > 99:
        return f"{value:.2f} %"
    if value >= 10:
        return f"{value:.0f} %"
    return f"{float(f'{value:.2g}'):.6f}".rstrip("0").rstrip(".") + " %"


def size(n: float) -> str:
    """Bytes in binary units: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """A length of time with one or two units: ``48 s``, ``8 min``, ``2 h 05 min``, ``0.4 s``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def device_hours(hours: float) -> str:
    """Device-hours; short runs keep their significant digits: ``0.6``, ``0.0042``."""
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2g}"


def when(seconds: float | None) -> str:
    """A UTC time since the epoch as ``2026-01-31 12:00:05 UTC``; ``-`` for None."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(n: int, noun: str, nouns: str | None = None) -> str:
    """``1 site``, ``17 sites``."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def clean(text: object, limit: int = 400) -> str:
    r"""Untrusted text as one harmless line.

    What is not printable (control characters, bidirectional marks, line separators, surrogates, unassigned code points)
    becomes a ``\uXXXX`` escape, so that a suspect's strings can neither drive a terminal nor reorder a page; what is
    longer than ``limit`` characters is cut with an ellipsis.
    """
    raw = str(text)
    shown, more = raw[:limit], "…" if len(raw) > limit else ""
    return (shown if shown.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in shown)) + more


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
