"""YAML files that people write: read into a mapping, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tandem.errors import SpecError


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The file's fields.

    Args:
        path: of the file.
        what: it is, for the message: ``spec``, ``policy`` ...

    Raises:
        SpecError: it cannot be read, is no YAML, or holds something else.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{what} {path}: {error.strerror}: give a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{what} {path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise SpecError(f"{what} {path}: must be a mapping of fields such as `name: value`")
    return values
