"""``tandem controller``: what the controller's pod runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from tandem.errors import SetupError


def controller(
    config: Annotated[Path, typer.Option(metavar="FILE", help="Settings of the installation (YAML).")],
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to read from nodes (YAML).  [default: the shipped policy]")
    ] = None,
    uninstall: Annotated[
        bool, typer.Option("--uninstall", help="End live pairs, take every mark off the nodes, and return.")
    ] = False,
) -> None:
    """Serve the PairRuns of a cluster; this is what the chart's controller runs."""
    try:
        # By name: the services are not part of the package `tandem`, and may not be installed.
        main = importlib.import_module("tandem_controller.main")
    except ModuleNotFoundError as error:
        mend = "install tandem-sdc[controller] (from a checkout: pip install -e '.[controller]')"
        raise SetupError(f"the controller is not installed here ({error}): {mend}") from None
    raise typer.Exit(main.run(config, policy, uninstall=uninstall) or 0)
