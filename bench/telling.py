"""A line on the terminal that says how far a bench is."""

from __future__ import annotations

import sys


def tell(text: str = "") -> None:
    """Replace the line; an empty text clears it. Nothing where standard error is no terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r  {text:60s}" if text else "\r" + " " * 64 + "\r")
        sys.stderr.flush()
