"""The API of this machine in a process of its own (`tandem serve`), and clients that wait for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Api:
    """A server that answers."""

    pid: int
    host: str
    port: int
    token: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is kept."""
        return await asyncio.open_connection(self.host, self.port, limit=64 << 20)

    def request(self, path: str) -> bytes:
        """A GET's head."""
        return (
            f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nAuthorization: Bearer {self.token}\r\n\r\n"
        ).encode()

    def peak_mb(self) -> float:
        """Largest resident size so far (``VmHWM``), in MB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


@contextmanager
def served(database: str) -> Iterator[Api]:
    """``tandem serve`` on any port, for as long as the caller likes."""
    from serve_process import served as serving  # of the tests, which `bench.child` finds
    from supervised import new_home

    with new_home() as home, serving(home, 0, "--db", database) as server:
        address = urlsplit(server.url)
        yield Api(server.process.pid, address.hostname or "", address.port or 0, server.token)


async def answered(reader: asyncio.StreamReader) -> str:
    """The head of an answer, in small letters.

    Raises:
        RuntimeError: it is no success.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    if head.split(maxsplit=2)[1] != "200":
        raise RuntimeError(f"the API answered {head}")
    return head


async def body(reader: asyncio.StreamReader) -> bytes:
    """The body of one answer on a connection that is kept.

    Raises:
        RuntimeError: it is no success, or does not say how long it is.
    """
    head = await answered(reader)
    if "content-length: " not in head:
        raise RuntimeError(f"an answer without its length: {head}")
    return await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines of a chunked answer's body."""
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line
