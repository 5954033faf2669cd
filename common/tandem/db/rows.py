"""Records as lines of PostgreSQL's COPY text format, and stored rows as records again.

The columns of a table are the fields of its record; the text form of a column follows from its SQL type. A line
costs a few microseconds: the encoders that look odd (numbers by JSON, times left to the server) are the fast ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import Boolean, DateTime, Double, Integer, Row, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.sql.type_api import TypeEngine

from tandem.db import models
from tandem.records import (
    ClosingRecord,
    ControlRecord,
    DriftRecord,
    EvaluationRecord,
    FaultRecord,
    GradientRecord,
    MismatchRecord,
    Record,
    StepRecord,
)

_NULL = "\\N"
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\x00": "\ufffd"})
_NEEDS_ESCAPE = re.compile(r"[\\\t\n\r\x00]")
_JSON_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_json = msgspec.json.Encoder()


def _text(value: str) -> str:
    """PostgreSQL's text cannot hold NUL: it becomes U+FFFD."""
    return value.translate(_ESCAPES) if _NEEDS_ESCAPE.search(value) else value


def _to_json(value: Any) -> str:
    """JSON has no NaN (msgspec writes null), and PostgreSQL's cannot hold NUL."""
    text = _json.encode(value).decode()
    if "\\" in text:
        text = _JSON_NUL.sub("\\1\\\\ufffd", text).replace("\\", "\\\\")
    return text


def _bool(value: bool) -> str:
    return "t" if value else "f"


def _numbers(value: Sequence[int]) -> str:
    return "{" + _json.encode(value)[1:-1].decode() + "}"


def _floats(value: Sequence[float]) -> str:
    # PostgreSQL reads Python's nan and inf; JSON has neither.
    return "{" + ",".join(map(repr, value)) + "}"


def _texts(value: Sequence[str]) -> str:
    quoted = ('"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"' for item in value)
    return _text("{" + ",".join(quoted) + "}")


def _encoder(kind: TypeEngine[Any]) -> Callable[[Any], str]:
    if isinstance(kind, ARRAY):
        return (
            _texts if isinstance(kind.item_type, Text) else _floats if isinstance(kind.item_type, Double) else _numbers
        )
    table: tuple[tuple[type, Callable[[Any], str]], ...] = (
        (JSONB, _to_json),
        (DateTime, repr),
        (Boolean, _bool),
        (Integer, str),
        (Double, repr),
        (Uuid, lru_cache(maxsize=64)(str)),
        (Text, _text),
    )
    return next(encode for cls, encode in table if isinstance(kind, cls))


@dataclass(frozen=True, slots=True)
class Layout:
    """How one type of record lies in its table."""

    record: type[Any]
    table: Table
    columns: tuple[str, ...]
    times: frozenset[str]
    """Columns that are times: their text form is seconds since the epoch, and the server converts it."""
    encoders: tuple[Callable[[Any], str], ...]
    fields: Callable[[Any], tuple[Any, ...]]

    def line(self, record: Record) -> str:
        """One line of COPY's text format, newline included."""
        values = [
            _NULL if value is None else encode(value)
            for encode, value in zip(self.encoders, self.fields(record), strict=True)
        ]
        return "\t".join(values) + "\n"

    def restore(self, row: Row[Any]) -> Any:
        """The record of a stored row."""
        return msgspec.convert(
            {name: _plain(value) for name, value in zip(self.columns, row, strict=True)}, self.record, strict=False
        )


def _plain(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else value


def _layout(record: type[Any], model: type[models.Base]) -> Layout:
    table = model.__table__
    assert isinstance(table, Table)
    columns = tuple(record.__struct_fields__)
    encoders = tuple(_encoder(table.columns[name].type) for name in columns)
    times = frozenset(name for name in columns if isinstance(table.columns[name].type, DateTime))
    return Layout(record, table, columns, times, encoders, attrgetter(*columns))


LAYOUTS: dict[type[Any], Layout] = {
    record: _layout(record, model)
    for record, model in (
        (StepRecord, models.Step),
        (MismatchRecord, models.Mismatch),
        (ControlRecord, models.Control),
        (FaultRecord, models.Fault),
        (GradientRecord, models.Gradient),
        (DriftRecord, models.Drift),
        (EvaluationRecord, models.Evaluation),
        (ClosingRecord, models.Closing),
    )
}
"""By type of record, in the order in which a batch is written: the closing record last."""
