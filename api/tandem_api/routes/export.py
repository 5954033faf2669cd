"""A run's tables as files, streamed: a thread writes, the connection takes, and little lies in between."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator
from contextlib import closing, suppress
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from tandem.export import TABLES, batches, write
from tandem_api.parts import AppParts, CanGet
from tandem_api.problems import not_found
from tandem_api.reads.records import exists
from tandem_api.reads.store import DRIVER, Store
from tandem_api.routes.common import READ, RunId, problems
from tandem_api.streamed import Streamed, begun

router = APIRouter(prefix="/v1/runs", tags=["export"])
BY_NAME = {table.name: table for table in TABLES}
TableName = StrEnum("TableName", {name: name for name in BY_NAME})  # type: ignore[misc]
CHUNK = 256 << 10
"""Bytes gathered before they are sent."""
WAITING = 4
"""Chunks that wait for a slow client; then the thread, and with it the database's cursor, waits too."""
PATIENCE_S = 60.0
"""How long it waits for a client that takes nothing."""
MEDIA = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}


class FileFormat(StrEnum):
    CSV = "csv"
    PARQUET = "parquet"


@router.get(
    "/{run_id}/export/{table}",
    response_class=Response,
    responses={
        200: {
            "description": "The table as a file, in the order of its key: as `tandem export`; cut off if it "
            "cannot be read to its end.",
            "content": {
                "text/csv": {"schema": {"type": "string"}},
                MEDIA["parquet"]: {"schema": {"type": "string", "format": "binary"}},
            },
        },
        **problems(404, *READ),
    },
)
async def export_table(
    parts: AppParts,
    _: CanGet,
    run_id: RunId,
    table: Annotated[TableName, Path(description="Which table.")],
    format: Annotated[FileFormat, Query(description="Kind of the file.")] = FileFormat.CSV,
) -> Response:
    """One table of a run as CSV or Parquet; memory does not grow with the run."""
    if not await parts.store.ask(exists, run_id):
        raise not_found(f"run {run_id}")
    name = f"tandem-{run_id}-{table.value}.{format.value}"
    chunks = await begun(stream(parts.store, run_id, table.value, format))
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Streamed(
        chunks, MEDIA[format.value], send_s=PATIENCE_S, whole_s=parts.settings.export_seconds, headers=headers
    )


class Stopped(Exception):  # noqa: N818
    """The client has gone."""


class _Pipe:
    """What the writing thread writes into."""

    closed = False

    def __init__(self) -> None:
        self.chunks: queue.Queue[bytes | BaseException | None] = queue.Queue(WAITING)
        self.stopped = threading.Event()
        self._gathered = bytearray()

    def write(self, data: Any, /) -> int:
        raw = bytes(data)
        self._gathered += raw
        if len(self._gathered) >= CHUNK:
            self.flush_all()
        return len(raw)

    def flush_all(self) -> None:
        if self._gathered:
            self.put(bytes(self._gathered))
            self._gathered.clear()

    def put(self, item: bytes | BaseException | None) -> None:
        waited = 0.0
        while not self.stopped.is_set():
            try:
                self.chunks.put(item, timeout=0.5)
                return
            except queue.Full:
                waited += 0.5
                if waited > PATIENCE_S:
                    break
        raise Stopped

    def take(self) -> bytes | BaseException | None:
        """The next chunk; never waits for one that will not come."""
        while not self.stopped.is_set():
            with suppress(queue.Empty):
                return self.chunks.get(timeout=0.5)
        return None

    # What the file protocols ask for besides.
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Chunks are sent when they are large enough."""


async def stream(store: Store, run_id: UUID, name: str, format: FileFormat) -> AsyncGenerator[bytes, None]:
    """The file, chunk by chunk."""
    pipe = _Pipe()
    table = BY_NAME[name]
    async with store.snapshot() as conn:

        def work() -> None:
            try:
                with closing(batches(conn, table, run_id)) as rows:
                    write(pipe, table, rows, format.value)
                pipe.flush_all()
                pipe.put(None)
            except Stopped:
                return
            except BaseException as error:
                with suppress(Stopped):
                    pipe.put(error)

        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            while (chunk := await asyncio.to_thread(pipe.take)) is not None:
                if isinstance(chunk, BaseException):
                    raise (
                        store.problem(chunk) if isinstance(chunk, DRIVER) else chunk
                    )  # after the first chunk it can only be cut off
                yield chunk
        finally:
            pipe.stopped.set()
            await asyncio.shield(thread)
