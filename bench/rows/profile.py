"""The profile of a node and a page of the run list with millions of mismatch rows, beside the same without roll-ups."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence

from sqlalchemy import Engine, text

from bench.many_rows import MANY, MANY_RUNS, NODE_RUNS, fill
from bench.options import Options
from bench.results import Row, row
from bench.stats import quantile
from tandem.db.embedded import embedded_database
from tandem.db.engine import connect
from tandem.db.profiles import load_fleet, load_node
from tandem.db.queries import list_runs

PAGE = 50
ASKED = 500
"""Measurements of each fast question: the 99th percentile has a bound from about 300 on."""
ASKED_SLOW = 5
BOUND_MS = 50.0
WITHOUT = """
WITH mine AS (
  SELECT r.run_id FROM runs r WHERE r.suspect_node = :node AND NOT r.synthetic AND r.verdict IN ('match', 'mismatch')
), counts AS (
  SELECT c.key, sum((c.value->>0)::bigint) AS sites, sum((c.value->>1)::bigint) AS elements,
         sum((c.value->>2)::bigint) AS bad_sites, sum((c.value->>3)::bigint) AS bad,
         count(*) FILTER (WHERE (c.value->>2)::bigint > 0) AS steps, sum((c.value->>3)::numeric ^ 2) AS squares
  FROM steps s JOIN mine USING (run_id), jsonb_each(s.classes) c GROUP BY c.key
), damage AS (
  SELECT m.phase, m.module, m.layer, m.rank, m.replay, m.extent, count(*) AS sites, sum(m.mismatched) AS elements,
         sum(m.severity_mean * m.mismatched) AS severity, max(m.severity_max) AS largest, sum(m.nullified) AS nullified,
         sum(m.nonfinite) AS nonfinite
  FROM mismatches m JOIN mine USING (run_id) GROUP BY GROUPING SETS ((m.phase, m.module, m.layer), (m.rank),
         (m.phase, m.module, m.rank), (m.replay), (m.extent))
), severities AS (
  SELECT m.phase, m.module, percentile_cont(0.5) WITHIN GROUP (ORDER BY m.severity_median) AS middle
  FROM mismatches m JOIN mine USING (run_id) GROUP BY m.phase, m.module
), bits AS (
  SELECT b.place, sum(b.n) AS n FROM mismatches m JOIN mine USING (run_id), unnest(m.bits) WITH ORDINALITY b(n, place)
  GROUP BY b.place
)
SELECT (SELECT json_agg(c) FROM counts c), (SELECT json_agg(d) FROM damage d), (SELECT json_agg(s) FROM severities s),
       (SELECT json_agg(b) FROM bits b)
"""
"""The counts of a profile from the rows themselves."""

PAGE_WITHOUT = """
SELECT r.*, t.* FROM (SELECT * FROM runs ORDER BY run_id DESC LIMIT :page) r
LEFT JOIN LATERAL (
  SELECT sum((c.value->>0)::bigint), sum((c.value->>1)::bigint), sum((c.value->>2)::bigint), sum((c.value->>3)::bigint)
  FROM steps s, jsonb_each(s.classes) c WHERE s.run_id = r.run_id
) t ON true
LEFT JOIN LATERAL (SELECT count(*) FROM mismatches m WHERE m.run_id = r.run_id) m ON true
ORDER BY r.run_id DESC
"""


def measure(options: Options) -> list[Row]:
    """Questions to a database with many rows, and the same without what is summed up beforehand."""
    with embedded_database() as url:
        engine = connect(url)
        nodes, runs = fill(engine, url, options.rows)
        rng = random.Random(options.seed)
        profile = _timed(lambda: load_node(engine, rng.choice(nodes)), ASKED)
        many = _timed(lambda: load_node(engine, MANY), ASKED // 10)
        page = _timed(lambda: list_runs(engine, PAGE), ASKED)
        of_node = _timed(lambda: list_runs(engine, PAGE, node=rng.choice(nodes)), ASKED)
        fleet = _timed(lambda: load_fleet(engine), ASKED // 10)
        plain = _timed(lambda: _ask(engine, WITHOUT, node=rng.choice(nodes)), ASKED_SLOW)
        plain_page = _timed(lambda: _ask(engine, PAGE_WITHOUT, page=PAGE), ASKED_SLOW)
        with engine.connect() as conn:
            rows = int(conn.scalar(text("SELECT count(*) FROM mismatches")) or 0)
        _check(engine, nodes[0])
        engine.dispose()
    setting = options.setting(mismatch_rows=rows, runs=runs, nodes=len(nodes), runs_of_a_node=NODE_RUNS, page=PAGE)

    def ms(name: str, what: str, taken: Sequence[float], q: float = 0.5, bound: float | None = None) -> Row:
        return row(f"profile.{name}", what, quantile(taken, q), setting, unit="ms", bound=bound)

    return [
        ms("node", "profile of a node, 99th percentile", profile, 0.99, BOUND_MS),
        ms("node_median", "the same, median", profile),
        ms("node_many", f"profile of a node with {MANY_RUNS} runs, median", many),
        ms(
            "node_run",
            "what each further run of a node adds, from these two medians",
            [(quantile(many).value - quantile(profile).value) / (MANY_RUNS - NODE_RUNS)],
        ),
        ms("node_without", "its counts from the rows, without roll-ups, median", plain),
        ms("page", "page of the run list, 99th percentile", page, 0.99, BOUND_MS),
        ms("page_node", "the same of one node", of_node, 0.99, BOUND_MS),
        ms("page_without", "a page from the rows, without totals, median", plain_page),
        ms("fleet", "verdicts of all nodes, median", fleet),
    ]


def _timed(ask: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each; the first warms connections and caches."""
    ask()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        ask()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def _ask(engine: Engine, query: str, **values: object) -> object:
    with engine.connect() as conn:
        return conn.execute(text(query), values).all()


def _check(engine: Engine, node: str) -> None:
    """Both ways count the same."""
    profile = load_node(engine, node)
    with engine.connect() as conn:
        counts = conn.execute(text(WITHOUT), {"node": node}).one()[0]
    told = {f"{c.phase}/{c.module}/{c.family}": c.mismatched_elements for c in profile.classes}
    counts = json.loads(counts) if isinstance(counts, str) else counts
    if told != {c["key"]: int(c["bad"]) for c in counts}:
        raise RuntimeError("the profile and the rows do not count the same")
