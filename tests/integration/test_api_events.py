"""The live stream, from rows that a real sink writes to what a client on a real socket reads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from api_server import TOKEN, SentEvent, Served, is_problem, serving, watching
from db_samples import make_run, mismatch, some_records, step
from tandem.db import store
from tandem.db.engine import open_connection
from tandem.db.sink import Sink
from tandem.records import Record
from tandem.vocabulary import AttemptState
from tandem_api.live.events import AFTER_ROWS, AFTER_STEPS, LAST, ROWS, Place, place
from tandem_api.live.read import BATCH

FAST = {"poll_seconds": 0.05, "ping_seconds": 0.2}


@pytest.fixture
def api(database_url: str) -> Iterator[Served]:
    with serving(database_url, events=FAST) as served:
        yield served


class Writer:
    """What a reference worker and its supervisor would write of one run."""

    def __init__(self, engine: Engine, spool: Path) -> None:
        self.engine = engine
        self.run = make_run(engine)
        self.sink = Sink(engine.url.render_as_string(hide_password=False), spool, self.run, 1)

    def put(self, *records: Record) -> None:
        for record in records:
            self.sink.put(record)
        assert self.sink.flush(30)

    def steps(self, first: int, last: int, rows: int = 1) -> None:
        for number in range(first, last + 1):
            self.put(*(mismatch(self.run, number, site) for site in range(rows)), step(self.run, number))

    def finish(self) -> None:
        self.put(*[r for r in some_records(self.run, 0) if type(r).__name__ in ("ControlRecord", "ClosingRecord")])
        assert self.sink.close(30)
        now = time.time()
        store.finish_attempt(self.engine, self.run, 1, state=AttemptState.CLOSED, reason="completed", ended_at=now)
        store.finish_run(self.engine, self.run, verdict="mismatch", reason="completed", sentence="s", finished_at=now)


@pytest.fixture
def writer(engine: Engine, tmp_path: Path) -> Iterator[Writer]:
    made = Writer(engine, tmp_path)
    yield made
    made.sink.close(30)


def until(events: Iterator[SentEvent], kind: str, step: int | None = None) -> list[SentEvent]:
    """Events up to the first of a kind (and step)."""
    out = []
    for event in events:
        out.append(event)
        if event.kind == kind and (step is None or event.data["step"] >= step):
            return out
    raise AssertionError(f"the stream ended first: {out[-3:]}")


def rows(events: list[SentEvent]) -> list[tuple[int, int]]:
    return [(m["step"], m["site"]) for e in events if e.kind == "mismatches" for m in e.data["mismatches"]]


def test_a_run_is_seen_as_it_happens_and_to_its_verdict(api: Served, writer: Writer) -> None:
    with watching(api, writer.run) as stream:
        assert [e.kind for e in until(stream, "attempt")] == ["attempt"]
        writer.steps(1, 3)
        first = until(stream, "progress", 3)
        writer.steps(4, 6, rows=2)
        second = until(stream, "progress", 6)
        writer.finish()
        last = until(stream, "verdict")
        assert next(stream, None) is None, "the stream ends after the verdict"
    assert rows(first + second) == [(s, 0) for s in (1, 2, 3)] + [(s, n) for s in (4, 5, 6) for n in (0, 1)]
    progress = second[-1].data
    assert (progress["step"], progress["mismatched_elements"]) == (6, 18)
    assert last[-2].data["state"] == "closed"
    assert (last[-1].data["verdict"], last[-1].data["sentence"]) == ("mismatch", "s")
    answer = api.client.get(f"/v1/runs/{writer.run}/events", headers={"Last-Event-ID": last[-1].id or ""})
    assert answer.status_code == 204


def test_a_client_that_comes_back_goes_on_exactly_where_it_was(api: Served, writer: Writer) -> None:
    """From every event of the whole stream: what follows is what followed, also in another process."""
    writer.steps(1, 3, rows=2 * ROWS + 7)
    writer.steps(4, 5)
    writer.finish()
    with watching(api, writer.run) as stream:
        whole = [e for e in stream if e.id is not None]
    assert len(rows(whole)) == 3 * (2 * ROWS + 7) + 2
    assert rows(whole) == sorted(set(rows(whole)))
    ids = [e.id for e in whole]
    assert ids == sorted(ids, key=lambda text: place(text or "") or Place())
    api.stop()
    with serving(writer.engine.url.render_as_string(hide_password=False), events=FAST) as other:
        for number, event in enumerate(whole[:-1]):
            with watching(other, writer.run, event.id) as stream:
                assert [(e.id, e.data) for e in stream if e.id is not None] == [
                    (e.id, e.data) for e in whole[number + 1 :]
                ]


def test_more_rows_than_fit_one_answer_of_the_database(api: Served, writer: Writer) -> None:
    """A step with many more rows than one batch, between small ones: all of them, once, in order."""
    many = 2 * BATCH + 123
    writer.steps(1, 2, rows=3)
    writer.steps(3, 3, rows=many)
    writer.steps(4, 4, rows=2)
    writer.finish()
    with watching(api, writer.run) as stream:
        found = rows(list(stream))
    assert found == [(s, n) for s, count in ((1, 3), (2, 3), (3, many), (4, 2)) for n in range(count)]


def test_clients_share_one_poller(api: Served, writer: Writer) -> None:
    """Thirty clients, all see everything; the database is asked no more often than for one."""
    count = 30
    seen: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    ready = threading.Barrier(count + 1, timeout=60)

    def watch(number: int) -> None:
        with watching(api, writer.run) as stream:
            until(stream, "attempt")
            ready.wait()
            seen[number] = rows(until(stream, "verdict"))

    threads = [threading.Thread(target=watch, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    ready.wait()
    assert api.app.state.parts.hub.clients == count
    asked = _asked(api)
    writer.steps(1, 5)
    writer.finish()
    for thread in threads:
        thread.join(60)
    assert seen == [[(s, 0) for s in range(1, 6)]] * count
    assert _asked(api) - asked < 200
    deadline = time.monotonic() + 60
    while api.app.state.parts.hub.clients:  # the server ends a stream a moment after its client has seen the end
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _asked(api: Served) -> int:
    """Questions to the pool so far."""
    store_ = api.app.state.parts.store
    if not hasattr(store_, "count"):
        store_.count, inner = 0, store_.ask

        async def ask(*args: object, **more: object) -> object:
            store_.count += 1
            return await inner(*args, **more)

        store_.ask = ask
    return int(store_.count)


def test_a_client_that_reads_nothing_is_dropped_and_loses_nothing(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    """Its socket fills up; the others see everything meanwhile; when it comes back it goes on behind its last event."""
    writer = Writer(engine, tmp_path)
    slow = {"poll_seconds": 0.05, "send_seconds": 0.5, "kept": 10}
    with serving(database_url, events=slow) as api, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(30)
        lazy.connect(("127.0.0.1", int(api.url.rsplit(":", 1)[1])))
        head = f"GET /v1/runs/{writer.run}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        lazy.sendall(head.encode())
        for number in range(1, 16):
            writer.steps(number, number, rows=1000)
        writer.finish()
        with watching(api, writer.run) as stream:
            everything = list(stream)
        assert len(rows(everything)) == 15_000
        deadline = time.monotonic() + 60
        while not (dropped := api.app.state.parts.metrics.dropped._value.get()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert dropped == 1
        received = b""
        try:
            while piece := lazy.recv(1 << 16):
                received += piece
        except OSError:
            pass
        got = received.decode(errors="ignore").split("\n\n")[:-1]
        last = [line[4:] for block in got for line in block.splitlines() if line.startswith("id: ")][-1].strip()
        seen = place(last)
        assert seen is not None
        # It may be of a progress that whoever came later was not told: a later one contains it.
        behind = [e.id for e in everything if e.id is not None and (place(e.id) or Place()) > seen]
        with watching(api, writer.run, last) as stream:
            assert [e.id for e in stream if e.id is not None] == behind


def test_the_database_goes_away_and_comes_back(api: Served, writer: Writer, database_url: str) -> None:
    """The stream says so, stays open, and goes on."""
    name = database_url.rsplit("/", 1)[1].partition("?")[0]
    with watching(api, writer.run) as stream:
        writer.steps(1, 1)
        until(stream, "progress", 1)
        with open_connection(database_url.replace(f"/{name}", "/postgres", 1)) as admin:
            admin.autocommit = True
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
            assert until(stream, "database")[-1].data == {"answers": False}
            is_problem(api.client.get("/v1/runs"), 503, "database-away")
            answer = api.client.get(f"/v1/runs/{writer.run}/summary")
            is_problem(answer, 503, "database-away")
            assert int(answer.headers["retry-after"]) > 0
            is_problem(api.client.get("/readyz"), 503, "not-ready")
            assert api.client.get("/healthz").status_code == 200
            assert api.client.get("/v1/presets").status_code == 200
            made = api.client.post("/v1/runs", json={"spec": {"steps": 1, "tp": 1}})
            assert made.status_code == 202, "intent does not need the database"
            api.client.post(f"/v1/runs/{made.json()['run']}/cancel")
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        assert until(stream, "database")[-1].data == {"answers": True}
        writer.steps(2, 2)
        assert rows(until(stream, "progress", 2)) == [(2, 0)]


def test_the_server_ends_its_streams_when_it_ends(api: Served, writer: Writer) -> None:
    with watching(api, writer.run) as stream:
        until(stream, "attempt")
        began = time.monotonic()
        api.server.should_exit = True
        assert next(stream, None) is None
    assert time.monotonic() - began < 4


def test_too_many_streams_are_refused(database_url: str, engine: Engine) -> None:
    run = make_run(engine)
    with serving(database_url, events=FAST | {"clients": 2}) as api:
        with watching(api, run) as one, watching(api, run) as two:
            until(one, "attempt")
            until(two, "attempt")
            is_problem(api.client.get(f"/v1/runs/{run}/events"), 503, "too-many-streams")
        deadline = time.monotonic() + 30
        while api.app.state.parts.hub.clients:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with watching(api, run) as stream:
            until(stream, "attempt")


def test_rows_of_a_step_that_never_ended_come_with_the_end_of_its_attempt(api: Served, writer: Writer) -> None:
    writer.steps(1, 1)
    writer.put(mismatch(writer.run, 2))
    with watching(api, writer.run) as stream:
        assert rows(until(stream, "progress", 1)) == [(1, 0)]
        store.finish_attempt(
            writer.engine, writer.run, 1, state=AttemptState.ORPHANED, reason="reference_died", ended_at=time.time()
        )
        found = until(stream, "attempt")
    assert rows(found) == [(2, 0)]
    assert found[-1].data["reason"] == "reference_died"


def test_an_id_that_the_run_has_not_reached_costs_nobody_anything(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    """Whoever comes first with one, by mistake or not: it waits, others see the run, and the database is asked as
    often as the poller's clock says. A place that no event has would else be what the run is read from."""
    period = 0.5
    with serving(database_url, events={"poll_seconds": period, "ping_seconds": 0.2}) as api:
        for beyond in (f"{LAST - 1}.0.0", "1.7.3", "1.-1.2"):
            writer = Writer(engine, tmp_path / beyond)
            path, headers = f"/v1/runs/{writer.run}/events", {"Last-Event-ID": beyond}
            with api.client.stream("GET", path, headers=headers) as first, watching(api, writer.run) as stream:
                waits = (line for line in first.iter_lines() if line == ": alive")
                next(waits)
                until(stream, "attempt")
                asked, began = _asked(api), time.monotonic()
                for _ in range(4):
                    next(waits)
                # Polls come at least half a period apart.
                assert _asked(api) - asked < 2 * (time.monotonic() - began) / period + 5, beyond
                writer.steps(1, 1)
                assert rows(until(stream, "progress", 1)) == [(1, 0)]
                writer.finish()
                until(stream, "verdict")


PLACES = st.builds(
    Place, st.integers(0, LAST), st.integers(-1, AFTER_STEPS), st.integers(0, AFTER_ROWS)
)  # fmt: skip


@given(PLACES)
def test_a_place_survives_its_text(at: Place) -> None:
    assert place(str(at)) == at


@given(st.text(max_size=40))
def test_other_text_is_no_place(text: str) -> None:
    found = place(text)
    assert found is None or place(str(found)) == found
