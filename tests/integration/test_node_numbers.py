"""Every number of a node's page and JSON, computed anew from the rows in the database with numpy and scipy alone."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
import pytest
from scipy.stats import beta, norm, t
from sqlalchemy import make_url

from node_rows import drifting_run, noisy_run, rich_run
from node_runs import BEGAN, HOUR, node_run, store_run
from pages import cells, strip, value
from tandem.cli.app import main
from tandem.db.engine import connect
from tandem.records import RunRecords
from tandem.vocabulary import ControlName, NodeVerdict

HALF_BIN = 1.1221
"""10 ** 0.05: a severity's median is known to within half a bin of a tenth of a power of ten."""


@dataclass
class Rows:
    """The counted runs' rows, by plain SQL, as (run, ...) tuples."""

    steps: list[Any] = field(default_factory=list)
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    drifts: list[Any] = field(default_factory=list)
    closings: list[Any] = field(default_factory=list)

    def compute(self) -> list[dict[str, Any]]:
        return [m for m in self.mismatches if m["cause"] == "compute"]

    def trained(self) -> dict[str, list[Any]]:
        """Run -> its steps from 1 on, in order."""
        runs = sorted({s[0] for s in self.steps})
        return {run: sorted(s for s in self.steps if s[0] == run and s[1] > 0) for run in runs}


@dataclass
class Node:
    """What the commands show of the node, and the rows behind it."""

    shown: dict[str, Any]
    page: str
    rows: Rows
    counted: list[str]


@pytest.fixture(scope="module")
def node(database: str) -> Node:
    runs = [
        rich_run(1, reference="r1"), rich_run(2, reference="r2", steps=45, hours=2.5), rich_run(3, reference="r1"),
        noisy_run(4, reference="r1"), noisy_run(5, reference="r2", steps=25), drifting_run(6, reference="r1"),
        drifting_run(7, reference="r2"),
    ]  # fmt: skip
    others = [
        rich_run(8, synthetic=True), rich_run(9, hosts=("one", "one")),
        rich_run(10, missing=[ControlName.POSITIVE_START]), rich_run(11, reference="sick", suspect="other"),
        node_run(kind="null", suspect="well-1", reference="well-2"),
    ]  # fmt: skip
    counted = store(database, *runs)
    store(database, *others)
    page = tandem("report", "sick", "-o", "-", "--db", database)
    return Node(
        json.loads(tandem("node", "sick", "--json", "--db", database)),
        page,
        read(database, counted),
        counted,
    )


def store(url: str, *runs: RunRecords) -> list[str]:
    engine = connect(url)
    try:
        return [str(store_run(engine, records)) for records in runs]
    finally:
        engine.dispose()


def tandem(*arguments: str) -> str:
    """What the command writes to standard output."""
    out = io.StringIO()
    with pytest.raises(SystemExit), redirect_stdout(out):
        main(list(arguments))
    return out.getvalue()


def read(url: str, runs: list[str]) -> Rows:
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as conn:

        def select(table: str, columns: str) -> list[Any]:
            query = f"SELECT run_id::text, {columns} FROM {table} WHERE run_id::text = ANY(%s)"
            return list(conn.execute(query, [runs]).fetchall())

        names = [d.name for d in conn.execute("SELECT * FROM mismatches LIMIT 0").description or ()]
        return Rows(
            steps=select("steps", "step, classes, rows"),
            mismatches=[dict(zip(["run", *names], m, strict=True)) for m in select("mismatches", "*")],
            gradients=select("gradients", "step, leaf, noise, signal, elements, mismatched, cosine"),
            drifts=select("drifts", "step, arm, part, drift, norm"),
            closings=select("closings", "device_seconds, devices"),
        )


def mismatched(step: Any) -> bool:
    """Whether a tensor of a step mismatched with equal inputs; what has a row of another cause only did not."""
    return any(sites for _, _, sites, _ in step[2].values())


# -- the same statistics by other means ----------------------------------------------------------------


