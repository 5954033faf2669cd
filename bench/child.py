"""The process of one bench: ``python -m bench.child NAME OPTIONS`` prints its rows as one JSON line."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import msgspec

from bench.options import Options
from bench.results import ROOT
from bench.rows import BENCHES


def main() -> int:
    """Run the bench named by the arguments."""
    name, text = sys.argv[1:]
    options = msgspec.json.decode(text, type=Options)
    sys.path.insert(0, str(ROOT / "tests"))  # `pairs`: a whole pair in one process
    module, function = BENCHES[name].split(":")
    rows = getattr(import_module(module), function)(options)
    sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of the pair may still wait in native code


if __name__ == "__main__":
    sys.exit(main())
