"""Lets both ``python -m tests.cluster.bare`` and ``python tests/cluster/bare`` start the command line."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__:
    from .cli import main
else:  # started as a folder: Python then looks for modules in the folder itself, not beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bare.cli import main

if __name__ == "__main__":
    main()