def exact(found: float, of: float) -> tuple[float, float]:
    """Clopper-Pearson at 95 %."""
    return (
        float(beta.ppf(0.025, found, of - found + 1)) if found else 0.0,
        float(beta.isf(0.025, found + 1, of - found)) if found < of else 1.0,
    )


def clustered(elements: np.ndarray, mismatched: np.ndarray) -> tuple[float, float]:
    """Korn and Graubard's interval of the ratio, steps as clusters."""
    e, m, n = elements.astype(float), mismatched.astype(float), len(elements)
    p = m.sum() / e.sum()
    if p == 0:
        return 0.0, 1 - 0.05 ** (1 / n)
    variance = n / (n - 1) * ((m - p * e) ** 2).sum() / e.sum() ** 2
    effective = min(p * (1 - p) / variance * (norm.isf(0.025) / t.isf(0.025, n - 1)) ** 2, e.sum())
    return exact(effective * p, effective)


def rate(shown: dict[str, float]) -> tuple[float, float, float]:
    return shown["value"], shown["low"], shown["high"]


def near(*values: float) -> Any:
    return pytest.approx(values, rel=1e-6, abs=1e-15)


def of_class(node: Node, name: str) -> np.ndarray:
    """Sites, elements, mismatching sites and elements of the class in each step that compared it."""
    return np.array([s[2][name] for s in node.rows.steps if name in s[2]], np.int64)


# -- counts --------------------------------------------------------------------------------------------


def test_only_the_nodes_own_conclusive_real_runs_on_two_hosts_are_counted(node: Node) -> None:
    listed = {r["run"]: r["counted"] for r in node.shown["runs"]}
    assert sorted(run for run, counted in listed.items() if counted) == sorted(node.counted)
    assert len(listed) == len(node.counted) + 1, "and the inconclusive one is listed"
    assert (node.shown["runs_counted"], node.shown["references"]) == (7, ["r1", "r2"])
    assert node.shown["verdict"] == NodeVerdict.CORRUPTING


def test_totals(node: Node) -> None:
    s, rows = node.shown, node.rows
    every = np.array([c for step in rows.steps for c in step[2].values()], np.int64).sum(axis=0)
    assert [s[k] for k in ("sites_compared", "elements_compared", "mismatched_sites", "mismatched_elements")] == list(
        every
    )
    trained = [step for step in rows.steps if step[1] > 0]
    affected = sum(map(mismatched, trained))
    assert (s["steps_compared"], s["steps_affected"]) == (len(trained), affected)
    assert rate(s["per_step"]) == near(affected / len(trained), *exact(affected, len(trained)))
    assert s["device_hours"] == pytest.approx(sum(c[1] for c in rows.closings) / 3600)
    assert strip(node.page, "mismatching elements") == f"{every[3]:,}"
    assert f"{affected:,} affected" in node.page
    assert f"{100 * affected / len(trained):.3g}" in node.page


