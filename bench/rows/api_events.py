"""Two hundred clients that watch live runs through one process of the API."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from uuid import UUID

import msgspec

from bench.api import Api, answered, lines, served
from bench.many_rows import begin_run, records
from bench.options import Options
from bench.results import Row, row
from bench.stats import Estimate, quantile
from bench.telling import tell
from tandem.db import writer
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect, open_connection
from tandem.records import Record, StepRecord

CLIENTS = 200
RUNS = 20
STEPS = 30
EVERY_S = 1.0
"""Between two steps of a run, each of which has mismatches; the runs take turns."""
BOUND_MS = 1000.0
BOUND_MB = 300.0
PATIENCE_S = 60.0


def measure(options: Options) -> list[Row]:
    """From the commit of a step's rows to the event with them at the last of the run's clients."""
    with embedded_database() as url:
        engine = connect(url)
        runs = [begin_run(engine, f"node-{number}") for number in range(RUNS)]
        with served(url) as api:
            delays = asyncio.run(_watched(api, url, runs))
            peak = api.peak_mb()
        engine.dispose()
    setting = options.setting(clients=CLIENTS, live_runs=RUNS, steps=len(delays))
    ms = [delay * 1e3 for delay in delays]
    return [
        row(
            "api_events.delay", "from a step's commit to its event at the last client, 99th percentile",
            quantile(ms, 0.99), setting, unit="ms", bound=BOUND_MS,
        ),
        row("api_events.delay_median", "the same, median", quantile(ms), setting, unit="ms"),
        row(
            "api_events.memory", "largest resident size of the API's process", Estimate(peak, peak, peak, 1), setting,
            unit="MB", bound=BOUND_MB,
        ),
    ]  # fmt: skip


async def _watched(api: Api, url: str, runs: Sequence[UUID]) -> list[float]:
    """Seconds of every step, at the last of its clients."""
    committed: dict[tuple[str, int], float] = {}
    seen: dict[tuple[str, int], list[float]] = {}
    connected = asyncio.Semaphore(0)

    async def client(run: str) -> None:
        reader, sender = await api.connect()
        sender.write(api.request(f"/v1/runs/{run}/events"))
        await answered(reader)
        connected.release()
        kind = b""
        async for line in lines(reader):
            if line.startswith(b"event: "):
                kind = line[7:]
            elif line.startswith(b"data: ") and kind == b"mismatches":
                now = time.perf_counter()
                step = int(msgspec.json.decode(line[6:])["step"])
                seen.setdefault((run, step), []).append(now)
                if step == STEPS:
                    break
        sender.close()

    watching = [asyncio.create_task(client(str(runs[number % RUNS]))) for number in range(CLIENTS)]
    for _ in watching:
        await asyncio.wait_for(connected.acquire(), PATIENCE_S)
    failed: list[BaseException] = []
    writing = threading.Thread(target=_write, args=(url, runs, committed, failed), daemon=True)
    writing.start()
    await asyncio.wait_for(asyncio.gather(*watching), STEPS * EVERY_S + PATIENCE_S)
    writing.join()
    if failed:
        raise failed[0]
    if any(len(at) != CLIENTS // RUNS for at in seen.values()) or seen.keys() != committed.keys():
        raise RuntimeError("a client missed an event, or was told twice")
    return [max(at) - committed[key] for key, at in seen.items()]


def _write(
    url: str, runs: Sequence[UUID], committed: dict[tuple[str, int], float], failed: list[BaseException]
) -> None:
    """As references do: a step's mismatches and then the step, in one transaction."""
    try:
        ready = {run: _by_step(records(run, STEPS, 3 * STEPS)) for run in runs}
        with open_connection(url) as conn:
            writer.prepare(conn)
            began = time.monotonic()
            for turn in range(STEPS * len(runs)):
                step, run = turn // len(runs) + 1, runs[turn % len(runs)]
                tell(f"step {step}/{STEPS}")
                time.sleep(max(0.0, began + turn * EVERY_S / len(runs) - time.monotonic()))
                writer.write(conn, [writer.line(record) for record in ready[run][step]])
                committed[str(run), step] = time.perf_counter()
            tell()
    except BaseException as error:
        failed.append(error)


def _by_step(made: Sequence[Record]) -> dict[int, list[Record]]:
    """Step -> its mismatches and then the step; without the closing."""
    out: dict[int, list[Record]] = {}
    for record in made:
        if step := getattr(record, "step", 0):
            out.setdefault(step, []).append(record)
    for records_of_one in out.values():
        records_of_one.sort(key=lambda record: isinstance(record, StepRecord))
    return out
