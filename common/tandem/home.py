"""Where Tandem keeps what belongs to this user: the embedded database, spools, reports."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from tandem.errors import SetupError

ROOT_HOME = Path("/var/lib/tandem")
"""Used by root where its own data folder is closed to others: PostgreSQL refuses to run as root, and the
user that it runs as must be able to reach its data."""


def home() -> Path:
    """The data folder, made where it is missing.

    ``TANDEM_HOME`` if set, else the user's data folder (XDG), for root ``/var/lib/tandem`` if that folder cannot be
    entered by other users.

    Raises:
        SetupError: it cannot be made or written.
    """
    if chosen := os.environ.get("TANDEM_HOME"):
        path = Path(chosen).expanduser().absolute()
    else:
        path = platformdirs.user_data_path("tandem")
        if os.geteuid() == 0 and closed_to_others(path) is not None:
            path = ROOT_HOME
    try:
        path.mkdir(mode=0o755 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the data folder {path} cannot be made ({error.strerror}): set TANDEM_HOME to a folder that you may write"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise SetupError(f"the data folder {path} is not writable: set TANDEM_HOME to a folder that you may write")
    return path


def closed_to_others(path: Path) -> Path | None:
    """The first existing folder on the way to ``path`` (itself included) that other users cannot enter, if any."""
    path = path.resolve()
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            return None
        if not folder.stat().st_mode & 0o001:
            return folder
    return None