def test_frequency_and_severity_of_each_class(node: Node) -> None:
    on_page = {(row[0], row[1]): row[2:] for row in cells(node.page, "Frequency by phase, module and tensor")}
    names = {name for step in node.rows.steps for name in step[2]}
    assert {f"{c['phase']}/{c['module']}/{c['tensor']}" for c in node.shown["classes"]} == names
    for c in node.shown["classes"]:
        name = f"{c['phase']}/{c['module']}/{c['tensor']}"
        counts = of_class(node, name)
        sites, elements, bad_sites, bad = counts.sum(axis=0)
        found = (c["sites"], c["elements"], c["mismatched_sites"], c["mismatched_elements"], c["steps"])
        assert found == (sites, elements, bad_sites, bad, len(counts))
        assert c["affected_steps"] == np.count_nonzero(counts[:, 2])
        assert rate(c["per_step"]) == near(c["affected_steps"] / len(counts), *exact(c["affected_steps"], len(counts)))
        assert rate(c["per_element"]) == near(bad / elements, *clustered(counts[:, 1], counts[:, 3]))
        mine = [
            m for m in node.rows.compute()
            if f"{m['phase']}/{m['module']}/{m['tensor'].split('.')[0]}" == name and m["severity_mean"] is not None
        ]  # fmt: skip
        shown = on_page[f"{c['phase']} / {c['module']}", c["tensor"]]
        assert value(shown[1]) == bad
        assert value(shown[2]) == pytest.approx(bad / elements, rel=5e-3)
        if not mine:
            assert c["severity_mean"] is c["severity_median"] is c["severity_max"] is None
            continue
        weights = [max(1, m["mismatched"] - m["zero_reference"] - m["nonfinite"]) for m in mine]
        mean = np.average([m["severity_mean"] for m in mine], weights=weights)
        ordered = np.sort([m["severity_median"] for m in mine])
        assert c["severity_mean"] == pytest.approx(mean)
        below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        assert below / HALF_BIN < c["severity_median"] < above * HALF_BIN
        assert c["severity_max"] == max(m["severity_max"] for m in mine)
        assert value(shown[4]) == pytest.approx(mean, rel=0.06)
        assert value(shown[6]) == pytest.approx(c["severity_max"], rel=0.06)


def test_devices(node: Node) -> None:
    hours: dict[str, float] = {}
    places: dict[str, set[int]] = {}
    damage: dict[str, list[int]] = {}
    for run, seconds, devices in node.rows.closings:
        for rank, name in enumerate(devices):
            hours[name] = hours.get(name, 0) + seconds / 3600 / len(devices)
            places.setdefault(name, set()).add(rank)
            damage.setdefault(name, []).extend(
                m["mismatched"] for m in node.rows.mismatches if (m["run"], m["rank"]) == (run, rank)
            )
    newest = max(node.rows.closings)[2]
    for d in node.shown["devices"]:
        name = d["device"]
        assert d["device_hours"] == pytest.approx(hours[name])
        assert (d["mismatched_sites"], d["mismatched_elements"]) == (len(damage[name]), sum(damage[name]))
        assert d["rank"] == (next(iter(places[name])) if len(places[name]) == 1 else None)
        assert d["present"] == (name in newest)
    assert {d["device"] for d in node.shown["devices"]} == set(hours) == {"GPU-a", "GPU-0", "GPU-1"}
    for name, _, shown, tensors, elements in cells(node.page, "Devices"):
        assert value(shown) == pytest.approx(hours[name], abs=0.006)
        assert [value(tensors), value(elements)] == [len(damage[name]), sum(damage[name])]


@pytest.mark.parametrize(("key", "column"), [("rank_map", "rank"), ("layer_map", "layer")])
def test_maps(node: Node, key: str, column: str) -> None:
    sums: dict[tuple[str, int], list[int]] = {}
    for m in node.rows.mismatches:
        tensor = m["tensor"] if m["cause"] == "state" else m["tensor"].split(".")[0]
        sums.setdefault((f"{m['phase']}/{m['module']} {tensor}", m[column]), []).append(m["mismatched"])
    shown = {
        (f"{row['phase']}/{row['module']} {row['tensor']}", int(n)): (c["sites"], c["elements"])
        for row in node.shown[key]
        for n, c in row["cells"].items()
    }
    assert shown == {place: (len(found), sum(found)) for place, found in sums.items()}
    assert {row[0] for row in cells(node.page, f"By site and {column}")} == {name for name, _ in sums}
    if key == "rank_map":
        totals = {str(r): [m["mismatched"] for m in node.rows.mismatches if m["rank"] == r] for r in (0, 1)}
        assert node.shown["ranks"] == {r: {"sites": len(x), "elements": sum(x)} for r, x in totals.items()}


