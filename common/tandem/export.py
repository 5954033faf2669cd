"""A run's rows as CSV or Parquet files, streamed: memory does not grow with the run.

One transaction reads all tables, so that the files agree with each other even while the run goes on.
A file appears under its name only when it is complete.

Files: ``runs`` (the run itself), ``attempts``, ``steps`` (one row a step), ``step_classes`` (one row a step and site
class), ``mismatches``, ``controls``, ``faults``, ``gradients``, ``drifts``, ``evaluations``, ``closings``: all that the
verdict is computed from. Columns are those of the records (``tandem.records``); times are UTC.
In CSV, an empty cell is NULL, and lists and objects are JSON; in Parquet, lists are lists and objects are JSON text.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, cast
from uuid import UUID

from tandem.errors import SetupError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

Format = Literal["csv", "parquet"]
Row = tuple[Any, ...]
BATCH = 5_000
"""Rows held in memory at once."""


@dataclass(frozen=True, slots=True)
class Table:
    """One exported file."""

    name: str
    source: str
    """Name of the database table."""
    columns: tuple[tuple[str, str], ...]
    """(name, type): ``int``, ``float``, ``str``, ``bool``, ``time``, ``ints``, ``floats``, ``boxes`` or ``json``."""
    expand: Callable[[Row], Iterator[Row]] | None = None
    """Makes the file's rows from one database row; None: as it is."""
    read: tuple[str, ...] = ()
    """Database columns read, if not ``columns``."""


_KEY = (("run_id", "str"), ("attempt", "int"), ("step", "int"))


def _expand_classes(row: Row) -> Iterator[Row]:
    *key, classes = row
    for name in sorted(classes):
        phase, module, tensor = name.split("/", 2)
        yield (*key, phase, module, tensor, *classes[name])


TABLES: tuple[Table, ...] = (
    Table(
        "runs",
        "runs",
        (
            ("run_id", "str"),
            ("created_at", "time"),
            ("workload", "str"),
            ("kind", "str"),
            ("model", "str"),
            ("synthetic", "bool"),
            ("reference_node", "str"),
            ("suspect_node", "str"),
            ("spec", "json"),
            ("state", "str"),
            ("verdict", "str"),
            ("reason", "str"),
            ("sentence", "str"),
            ("finished_at", "time"),
            ("records_dropped_at", "time"),
        ),
    ),
    Table(
        "attempts",
        "attempts",
        (
            ("run_id", "str"),
            ("attempt", "int"),
            ("state", "str"),
            ("started_at", "time"),
            ("ended_at", "time"),
            ("reason", "str"),
            ("fingerprint", "str"),
            ("parity", "json"),
            ("reference_host", "str"),
            ("suspect_host", "str"),
            ("devices", "int"),
        ),
    ),
    Table(
        "steps",
        "steps",
        (
            *_KEY,
            ("rows", "int"),
            ("loss_reference", "float"),
            ("loss_suspect", "float"),
            ("grad_norm_reference", "float"),
            ("grad_norm_suspect", "float"),
            ("duration_s", "float"),
            ("busy_s", "float"),
            ("link_bytes", "int"),
            ("full_bytes", "int"),
            ("window_max", "int"),
            ("generation", "int"),
            ("finished_at", "time"),
            ("sync", "str"),
        ),
    ),
    Table(
        "step_classes",
        "steps",
        (
            *_KEY,
            ("phase", "str"),
            ("module", "str"),
            ("tensor", "str"),
            ("sites", "int"),
            ("elements", "int"),
            ("mismatched_sites", "int"),
            ("mismatched_elements", "int"),
        ),
        _expand_classes,
        ("run_id", "attempt", "step", "classes"),
    ),
    Table(
        "mismatches",
        "mismatches",
        (
            *_KEY,
            ("site", "int"),
            ("rank", "int"),
            ("phase", "str"),
            ("module", "str"),
            ("layer", "int"),
            ("tensor", "str"),
            ("cause", "str"),
            ("elements", "int"),
            ("mismatched", "int"),
            ("severity_mean", "float"),
            ("severity_median", "float"),
            ("severity_max", "float"),
            ("zero_reference", "int"),
            ("nonfinite", "int"),
            ("nullified", "int"),
            ("bits", "ints"),
            ("first_index", "int"),
            ("extent", "str"),
            ("box", "boxes"),
            ("replay", "str"),
            ("replays", "int"),
            ("replays_right", "int"),
            ("generation", "int"),
            ("detected_at", "time"),
        ),
    ),
    Table(
        "controls",
        "controls",
        (
            ("run_id", "str"),
            ("attempt", "int"),
            ("name", "str"),
            ("role", "str"),
            ("step", "int"),
            ("subject", "str"),
            ("ok", "bool"),
            ("repeats", "int"),
            ("detail", "json"),
        ),
    ),
    Table(
        "faults",
        "faults",
        (
            *_KEY,
            ("site", "int"),
            ("rank", "int"),
            ("level", "str"),
            ("changed", "int"),
            ("elements", "ints"),
        ),
    ),
    Table(
        "gradients",
        "gradients",
        (
            *_KEY,
            ("leaf", "str"),
            ("noise", "float"),
            ("signal", "float"),
            ("suspect", "float"),
            ("cosine", "float"),
            ("elements", "int"),
            ("mismatched", "int"),
        ),
    ),
    Table(
        "drifts",
        "drifts",
        (
            *_KEY,
            ("arm", "str"),
            ("part", "str"),
            ("method", "str"),
            ("drift", "float"),
            ("norm", "float"),
            ("error", "float"),
            ("loss", "float"),
            ("grad_norm", "float"),
        ),
    ),
    Table(
        "evaluations",
        "evaluations",
        (
            *_KEY,
            ("task", "str"),
            ("question", "str"),
            ("arm", "str"),
            ("scores", "floats"),
            ("chosen", "int"),
            ("answer", "int"),
        ),
    ),
    Table(
        "closings",
        "closings",
        (
            ("run_id", "str"),
            ("attempt", "int"),
            ("steps", "int"),
            ("mismatches", "int"),
            ("mismatches_total", "int"),
            ("controls", "int"),
            ("faults", "int"),
            ("gradients", "int"),
            ("drifts", "int"),
            ("evaluations", "int"),
            ("capped", "bool"),
            ("reason", "str"),
            ("device_seconds", "float"),
            ("devices", "json"),
            ("finished_at", "time"),
        ),
    ),
)


