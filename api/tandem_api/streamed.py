"""Answers that are sent as they come: a client that left is noticed, and one that takes nothing is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Chunks = AsyncGenerator[bytes, None]


class Streamed(Response):
    """Unlike Starlette's own, this lets the chunks' generator clean up in peace when the client leaves: its
    cancellation comes once.

    Args:
        chunks: what to send, as it comes.
        media_type: of the whole.
        send_s: how long the client may take for a chunk.
        whole_s: the same for all of them together; then the answer is cut off. None: as long as it goes on.
        headers: of the answer.
        on_drop: told of a client that was dropped.
    """

    def __init__(
        self,
        chunks: Chunks,
        media_type: str,
        *,
        send_s: float,
        whole_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        on_drop: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(None, headers=dict(headers or {}), media_type=media_type)
        del self.headers["content-length"]
        self._chunks, self._send_s, self._whole_s, self._on_drop = chunks, send_s, whole_s, on_drop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, timeout=self._whole_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
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


async def begun(chunks: Chunks) -> Chunks:
    """The same chunks, the first of them made already: what goes wrong before it can still be answered."""
    first = await anext(chunks, b"")

    async def whole() -> Chunks:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return whole()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
