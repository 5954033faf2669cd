"""Where fault profiles lie and how one is read: a file, or a shipped one by its bare name."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import SpecError
from tandem.faults.profile import FaultProfile, ReadFrom, numbered

_HEADER = re.compile(r"\s*\[\[\s*fault\s*\]\]")


def shipped_names() -> list[str]:
    """Names of the profiles that ship with Tandem."""
    folder = resources.files("tandem").joinpath("fault_profiles")
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def shipped_profile(path: Path) -> Traversable | None:
    """The shipped profile that a bare name (``node-11``) means, unless there is a file of that name; else None."""
    if len(path.parts) != 1 or path.exists() or path.name not in shipped_names():
        return None
    return resources.files("tandem").joinpath("fault_profiles", f"{path.name}.toml")


def check_name(path: Path) -> None:
    """Refuse a bare name that can only be meant for a shipped profile.

    Raises:
        SpecError: no shipped profile and no file has it; names those that ship.
    """
    if len(path.parts) == 1 and not path.exists() and path.name not in shipped_names():
        raise SpecError(
            f"fault profile {path}: no shipped profile and no file has that name: "
            f"use {', '.join(shipped_names())}, or give a TOML file"
        )


def load_profile(path: Path) -> FaultProfile:
    """Read a fault profile: a file, or a shipped one by its bare name.

    Raises:
        SpecError: the file cannot be read, is no TOML, or a field is wrong; names the first one.
    """
    try:
        text = (shipped_profile(path) or path).read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        shipped = f", or the name of a shipped one ({', '.join(shipped_names())})"
        mend = f"give a readable TOML file{shipped if isinstance(error, FileNotFoundError) else ''}"
        raise SpecError(f"fault profile {path}: {error.strerror}: {mend}") from None
    except UnicodeDecodeError:
        raise SpecError(f"fault profile {path}: not UTF-8 text: give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"fault profile {path}: not valid TOML: {str(error).splitlines()[0]}") from None
    except ValueError as error:  # a number that Python will not read
        raise SpecError(f"fault profile {path}: not valid TOML: {str(error).splitlines()[0]}") from None
    lines = tuple(n for n, line in enumerate(text.splitlines(), start=1) if _HEADER.match(line))
    try:
        profile = FaultProfile.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        if len(place) > 1 and place[0] == "fault" and place[1].isdigit():
            place[:2] = [numbered(int(place[1]) + 1, lines)]
        where = (
            f"{place[0]}: {'.'.join(place[1:])}" if place[0:1] and place[0].startswith("fault ") else ".".join(place)
        )
        message = f"fault profile {path}: {where.removesuffix(': ')}: {first['msg'].removeprefix('Value error, ')}"
        raise SpecError(" ".join(message.splitlines())) from None  # a quoted key may hold line breaks
    return profile.read_from(ReadFrom(str(path), lines))
