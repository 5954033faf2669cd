"""Replays the spools that ended processes left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from tandem.db import writer
from tandem.db.engine import open_connection, unreachable
from tandem.db.sink import BATCH_RECORDS, POISON, decoder
from tandem.db.spool import SUFFIX, SegmentReader, SpoolCorruptError
from tandem.records import Record

QUARANTINE = "quarantine"


@dataclass(slots=True)
class ReplayReport:
    """What a replay did."""

    replayed: list[Path] = field(default_factory=list)
    """Segments that are stored now, and removed."""
    records: int = 0
    """Records in them."""
    rows: int = 0
    """Of those, rows that were new."""
    busy: list[Path] = field(default_factory=list)
    """Their writer lives."""
    foreign: list[Path] = field(default_factory=list)
    """Their run or attempt is not in this database (yet): they wait for one that knows it."""
    expired: list[Path] = field(default_factory=list)
    """Removed: retention had dropped their run's records."""
    quarantined: list[Path] = field(default_factory=list)
    """Damaged or refused; everything readable and acceptable in them is stored. Never looked at again."""


def replay_spools(url: str, folder: Path) -> ReplayReport:
    """Store what lies in ``folder``. Safe to repeat, to interrupt, and to run twice at once.

    Memory holds one batch at a time. A damaged segment is moved to the folder ``quarantine``, after everything in front
    of the damage was stored.

    Raises:
        DatabaseError: the database failed; the segments stay for the next replay.
    """
    report = ReplayReport()
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        return report
    try:
        with open_connection(url) as conn:
            writer.prepare(conn)
            for path in paths:
                try:
                    reader = SegmentReader.open(path)
                except FileNotFoundError:
                    continue
                if reader is None:
                    report.busy.append(path)
                    continue
                try:
                    _replay(conn, reader, report)
                finally:
                    reader.close()
    except psycopg.Error as error:
        raise unreachable(url, error) from None
    return report


def _replay(conn: psycopg.Connection[Any], reader: SegmentReader, report: ReplayReport) -> None:
    path = reader.path
    if reader.run_id is not None:
        row = conn.execute("SELECT records_dropped_at FROM runs WHERE run_id = %s", [reader.run_id]).fetchone()
        conn.commit()
        if row is None or not writer.attempt_stored(conn, reader.run_id, reader.attempt):
            report.foreign.append(path)
            return
        if row[0] is not None:
            path.unlink()
            report.expired.append(path)
            return
    refused = 0
    damaged = False
    records = _decoded(reader)
    while True:
        batch: list[Record] = []
        try:
            for record in islice(records, BATCH_RECORDS):
                batch.append(record)  # noqa: PERF402 - keeps what came before the damage
        except (SpoolCorruptError, msgspec.MsgspecError):
            damaged = True
        if batch:
            new, bad = _write(conn, batch)
            report.records += len(batch) - bad
            report.rows += new
            refused += bad
        if damaged or len(batch) < BATCH_RECORDS:
            break
    if damaged or refused:
        target = path.parent / QUARANTINE / f"{path.name}.{time.time_ns()}"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        path.rename(target)
        report.quarantined.append(target)
    else:
        path.unlink()
        report.replayed.append(path)


def _decoded(reader: SegmentReader) -> Iterator[Record]:
    for payload in reader.payloads():
        yield decoder.decode(payload)


def _write(conn: psycopg.Connection[Any], batch: list[Record]) -> tuple[int, int]:
    """Rows that were new, and records that PostgreSQL will never take."""
    try:
        return writer.write(conn, [writer.line(record) for record in batch]), 0
    except psycopg.Error as error:
        if (error.sqlstate or "")[:2] not in POISON:
            raise
        if len(batch) == 1:
            return 0, 1
        half = len(batch) // 2
        first, second = _write(conn, batch[:half]), _write(conn, batch[half:])
        return first[0] + second[0], first[1] + second[1]
