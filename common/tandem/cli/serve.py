"""``tandem serve``: the API for this machine."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from tandem.cli.output import DbOption
from tandem.errors import SetupError


def serve(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Loopback address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any.")] = 7780,
    db: DbOption = None,
) -> None:
    """Serve this machine's REST API: launch runs, read what they found, watch them live.

    Only this machine is answered, and only who has the token in the file that is named. Ctrl-C ends the API, not a run.
    """
    try:
        # By name: the services are not part of the package `tandem`, and may not be installed.
        local = importlib.import_module("tandem_api.local")
    except ModuleNotFoundError as error:
        mend = "install tandem-sdc[api] (from a checkout: pip install -e '.[api]')"
        raise SetupError(f"the API is not installed here ({error}): {mend}") from None
    raise typer.Exit(local.serve(host, port, db, _say) or 0)


def _say(text: str) -> None:
    """At once, also into a pipe: whoever started this waits for the address."""
    print(text, flush=True)