def test_bits_severities_extents_replays_and_odd_values(node: Node) -> None:
    compute, s = node.rows.compute(), node.shown
    for width in (16, 32):
        total = np.sum([m["bits"] for m in compute if len(m["bits"]) == width], axis=0)
        assert s["bits"][str(width)] == total.tolist()
    tenths = Counter(math.floor(10 * math.log10(m["severity_median"])) for m in compute if m["severity_median"])
    assert {round(10 * math.log10(b["from"])): b["tensors"] for b in s["severities"]} == dict(tenths)
    assert s["extents"] == dict(sorted(Counter(m["extent"] for m in compute).items()))
    assert s["replays"] == dict(Counter(m["replay"] for m in compute))
    assert s["findings"] == {"state": len(node.rows.mismatches) - len(compute)}
    for key, column in (("nonfinite", "nonfinite"), ("nullified", "nullified"), ("zero_reference", "zero_reference")):
        assert s[f"{key}_elements"] == sum(m[column] for m in compute)
        assert f"{s[f'{key}_elements']:,}" in node.page
    assert s["uncounted_mismatches"] == 0
    decades = Counter(math.floor(math.log10(m["severity_median"])) for m in compute if m["severity_median"])
    table = cells(node.page, "Mismatching tensors by their median severity")
    assert {name: value(n) for name, n in table} == {f"1e{d} to 1e{d + 1}": n for d, n in decades.items()}


# -- time ----------------------------------------------------------------------------------------------


def test_time_distribution_of_all_runs_together_and_of_each(node: Node) -> None:
    gaps, lengths, hit, each = [], [], [], {}
    for run, steps in node.rows.trained().items():
        mine = np.array([s[1] for s in steps if mismatched(s)])
        runs = [len(x) for x in np.split(mine, np.flatnonzero(np.diff(mine) > 1) + 1)]
        each[run] = (len(mine), int(mine.min()), len(runs), max(runs), np.diff(mine))
        gaps, lengths, hit = [*gaps, *np.diff(mine)], [*lengths, *runs], [*hit, *mine]
    g = np.array(gaps, float)
    burstiness = (g.std() - g.mean()) / (g.std() + g.mean())
    shown = node.shown["timing"]
    assert (shown["steps"], shown["affected"], shown["onset"]) == (node.shown["steps_compared"], len(hit), min(hit))
    assert (shown["bursts"], shown["longest_burst"], shown["gaps"]) == (len(lengths), max(lengths), len(g))
    assert (shown["mean_gap"], shown["longest_gap"]) == (pytest.approx(g.mean()), g.max())
    assert shown["burstiness"] == pytest.approx(burstiness)
    assert f"{len(lengths):,} bursts" in node.page
    assert f"Burstiness of the gaps {burstiness:+.2f}" in node.page
    for r in (r for r in node.shown["runs"] if r["counted"]):
        affected, onset, bursts, longest, own = each[r["run"]]
        found = [r["timing"][k] for k in ("affected", "onset", "bursts", "longest_burst", "gaps")]
        assert found == [affected, onset, bursts, longest, len(own)]


def test_timelines(node: Node) -> None:
    trained = node.rows.trained()
    for r in (r for r in node.shown["runs"] if r["counted"]):
        steps = trained[r["run"]]
        families = {"submodule": ("out", "dx"), "gradient": ("dw",), "training": ()}[r["workload"]]
        partial = [np.sum([c for n, c in s[2].items() if n.split("/")[2] in families], axis=0) for s in steps]
        bins = r["timeline"]
        assert (sum(b["steps"] for b in bins), bins[0]["first"]) == (len(steps), 1)
        assert sum(b["affected"] for b in bins) == sum(mismatched(s) for s in steps)
        for column, key in ((1, "elements"), (3, "mismatched")):
            expected = sum(int(p[column]) for p in partial if np.ndim(p))
            assert sum(b[key] for b in bins) == expected, (r["workload"], key)


# -- what it does to a model ---------------------------------------------------------------------------


