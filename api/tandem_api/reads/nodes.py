"""Profiles of nodes: computed from all their runs, and therefore kept as long as the rows behind them are the same."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from sqlalchemy import Connection

from tandem.db.node_rows import NodeRows, rows_of_node
from tandem.db.nodes import profile_from
from tandem.errors import UsageError
from tandem.nodes.as_json import to_json
from tandem.nodes.profile import NodeProfile
from tandem_api.problems import not_found
from tandem_api.reads.store import Store

KEPT_RUNS = 4000
"""Runs of all kept nodes together: some 40 MB."""


@dataclass(frozen=True)
class Item:
    """A line of a node's history."""

    key: tuple[float, str]
    """Its place, the oldest first."""
    line: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What is told of a node."""

    rows: NodeRows
    """That it was made of."""
    profile: bytes
    """As `tandem node NAME --json`, in JSON."""
    history: Sequence[Item]
    """The newest first."""


class Nodes:
    """Every question reads the node's rows, in one snapshot; only what is computed from them is kept.

    Args:
        store: the database.
        kept_runs: how many runs the kept nodes may have together.
    """

    def __init__(self, store: Store, kept_runs: int = KEPT_RUNS) -> None:
        self._store, self._most = store, kept_runs
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def of(self, name: str) -> Answer:
        """What is told of a node now.

        Raises:
            Problem: 404: no run names it; or as the store's.
        """
        seen = await self._store.ask(rows_of, name)
        async with self._making.setdefault(name, asyncio.Lock()):  # many ask for the same
            answer = self._kept.get(name)
            if answer is None or answer.rows != seen:
                answer = await self._store.whole(_made, name)
                self._kept[name] = answer
            self._kept.move_to_end(name)
            self._forget()
        return answer

    def _forget(self) -> None:
        runs = sum(len(kept.history) for kept in self._kept.values())
        while runs > self._most and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            runs -= len(oldest.history)


def rows_of(conn: Connection, name: str) -> NodeRows:
    """A node's rows.

    Raises:
        Problem: 404: no run names it.
    """
    try:
        return rows_of_node(conn, name)
    except UsageError:
        raise not_found(f"node {name} in the records") from None


def load_node(conn: Connection, name: str) -> NodeProfile:
    """A node's profile, computed anew.

    Raises:
        Problem: 404: no run names it.
    """
    return profile_from(conn, rows_of(conn, name))


def _made(conn: Connection, name: str) -> Answer:
    rows = rows_of(conn, name)
    profile = to_json(profile_from(conn, rows))
    items = [Item((run["created_at"], run["run"]), {"what": "run", "at": run["created_at"], "run": run})
             for run in profile["runs"]]  # fmt: skip
    # Decisions have no id outside: their place among those of the same node is one.
    items += [
        Item((d["decided_at"], f"decision {len(profile['decisions']) - number:09}"),
             {"what": "decision", "at": d["decided_at"], "decision": d})
        for number, d in enumerate(profile["decisions"])
    ]  # fmt: skip
    items.sort(key=lambda item: item.key, reverse=True)
    return Answer(rows, msgspec.json.encode(profile), items)