class Sink(Protocol):
    """What a file is written into."""

    def write(self, data: Any, /) -> int: ...


class _Writer(Protocol):
    def write(self, rows: list[Row]) -> None: ...
    def close(self) -> None: ...


def export_run(engine: Engine, run_id: UUID, directory: Path, format: Format) -> dict[Path, int]:
    """Write the files of one run into ``directory`` (made if missing); files of the same names are replaced.

    Returns:
        File -> number of rows.

    Raises:
        SetupError: the directory cannot be written or the disk is full.
    """
    counts: dict[Path, int] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            for table in TABLES:
                path = directory / f"{table.name}.{format}"
                counts[path] = _write(path, table, batches(connection, table, run_id), format)
    except OSError as error:
        raise SetupError(f"cannot write to {directory}: {error.strerror}: choose another folder with -o") from error
    return counts


def batches(connection: Connection, table: Table, run_id: UUID) -> Generator[list[Row]]:
    """The rows of one table in key order, at most `BATCH` database rows at a time, through a server-side cursor."""
    from sqlalchemy import select

    from tandem.db.models import Base

    source = Base.metadata.tables[table.source]
    wanted = table.read or tuple(name for name, _ in table.columns)
    # run_id is fixed, so the rest of the primary key is the order, and no row can move between two exports.
    order = [c for c in source.primary_key.columns if c.name != "run_id"]
    query = select(*(source.c[name] for name in wanted)).where(source.c.run_id == run_id).order_by(*order)
    with connection.execution_options(yield_per=BATCH).execute(query) as result:
        for part in result.partitions():
            rows = [tuple(_plain(v) for v in row) for row in part]
            yield rows if table.expand is None else [out for row in rows for out in table.expand(row)]


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _write(path: Path, table: Table, parts: Iterator[list[Row]], format: Format) -> int:
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as sink:
            written = write(sink, table, parts, format)
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return written


def write(sink: Sink, table: Table, parts: Iterable[list[Row]], format: Format) -> int:
    """Write one table as a whole file into what takes bytes; returns the number of rows.

    Args:
        sink: where to; it is only ever appended to, and stays open.
        table: which.
        parts: its rows, as from `batches`.
        format: of the file.
    """
    writer: _Writer = (_Csv if format == "csv" else _Parquet)(sink, table)
    written = 0
    try:
        for rows in parts:
            writer.write(rows)
            written += len(rows)
    finally:
        writer.close()
    return written


class _Csv:
    def __init__(self, sink: Sink, table: Table) -> None:
        self._file = io.TextIOWrapper(cast(BinaryIO, sink), encoding="utf-8", newline="", write_through=True)
        self._csv = csv.writer(self._file, lineterminator="\n")
        self._csv.writerow([name for name, _ in table.columns])

    def write(self, rows: list[Row]) -> None:
        self._csv.writerows([_cell(v) for v in row] for row in rows)

    def close(self) -> None:
        self._file.flush()
        self._file.detach()


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)
        case datetime():
            return value.isoformat()
        case list() | dict():
            return json.dumps(value, sort_keys=True)
        case _:
            return str(value)


class _Parquet:
    def __init__(self, sink: Sink, table: Table) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {
            "int": pa.int64(),
            "float": pa.float64(),
            "str": pa.string(),
            "bool": pa.bool_(),
            "time": pa.timestamp("us", tz="UTC"),
            "ints": pa.list_(pa.int64()),
            "floats": pa.list_(pa.float64()),
            "boxes": pa.list_(pa.list_(pa.int64())),
            "json": pa.string(),
        }
        self._pa = pa
        self._json = [kind == "json" for _, kind in table.columns]
        self._schema = pa.schema([(name, types[kind]) for name, kind in table.columns])
        self._file = pq.ParquetWriter(pa.PythonFile(sink, mode="w"), self._schema, compression="zstd")

    def write(self, rows: list[Row]) -> None:
        if not rows:
            return
        arrays = [
            self._pa.array(
                [json.dumps(v, sort_keys=True) if as_json and v is not None else v for v in column], type=field.type
            )
            for column, as_json, field in zip(zip(*rows, strict=True), self._json, self._schema, strict=True)
        ]
        self._file.write_table(self._pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._file.close()
