"""Files of a run as they are sent: to clients that are slow, that leave, and from a database that fails half way."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import psutil
import psycopg
import pytest
from sqlalchemy import Engine, text

from api_server import TOKEN, Served, serving
from db_samples import make_run, mismatch, some_records
from tandem.db.engine import connect
from tandem.db.sink import Sink
from tandem.records import EvaluationRecord
from tandem.vocabulary import Arm
from tandem_api.reads.store import EXPORTS_AT_ONCE
from tandem_api.routes import export

COPIES = """
INSERT INTO {table} SELECT copy.* FROM {table} one, generate_series(1, :rows) number,
  LATERAL jsonb_populate_record(one, jsonb_build_object('run_id', CAST(:run AS text), 'step', number)) copy
WHERE one.run_id = :template
"""
"""Of a run's one row of a table, each at a step of its own of another run."""


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = connect(database)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def api(database: str) -> Iterator[Served]:
    with serving(database) as served:
        yield served


@pytest.fixture(scope="module")
def long_run(database: str, tmp_path_factory: pytest.TempPathFactory) -> UUID:
    """A run with 3000 mismatches."""
    engine = connect(database)
    run = make_run(engine)
    with Sink(database, tmp_path_factory.mktemp("spool"), run, 1) as sink:
        for record in some_records(run, 3000):
            sink.put(record)
        assert sink.flush(60)
    engine.dispose()
    return run


def test_exports_that_are_read_slowly_hold_up_no_report_and_end(
    database: str, long_run: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are made at once, whose clients take nothing: reports are made meanwhile; their time comes, they are
    cut off where everybody sees that the file is not whole, and the next is served."""
    monkeypatch.setattr(export, "CHUNK", 4096)  # so that a small file does not fit into what lies between
    path = f"/v1/runs/{long_run}/export/mismatches"
    with serving(database, export_seconds=10) as api, ExitStack() as open_:
        (listening,) = api.server.servers[0].sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        lazy = [open_.enter_context(socket.socket()) for _ in range(EXPORTS_AT_ONCE)]
        for one in lazy:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(30)
            one.connect(("127.0.0.1", int(api.url.rsplit(":", 1)[1])))
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        for one in lazy:
            assert one.recv(12) == b"HTTP/1.1 200"
        assert api.client.get(f"/v1/runs/{long_run}/summary").status_code == 200
        assert api.app.state.parts.store._exports.locked(), "both are still under way"
        assert api.client.get(path).text.count("\n") == 3001
        exports = api.app.state.parts.store._exports
        deadline = time.monotonic() + 60
        while exports._value < EXPORTS_AT_ONCE:  # the time of the other, which began later, is over as well
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for one in lazy:
            rest = b""
            while piece := one.recv(1 << 16):
                rest += piece
            assert not rest.endswith(b"\r\n0\r\n\r\n"), "it does not look whole"


def test_an_export_whose_client_leaves_holds_nothing(api: Served, long_run: UUID) -> None:
    for _ in range(4):  # more than may be under way at once
        with api.client.stream("GET", f"/v1/runs/{long_run}/export/mismatches") as answer:
            next(answer.iter_bytes(10))
    text = api.client.get(f"/v1/runs/{long_run}/export/mismatches").text
    assert text.count("\n") == 3001


@pytest.mark.parametrize("format", ["csv", "parquet"])
@pytest.mark.parametrize("table", ["mismatches", "evaluations"])
def test_an_export_of_ten_times_the_rows_takes_no_more_memory(
    api: Served, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, format: str
) -> None:
    """Of the whole process, driver included; the parts are small against both runs. What is held to a Parquet file's
    end is its footer, some 40 KB for each part.
    """
    monkeypatch.setattr("tandem.export.BATCH", 500)
    monkeypatch.setattr(export, "CHUNK", 64 << 10)
    process = psutil.Process()

    def grows(rows: int) -> int:
        run = make_run(engine)
        with engine.begin() as conn:
            conn.execute(text(COPIES.format(table=table)), {"run": str(run), "rows": rows, "template": template})
        gc.collect()
        most = before = process.memory_info().rss
        with api.client.stream("GET", f"/v1/runs/{run}/export/{table}", params={"format": format}) as answer:
            assert answer.status_code == 200
            for _ in answer.iter_bytes():
                most = max(most, process.memory_info().rss)
        return most - before

    template = make_run(engine)
    with Sink(engine.url.render_as_string(hide_password=False), tmp_path, template, 1) as sink:
        sink.put(mismatch(template, 1))
        sink.put(
            EvaluationRecord(
                run_id=template, attempt=1, step=1, task="arc", question="q1", arm=Arm.SUSPECT, scores=[-1.0, -2.0],
                chosen=0, answer=1,
            )
        )  # fmt: skip
        assert sink.flush(30)
    grows(3000)  # what is made once
    small, large = grows(3000), grows(30_000)
    assert large < small + (8 << 20), (small, large)


@pytest.mark.parametrize("error", [RuntimeError("a secret"), psycopg.OperationalError("a secret")], ids=repr)
def test_an_error_in_the_middle_of_an_answer_cuts_it_off(
    api: Served, long_run: UUID, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not look whole, nothing of the error is in it, and the log has it."""
    path = f"/v1/runs/{long_run}/export/mismatches"

    def broken(pipe: Any, *_: Any) -> None:
        pipe.write(b"begun")
        pipe.flush_all()
        raise error

    monkeypatch.setattr(export, "write", broken)
    got = b""
    with api.client.stream("GET", path) as answer, pytest.raises(httpx2.RemoteProtocolError):  # noqa: PT012
        assert answer.status_code == 200
        for piece in answer.iter_bytes():
            got += piece
    assert got == b"begun"
    deadline = time.monotonic() + 30
    while not (told := [r for r in caplog.records if r.name == "tandem.api" and path in r.getMessage()]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(told) == 1
    monkeypatch.undo()
    while (again := api.client.get(path)).status_code == 503:  # a database that failed is left alone for a moment
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert again.text.count("\n") == 3001
