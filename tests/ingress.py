"""What stands before a server that is reached from outside: it ends TLS, and says whose request it is."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path

OWN = "127.0.0.2"
"""The address from which the server is asked."""


@contextmanager
def ingress(folder: Path, port: int) -> Iterator[str]:
    """A proxy before a server's port; its URL, to which each address of this machine is a client of its own.

    As those of clusters, it passes the Host header on and appends the client's address to what that says of itself. One
    request for each connection.

    Args:
        folder: for its certificate.
        port: of the server.
    """
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def serve(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        with closing(to_client), suppress(OSError, asyncio.IncompleteReadError):
            head = (await client.readuntil(b"\r\n\r\n")).decode("latin-1")
            there = re.findall(r"(?im)^x-forwarded-for: *(.*?)\r$", head)
            head = re.sub(r"(?im)^(x-forwarded-for|x-forwarded-proto|connection):.*\r\n", "", head)
            whose = ", ".join([*there, to_client.get_extra_info("peername")[0]])
            more = f"X-Forwarded-For: {whose}\r\nX-Forwarded-Proto: https\r\nConnection: close\r\n\r\n"
            server, to_server = await asyncio.open_connection("127.0.0.1", port, local_addr=(OWN, 0))
            with closing(to_server):
                to_server.write((head[:-2] + more).encode("latin-1"))
                rest = asyncio.create_task(_pass(client, to_server))
                await _pass(server, to_client)
                rest.cancel()

    found: Future[tuple[int, Callable[[], object]]] = Future()

    async def main() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        found.set_result((listening.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(ended.set)))
        await ended.wait()
        listening.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="ingress", daemon=True)
    thread.start()
    there, end = found.result(60)
    try:
        yield f"https://localhost:{there}"
    finally:
        end()
        thread.join(60)


async def _pass(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(1 << 16):
        target.write(piece)
        await target.drain()
