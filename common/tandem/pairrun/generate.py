"""Writes the generated files; ``python -m tandem.pairrun.generate [FILE]``, called by ``make generate``."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tandem.pairrun.crd import crd

HEADER = "# Generated from common/tandem/pairrun by `make generate`; do not edit.\n"


def text() -> str:
    """The CRD as YAML."""
    return HEADER + yaml.safe_dump(crd(), sort_keys=False, width=120, allow_unicode=True)


def main() -> None:
    """Write the CRD to the file that is named, or to standard output."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())


if __name__ == "__main__":
    main()
