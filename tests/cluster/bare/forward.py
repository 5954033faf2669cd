"""Carries TCP connections from a port of the host into a machine's network."""

from __future__ import annotations

import asyncio
import ctypes
import socket
from contextlib import suppress
from pathlib import Path

from .tools import ClusterError, say

CLONE_NEWNET = 0x40000000


def forward(port: int, target: tuple[str, int], netns: Path | None) -> None:
    """Serve 127.0.0.1:port until killed.

    It listens on the host, then enters the other network namespace: a socket keeps the one it was made in, and the
    connections that are opened afterwards belong to the new one.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=256)
    except OSError as error:
        raise ClusterError(f"127.0.0.1:{port}: {error.strerror}") from None
    if netns:
        with netns.open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {netns}")
    asyncio.run(_serve(listener, target))


async def _serve(listener: socket.socket, target: tuple[str, int]) -> None:
    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
            writers.append(far_writer)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except OSError as error:
            say(f"{target[0]}:{target[1]}: {error}")
        finally:
            for each in writers:
                each.close()

    server = await asyncio.start_server(join, sock=listener)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
