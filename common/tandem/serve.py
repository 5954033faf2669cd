"""Health and metrics of a service over HTTP, in a thread of its own; needs prometheus-client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

Answer = Callable[[], tuple[int, str, bytes]]
"""Status, content type, body."""


def check(ask: Callable[[], str | None]) -> Answer:
    """An answer from a check that returns what is wrong, or None."""

    def answer() -> tuple[int, str, bytes]:
        wrong = ask()
        return (200, "text/plain", b"ok\n") if wrong is None else (503, "text/plain", f"{wrong}\n".encode())

    return answer


def exposition(registry: CollectorRegistry) -> Answer:
    """The metrics of a registry."""
    return lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that went away, or one answer that failed: the next request is answered again."""


def serve(port: int, answers: dict[str, Answer], host: str = "") -> ThreadingHTTPServer:
    """Answer GET requests in a thread of its own; port 0 takes any (``server_port`` says which).

    Raises:
        OSError: the port cannot be listened on.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            status, kind, body = answer() if answer is not None else (404, "text/plain", b"not found\n")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Probes come every few seconds: nothing to tell."""

    server = _Server((host, port), Handler)
    threading.Thread(target=server.serve_forever, name=f"http-{port}", daemon=True).start()
    return server
