"""Rows of ``bench/results.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.stats import Estimate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results.json"

Sense = Literal["at most", "at least"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured quantity."""

    name: str
    """``<bench>.<what>``."""
    what: str
    """One line for people."""
    value: float
    unit: str
    bound: float | None
    """What it must reach; None: shown only."""
    sense: Sense | None
    ok: bool | None
    """False only where the 95 % bound of the estimate lies beyond the bound."""
    runs: int
    """Measurements behind the value (for a ratio: pairs)."""
    spread: tuple[float, float]
    """One-sided 95 % bounds of the value; for a largest value the smallest and the largest run."""
    setting: dict[str, Any]


def row(
    name: str,
    what: str,
    estimate: Estimate,
    setting: dict[str, Any],
    *,
    unit: str = "ratio",
    bound: float | None = None,
    sense: Sense = "at most",
) -> Row:
    """A row that judges itself."""
    ok = None
    if bound is not None:
        ok = estimate.low <= bound if sense == "at most" else estimate.high >= bound
    return Row(
        name=name, what=what, value=estimate.value, unit=unit, bound=bound, sense=None if bound is None else sense,
        ok=ok, runs=estimate.runs, spread=(estimate.low, estimate.high), setting=setting,
    )  # fmt: skip


def load(path: Path = RESULTS) -> list[Row]:
    """Rows of an earlier run; none without the file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else []


def replace(old: Sequence[Row], bench: str, new: Sequence[Row]) -> list[Row]:
    """All rows with those of one bench replaced, in the order of the benches."""
    from bench.rows import BENCHES

    order = list(BENCHES)
    rows = [r for r in old if r.name.split(".")[0] not in (bench, *(set(_benches(old)) - set(order)))]
    return sorted([*rows, *new], key=lambda r: order.index(r.name.split(".")[0]))


def _benches(rows: Sequence[Row]) -> list[str]:
    return [r.name.split(".")[0] for r in rows]


def save(rows: Sequence[Row], path: Path = RESULTS) -> None:
    """Write all rows, rounded to six significant digits: more would be noise in the file's history."""
    data = [msgspec.to_builtins(r) for r in rows]
    for item in data:
        item["value"] = _rounded(item["value"])
        item["spread"] = [_rounded(v) for v in item["spread"]]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
