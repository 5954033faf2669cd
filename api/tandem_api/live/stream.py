"""The answer of a stream: it notices a client that left, and drops one that takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class EventStream(Response):
    """Args:
    chunks: what to send, as it comes.
    send_s: how long the client may take for a chunk; a dropped one comes back with its last id.
    on_drop: told of a client that was dropped.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[bytes], *, send_s: float, on_drop: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        # nginx and its kin would hold events back.
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._send_s, self._on_drop = chunks, send_s, on_drop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _send_all(self, send: Send) -> None:
        async with aclosing(cast("_Generator", self._chunks)) as chunks:
            async for chunk in chunks:
                try:
                    async with asyncio.timeout(self._send_s):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                except TimeoutError:
                    self._on_drop()
                    return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._send_s):
                await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Generator(AsyncIterator[bytes]):
    async def aclose(self) -> None: ...


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
