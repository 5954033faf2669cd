"""Reading a file that a user names: bounded, and refused in one line that says how to mend it; digests of values."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tandem.errors import DataError

SIZE_LIMIT = 1 << 30
"""Bytes of a file that are kept in memory at most."""


def read_file(path: Path, *, what: str = "text file", binary: bool = False) -> bytes:
    """Content of one file, not empty.

    Args:
        path: of the file.
        what: the kind of file that the user is asked for instead.
        binary: zero bytes are allowed.

    Raises:
        DataError: missing, unreadable, empty, larger than `SIZE_LIMIT`, or binary where text is meant.
    """
    try:
        if path.is_dir():
            raise DataError(f"{path} is a directory: give {what}s")
        if path.stat().st_size > SIZE_LIMIT:
            raise DataError(f"{path} is larger than {SIZE_LIMIT >> 30} GiB: give a smaller sample")
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing: give an existing {what}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not content:
        raise DataError(f"{path} is empty: give a {what} with content")
    if not binary and (at := content.find(b"\0")) >= 0:
        raise DataError(f"{path} is binary (a zero byte at {at}): give a {what}")
    return content


def digest_of(value: object) -> str:
    """SHA-256 (hex) of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