def test_gradient_noise(node: Node) -> None:
    whole = [(g[3] / g[4], g[0]) for g in node.rows.gradients if not g[2]]
    worst, run = max(whole)
    assert (node.shown["wcnts"], node.shown["wcnts_run"], node.shown["wcnts_unbounded"]) == (
        pytest.approx(worst), run, False,
    )  # fmt: skip
    runs = {g[0] for g in node.rows.gradients}
    steps = {r: len(node.rows.trained()[r]) for r in runs}
    for leaf in {g[2] for g in node.rows.gradients if g[2]}:
        mine = [g for g in node.rows.gradients if g[2] == leaf]
        compared = sum(100 * n for n in steps.values())  # every step of every gradient run compared the leaf
        assert node.shown["leaves"][leaf] == pytest.approx(sum(g[6] for g in mine) / compared)
    for r in node.shown["runs"]:
        if r["run"] in runs:
            own = [x for x, of in whole if of == r["run"]]
            assert r["noise"]["wcnts"] == pytest.approx(max(own))
            assert (r["noise"]["noisy"], r["noise"]["steps"]) == (len(own), steps[r["run"]])
    assert [value(row[1]) for row in cells(node.page, "Gradient noise by run")] == pytest.approx(
        [max(x for x, of in whole if of == r["run"]) for r in node.shown["runs"] if r["run"] in runs], rel=2e-3
    )


def test_drift(node: Node) -> None:
    rates, last = [], {}
    for run in {d[0] for d in node.rows.drifts}:
        for arm in ("suspect", "baseline"):
            points = sorted((d[1], d[4], d[5]) for d in node.rows.drifts if (d[0], d[2]) == (run, arm))
            x, y = np.array([p[0] for p in points], float), np.log([p[1] for p in points])
            i, j = np.triu_indices(len(x), 1)
            slope = float(np.median((y[j] - y[i]) / (x[j] - x[i])))
            rates += [slope] if arm == "suspect" else []
            last[run, arm] = points[-1][1] / points[-1][2]
            (shown,) = [d for r in node.shown["runs"] if r["run"] == run for d in r["drifts"] if d["arm"] == arm]
            assert shown["rate"] == pytest.approx(slope)
            assert (shown["first"], shown["last"], shown["points"]) == (points[0][0], points[-1][0], len(points))
            assert (shown["last_drift"], shown["last_relative"]) == near(points[-1][1], last[run, arm])
    assert node.shown["drift_rate"] == pytest.approx(np.median(rates))
    expected = [[last[r["run"], arm] for arm in ("suspect", "baseline")] for r in node.shown["runs"] if r["drifts"]]
    table = [[value(row[1]), value(row[2])] for row in cells(node.page, "Drift by run")]
    assert np.allclose(table, expected, rtol=2e-3)


# -- bounds --------------------------------------------------------------------------------------------


def test_what_a_clean_node_excludes(database: str) -> None:
    runs = [
        node_run(suspect="fine", workload=w, steps=n, hours=h, seed=n, began=BEGAN + n * HOUR)
        for w, n, h in (("submodule", 30, 3.0), ("gradient", 50, 2.0), ("submodule", 70, 4.5))
    ]
    rows = read(database, store(database, *runs))
    shown = json.loads(tandem("node", "fine", "--json", "--db", database))
    steps = sum(s[1] > 0 for s in rows.steps)
    hours = sum(c[1] for c in rows.closings) / 3600
    elements = sum(c[1] for s in rows.steps for c in s[2].values())
    assert shown["verdict"] == "clean"
    assert shown["bound"] == {
        "confidence": 0.95,
        "steps": steps,
        "per_step": pytest.approx(1 - 0.05 ** (1 / steps)),
        "device_hours": pytest.approx(hours),
        "per_device_hour": pytest.approx(-math.log(0.05) / hours),
        "elements": elements,
        "per_element": pytest.approx(1 - 0.05 ** (1 / elements), rel=1e-6),
    }
    for c in shown["classes"]:
        n = sum(f"{c['phase']}/{c['module']}/{c['tensor']}" in s[2] for s in rows.steps)
        assert rate(c["per_element"]) == near(0.0, 0.0, 1 - 0.05 ** (1 / n))
