"""The server around the application: one process, patient with nobody."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.errors import SetupError
from tandem_api.app import create_app
from tandem_api.launch.launcher import Launcher
from tandem_api.live.hub import Hub
from tandem_api.problems import Problem
from tandem_api.reads.store import Store
from tandem_api.security.authenticate import Authenticator
from tandem_api.security.limits import HEADERS
from tandem_api.settings import Settings

DEAD_MS = 30_000
"""A connection whose other side acknowledges nothing for so long is dropped, also while data wait for it."""
GRACE_S = 5
"""How long requests under way may take when the process ends."""
LARGEST_HEAD = 32 << 10


class Server(uvicorn.Server):
    """Tells the live streams when the process is to end: they would keep it."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """End in order; the library would raise the signal once more, past all that is still to be closed."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_exit()
        await super().shutdown(sockets)


def protocol(head_s: float, rest_s: float) -> type[H11Protocol]:
    """HTTP whose requests must have their whole head within some seconds, and what was answered already its rest."""

    class Impatient(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _rest: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # Between requests the server's own limit holds; once a byte has come, the rest must follow.
            self._wait() if self.conn.their_state is h11.IDLE else self._heard()
            self._bound_rest()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._bound_rest()

        def connection_lost(self, exc: Exception | None) -> None:
            self._heard()
            self._rested()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - it goes to the log alone
            """What is no HTTP never reaches the application, whose errors it is answered like."""
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.abort()  # in the middle of an answer
                return
            answer = Problem(400, "no-http", "this is no HTTP request that can be read").response()
            headers = [*answer.raw_headers, *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            head = h11.Response(status_code=400, headers=[*headers, (b"Connection", b"close")], reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _wait(self) -> None:
            if self._late is None:
                self._late = self.loop.call_later(head_s, self._give_up)

        def _heard(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _give_up(self) -> None:
            self._late = None
            if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
                self.transport.abort()

        def _bound_rest(self) -> None:
            """What is answered before its body came (404, 401, any GET) is read by nobody, and the server's own limit
            ends with the next byte: the body's own time is not prolonged by any.
            """
            if self.conn.their_state is not h11.SEND_BODY or not self.cycle.response_complete:
                self._rested()
            elif self._rest is None:
                self._rest = self.loop.call_later(rest_s, self.transport.abort)

        def _rested(self) -> None:
            if self._rest is not None:
                self._rest.cancel()
                self._rest = None

    return Impatient


def server_of(app: FastAPI, settings: Settings) -> Server:
    """The server of an application."""
    hub: Hub = app.state.parts.hub
    config = uvicorn.Config(
        app,
        http=protocol(settings.head_seconds, settings.body_seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Else the environment, or a default of the library, would say whom to believe.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=LARGEST_HEAD,
    )
    server = Server(config, hub.close)
    app.state.connections = lambda: len(server.server_state.connections)
    return server


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any.

    Raises:
        SetupError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_MS)
        listening.bind((host, port))
        listening.listen(512)
    except OSError as error:
        listening.close()
        raise SetupError(f"{host} port {port} cannot be listened on ({error.strerror}): choose another") from None
    listening.setblocking(False)
    return listening


def run(
    settings: Settings,
    listening: socket.socket,
    parts: Callable[[], tuple[Store, Launcher, Authenticator]],
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until told to end.

    Args:
        settings: of the installation.
        listening: where.
        parts: made inside the event loop.
        on_ready: told once it answers.

    Returns:
        The exit code.

    Raises:
        SetupError: a part cannot be started.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", force=True
    )

    async def main() -> int:
        store, launcher, authenticator = parts()
        await launcher.start()  # what is wrong with it is told before anything is served
        server = server_of(create_app(settings, store, launcher, authenticator), settings)
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if server.started:
            on_ready()
        await serving
        return 0

    return asyncio.run(main())
