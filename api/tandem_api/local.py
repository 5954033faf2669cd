"""``tandem serve``: the whole product on one machine, for its own user alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from contextlib import suppress

from tandem.cli.output import database_url
from tandem.db.engine import connect
from tandem.db.profiles import catch_up
from tandem.errors import DatabaseError, UsageError
from tandem.home import home
from tandem.recovery import recover
from tandem_api.console.build import built
from tandem_api.console.files import NOT_BUILT
from tandem_api.launch.local import LocalLauncher
from tandem_api.reads.store import Store
from tandem_api.security.limits import loopback_hosts
from tandem_api.security.local import LocalAuthenticator, token_file
from tandem_api.serve import bound, run
from tandem_api.settings import Settings


def serve(host: str, port: int, db: str | None, say: Callable[[str], None]) -> int:
    """Serve this machine until interrupted; runs that go on then go on.

    Raises:
        TandemError: the address is no loopback address, or a part cannot be had.
    """
    address = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(f"--host {host}: only this machine is served (127.0.0.1 or ::1): for others install the chart")
    settings = Settings(hosts=loopback_hosts(), loopback_only=True)
    path, token = token_file(home())
    listening = bound(address, port)
    shown = f"[{address}]" if ":" in address else address
    url = f"http://{shown}:{listening.getsockname()[1]}"
    with listening, database_url(db) as database:
        _take_up(database)

        def parts() -> tuple[Store, LocalLauncher, LocalAuthenticator]:
            store = Store(
                database, pool=settings.pool, query_s=settings.query_seconds, whole_s=settings.report_seconds
            )  # fmt: skip
            return store, LocalLauncher(database, db), LocalAuthenticator(token)

        def ready() -> None:
            say(f"Tandem answers at {url} (documentation: {url}/docs)")
            say(f"token: {path}")
            say(f"console: {url}/ (sign in with the token)" if built() else f"no console: {NOT_BUILT}")
            say(f'try: curl -H "Authorization: Bearer $(cat {path})" {url}/v1/runs')

        return run(settings, listening, parts, ready)


def _take_up(database: str) -> None:
    """What earlier commands left: the spool is delivered, orphans are closed, old summaries made anew."""
    engine = connect(database)
    try:
        with suppress(DatabaseError):  # a role that may only read
            recover(engine, database)
            catch_up(engine)
    finally:
        engine.dispose()
