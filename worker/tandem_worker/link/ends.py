"""The two ends of the link as ZeroMQ sockets: the reference's (bound ROUTER that admits one public key) and the
suspect's (DEALER, a new socket per connection). Used by the channel's thread only.
"""

from __future__ import annotations

import errno
import hmac
from typing import Any, Protocol

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from tandem.errors import SetupError
from tandem_worker.link.frames import CHUNK
from tandem_worker.link.keys import Endpoint, OwnKeys
from tandem_worker.link.outbox import Parts

HIGH_WATER = 32
"""Messages in a socket's own queue; with the outbox's bound on bytes, what a heartbeat may have to wait behind."""

_SLACK = 1024
_ATTEMPT_S = 5.0
"""After this long a connection attempt is given up and made anew (the name may resolve to another address now)."""
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 1.0

_REFUSALS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key was not accepted",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak CURVE, or has another server key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake broke off",
}
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CLOSE_FAILED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip


class GoneError(Exception):
    """The route's connection does not exist any more."""


class End(Protocol):
    """What the channel needs of a socket."""

    lost: bool
    """Set when a connection ended; the channel looks which one and clears it."""
    opened: bool
    """Set when a connection is ready for `Attach`; the channel clears it."""

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets whose readability `service` wants to know of, and last the data socket, if there is one."""
        ...

    def data(self) -> zmq.Socket[bytes] | None: ...

    def service(self, now: float) -> list[str]:
        """Do what is due; what is told names the peers that were turned away by their keys."""
        ...

    def deadline(self) -> float | None:
        """When `service` has to be called again at the latest."""
        ...

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """One message and the route that it came by, or None."""
        ...

    def send(self, route: bytes, parts: Parts) -> bool:
        """Hand over one message; False if the socket's queue is full.

        Raises:
            GoneError: nobody is there.
        """
        ...

    def close(self, linger_ms: int) -> None: ...


def _configure(socket: zmq.Socket[bytes], silence_s: float) -> None:
    socket.maxmsgsize = CHUNK + _SLACK
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.linger = 0
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 10, 5, 6
    # Reaps connections nobody else looks after. Twice the time in which the watchdog judges silence, so
    # that a half-open link is called by its name before libzmq turns it into a closed one.
    socket.heartbeat_ivl = max(1, int(silence_s * 1000 / 2))
    socket.heartbeat_timeout = max(1, int(silence_s * 2000))


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def _monitor_events(monitor: zmq.Socket[bytes]) -> list[int]:
    events = []
    while monitor.poll(0):
        events.append(int(recv_monitor_message(monitor)["event"]))
    return events


class ReferenceEnd:
    """Binds; answers libzmq's authentication requests itself, so that exactly one public key is let in."""

    def __init__(self, context: zmq.Context[Any], endpoint: Endpoint, keys: OwnKeys, silence_s: float) -> None:
        self.lost = self.opened = False
        self._admitted = keys.peer_public.encode()
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _configure(self._router, silence_s)
        self._router.router_mandatory = 1
        self._router.curve_server = 1
        self._router.curve_publickey, self._router.curve_secretkey = keys.public.encode(), keys.secret.encode()
        self._router.zap_domain = b"tandem"
        self._monitor = self._router.get_monitor_socket(_EVENTS)
        try:
            self._bind(endpoint)
        except BaseException:
            self.close(0)
            raise
        bound = self._router.last_endpoint
        self.endpoint = Endpoint(endpoint.host, int(bytes(bound).rstrip(b"\0").rsplit(b":", 1)[1]))

    def _bind(self, endpoint: Endpoint) -> None:
        for attempt, ipv6 in enumerate(endpoint.families, start=1):
            self._router.ipv6 = ipv6
            try:
                self._router.bind(str(endpoint))
                break
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE:
                    raise SetupError(
                        f"port {endpoint.port} of {endpoint.host} is in use: choose another one, or 0 for any free one"
                    ) from None
                if attempt == len(endpoint.families):
                    raise SetupError(
                        f"cannot listen on {endpoint}: {error.strerror}; give an address of this machine, or *"
                    ) from None

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._zap, self._monitor, self._router]

    def data(self) -> zmq.Socket[bytes] | None:
        return self._router

    def deadline(self) -> float | None:
        return None

    def service(self, now: float) -> list[str]:  # noqa: ARG002 - the other end needs it
        told = []
        while (request := _receive(self._zap)) is not None:
            if (refusal := self._authenticate([part.bytes for part in request])) is not None:
                told.append(refusal)
        for event in _monitor_events(self._monitor):
            if event == zmq.EVENT_DISCONNECTED:
                self.lost = True
            elif event in _REFUSALS and event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                told.append(f"a peer was turned away: {_REFUSALS[event]}")
        return told

    def _authenticate(self, request: list[bytes]) -> str | None:
        """Answer one ZAP request (RFC 27): version, id, domain, address, identity, mechanism, credentials."""
        version, number, _, address, _, mechanism, *credentials = request
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        admitted = version == b"1.0" and hmac.compare_digest(key, self._admitted)
        status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        self._zap.send_multipart([b"1.0", number, status, text, key if admitted else b"", b""])
        if admitted:
            return None
        return f"a peer at {address.decode('ascii', 'replace')} was turned away: its key is not this attempt's"

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        message = _receive(self._router)
        return None if message is None else (message[0].bytes, message[1:])

    def send(self, route: bytes, parts: Parts) -> bool:
        try:
            self._router.send_multipart([route, *parts], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise GoneError from None
            raise
        return True

    def close(self, linger_ms: int) -> None:
        _close(self._router, self._monitor, linger_ms)
        self._zap.close(0)


class SuspectEnd:
    """Connects. Every connection has a socket of its own: what was queued for a broken one is never sent by
    libzmq on the next, since the channel sends again what the peer lacks.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: Endpoint, keys: OwnKeys, silence_s: float) -> None:
        self.lost = self.opened = False
        self.endpoint = endpoint
        self._context, self._keys, self._silence_s = context, keys, silence_s
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._attempts = 0
        self._backoff_s = _FIRST_BACKOFF_S
        self._at: float | None = 0.0
        """When to connect (no socket) or to give the attempt up (socket); None: connected."""

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [s for s in (self._monitor, self._socket) if s is not None]

    def data(self) -> zmq.Socket[bytes] | None:
        return self._socket

    def deadline(self) -> float | None:
        return self._at

    def service(self, now: float) -> list[str]:
        told = []
        for event in _monitor_events(self._monitor) if self._monitor is not None else []:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.opened, self._at, self._backoff_s = True, None, _FIRST_BACKOFF_S
                continue
            if event in _REFUSALS and event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                told.append(f"the reference at {self.endpoint} turned this side away: {_REFUSALS[event]}")
            self.drop(now)
            break
        if self._at is not None and now >= self._at:
            if self._socket is None:
                self._connect(now)
            else:
                self.drop(now)
        return told

    def stay_closed(self) -> None:
        """Make no further attempt."""
        self.drop(0.0)
        self._at = None

    def drop(self, now: float) -> None:
        """Leave this connection, if there is one, and connect anew a little later."""
        if self._socket is not None:
            _close(self._socket, self._monitor, 0)
            self.lost = True
        self._socket = self._monitor = None
        self.opened = False
        self._at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LAST_BACKOFF_S)

    def _connect(self, now: float) -> None:
        socket = self._context.socket(zmq.DEALER)
        _configure(socket, self._silence_s)
        socket.ipv6 = self.endpoint.families[self._attempts % len(self.endpoint.families)]
        socket.reconnect_ivl = -1
        socket.curve_serverkey = self._keys.peer_public.encode()
        socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
        self._monitor = socket.get_monitor_socket(_EVENTS, f"inproc://monitor-{self._attempts}")
        socket.connect(str(self.endpoint))
        self._socket = socket
        self._attempts += 1
        self._at = now + _ATTEMPT_S

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        message = None if self._socket is None else _receive(self._socket)
        return None if message is None else (b"", message)

    def send(self, route: bytes, parts: Parts) -> bool:  # noqa: ARG002 - a DEALER has one peer
        if self._socket is None:
            raise GoneError
        try:
            self._socket.send_multipart(list(parts), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        if self._socket is not None:
            _close(self._socket, self._monitor, linger_ms)
        self._socket = self._monitor = None


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None, linger_ms: int) -> None:
    socket.disable_monitor()
    if monitor is not None:
        monitor.close(0)
    socket.close(linger_ms)
