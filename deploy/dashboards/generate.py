"""Writes the dashboards that the chart ships, as JSON. ``make generate``; needs grafana-foundation-sdk."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.dashboards.controller import controller
from deploy.dashboards.fleet import fleet
from deploy.dashboards.node import node
from deploy.dashboards.run import run

FOLDER = Path("deploy/helm/tandem/files/dashboards")
BOARDS = {"fleet": fleet, "run": run, "node": node, "controller": controller}
"""File name -> what makes it."""


def text(name: str) -> str:
    """A dashboard as JSON."""
    return json.dumps(BOARDS[name]().build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write all of them, seen from the repository's root."""
    for name in BOARDS:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
