"""The numbers of a run's page beside its main tables, computed anew from the raw tensors with numpy alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from exact_intervals import clopper_pearson, design_effect, per_element
from finetune_table import table
from pages import cells, pairs, smalls, titled, value
from raw_runs import STEPS, RawRun, finetune_run, made_page, submodule_run, training_run
from tandem.report.run_page import render
from tandem.sites import Site

(RQ1, PAGE1), (RQ3, PAGE3) = made_page(submodule_run), made_page(training_run)
WRECKED = training_run(seed=1, wrecked=True)
FINETUNE = finetune_run()
PAGE_WRECKED, PAGE_FINETUNE = render(WRECKED.records), render(FINETUNE)
PERCENT = 0.06
"""A share in percent is shown with two digits."""


def mask(reference: np.ndarray, suspect: np.ndarray) -> np.ndarray:
    """Which elements differ in any bit, flat."""
    a, b = (np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, -1) for x in (reference, suspect))
    return (a != b).any(axis=1)


MASKS = {key: mask(*pair) for key, pair in RQ1.tensors.items()}
BAD = [key for key, wrong in sorted(MASKS.items(), key=lambda i: (i[0][0], i[0][1].number, i[0][2])) if wrong.any()]
"""(step, site, rank) of what mismatches, the first one first."""


def percent(text: str) -> float:
    return float(text.replace("%", "")) / 100


# -- RQ1 -----------------------------------------------------------------------------------------------


def by_step(*cell: str) -> list[np.ndarray]:
    """The elements of each step, of one phase and module's partials, or all."""
    chosen = [k for k in MASKS if not cell or ((k[1].phase, k[1].module) == cell and k[1].family != "dw")]
    return [np.concatenate([MASKS[k] for k in chosen if k[0] == step]) for step in range(1, STEPS + 1)]


def test_intervals_of_the_papers_table() -> None:
    """Steps as clusters; beside it the share of steps."""
    own = smalls(PAGE1, "Mismatch frequency beside published nodes")[0][1:]
    for shown, cell in zip(own, [(p, m) for p in ("fwd", "bwd") for m in ("attn", "ffn")], strict=True):
        counted, interval, steps = shown
        clusters = by_step(*cell)
        everything = np.concatenate(clusters)
        assert counted == f"{everything.sum():,} of {everything.size:,}"
        assert [float(x) for x in interval.split(" to ")] == pytest.approx(per_element(clusters), rel=5e-3)
        assert percent(steps.removesuffix(" of steps")) == pytest.approx(np.mean([c.any() for c in clusters]), PERCENT)


def test_the_share_of_steps_and_what_bursts_make_of_the_variance() -> None:
    found = re.search(
        r"Steps in which anything mismatched: ([\d.]+ %) \(([\d.]+ %) to ([\d.]+ %) at 95 %, exact\)\. "
        r"The variance per element is ([\d.]+) times",
        PAGE1,
    )
    assert found
    clusters = by_step()
    hit = sum(c.any() for c in clusters)
    expected = (hit / STEPS, *clopper_pearson(hit, STEPS))
    assert [percent(x) for x in found.groups()[:3]] == pytest.approx(expected, PERCENT)
    assert float(found[4]) == pytest.approx(design_effect(clusters), rel=PERCENT)


def test_by_rank_extent_and_replay_class() -> None:
    ranks = {rank: [k for k in BAD if k[2] == rank] for rank in sorted({k[2] for k in BAD})}
    assert [[int(row[0]), *map(value, row[1:])] for row in titled(PAGE1, "By rank")] == [
        [rank, len(keys), sum(MASKS[k].sum() for k in keys)] for rank, keys in ranks.items()
    ]
    extents = Counter(extent(MASKS[k].reshape(k[1].shape)) for k in BAD)
    assert {name: value(n) for name, n in titled(PAGE1, "Extent inside one tensor")} == extents
    replays = Counter(m.replay.value.replace("_", " ") for m in RQ1.records.mismatches)
    assert {row[0]: value(row[1]) for row in titled(PAGE1, "Replays on the same inputs")} == replays


def extent(wrong: np.ndarray) -> str:
    """The shape of the damage in a matrix, by the rules of `tandem.statistics.mismatch.extent`."""
    rows, columns = (np.flatnonzero(wrong.any(axis=axis)) for axis in (1, 0))
    box = wrong[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    if wrong.sum() == 1:
        return "element"
    if box.shape == wrong.shape and box.mean() >= 0.5:
        return "whole"
    if len(rows) == 1:
        return "row"
    if len(columns) == 1:
        return "column"
    return "tile" if box.mean() >= 0.5 else "scattered"


def special(keys: list[tuple[int, Site, int]]) -> tuple[int, int, int]:
    """Of the mismatching elements: NaN or infinite on the suspect, zero there only, zero on the reference."""
    r, s = (np.concatenate([RQ1.tensors[k][i].reshape(-1)[MASKS[k]].astype(np.float64) for k in keys]) for i in (0, 1))
    return int((~np.isfinite(s)).sum()), int(((s == 0) & (r != 0)).sum()), int((r == 0).sum())


def test_special_values() -> None:
    nonfinite, nullified, zero = special(BAD)
    assert nullified > 0
    assert (
        f"{nonfinite} mismatching elements are NaN or infinite on the suspect, {nullified} are zero there and not on "
        f"the reference, {zero} have a zero reference." in PAGE1
    )


def test_the_first_mismatches() -> None:
    cards = re.findall(r"<li><h3>(.*?)</h3>(.*?)</li>", PAGE1, re.DOTALL)
    assert len(cards) == 10
    for (title, body), key in zip(cards, BAD[:10], strict=True):
        step, site, rank = key
        shown, wrong = pairs(body), MASKS[key]
        r, s = (x.reshape(-1)[wrong] for x in RQ1.tensors[key])
        assert title == f"step {step} {site.phase}/{site.module} layer {site.layer} {site.tensor} rank {rank}"
        assert shown["mismatching"] == f"{wrong.sum()} of {wrong.size}"
        with np.errstate(invalid="ignore", over="ignore"):
            relative = np.abs(s.astype(np.float64) - r.astype(np.float64)) / np.abs(r.astype(np.float64))
        relative = relative[np.isfinite(relative) & (relative > 0)]
        expected = (relative.mean(), np.median(relative), relative.max())
        severity = [float(x.split(" ")[1]) for x in shown["severity"].split(", ")]
        assert severity == pytest.approx(expected, PERCENT)
        nonfinite, nullified, zero = special([key])
        assert (
            shown["special values"] == f"{nonfinite} NaN or infinite, {nullified} nullified, {zero} with zero reference"
        )
        places = np.argwhere(wrong.reshape(site.shape))
        box = " × ".join(f"[{a}–{b}]" for a, b in zip(places.min(axis=0), places.max(axis=0), strict=True))
        name = extent(wrong.reshape(site.shape))
        assert re.sub(r"\s+", " ", shown["extent"]) in (f"{name}, box {box}", name)
        assert shown["first index"] == str(np.flatnonzero(wrong)[0])
        flipped = np.unpackbits(
            np.frombuffer(r.tobytes(), np.uint8) ^ np.frombuffer(s.tobytes(), np.uint8), bitorder="little"
        ).reshape(r.size, -1)
        times = [f"{bit} × {n}" for bit, n in reversed(list(enumerate(flipped.sum(axis=0)))) if n]
        assert shown["bits"] == ", ".join(times)


# -- RQ3 -----------------------------------------------------------------------------------------------


def test_gradient_norms() -> None:
    rows = cells(PAGE3, "Gradient norms over steps")
    assert [int(r[0]) for r in rows] == list(range(1, STEPS + 1))
    for step, *shown in rows:
        expected = [RQ3.norms[int(step), arm] for arm in ("reference", "suspect", "baseline")]
        assert [value(n) for n in shown] == pytest.approx(expected, rel=1e-5)


def test_where_the_losses_are_furthest_apart() -> None:
    apart = {n: abs(RQ3.losses[n, "suspect"] - RQ3.losses[n, "reference"]) for n in range(1, STEPS + 1)}
    at = max(apart, key=lambda n: apart[n])
    shown, step = pairs(PAGE3)["losses furthest apart"].split(" at step ")
    assert (float(shown), int(step)) == (pytest.approx(apart[at], rel=2e-3), at)


def drifts(run: RawRun, arm: str) -> Iterator[tuple[int, float]]:
    for step in range(1, STEPS + 1):
        mine, reference = (
            np.concatenate([v for _, v in sorted(run.params[step, a].items())]).astype(np.float64)
            for a in (arm, "reference")
        )
        yield step, float(np.linalg.norm(mine - reference))


@pytest.mark.parametrize(("run", "page"), [(RQ3, PAGE3), (WRECKED, PAGE_WRECKED)], ids=["whole", "wrecked"])
def test_growth_of_the_drift_and_what_is_not_finite(run: RawRun, page: str) -> None:
    """The median of the slopes of ln drift between any two steps; of a wrecked model only the exact points say so."""
    rows = {row[0]: row[1:] for row in cells(page, "Drift by arm")}
    assert set(rows) == {"suspect", "baseline"}
    for arm, shown in rows.items():
        path = dict(drifts(run, arm))
        known = [(step, np.log(d)) for step, d in path.items() if np.isfinite(d) and d > 0]
        slopes = [(b - a) / (v - u) for (u, a), (v, b) in combinations(known, 2)]
        assert value(shown[4]) == pytest.approx(np.median(slopes), rel=0.06), "the estimates are within 1 % or so"
        lost = [step for step, d in path.items() if np.isnan(d) and step % 10 == 0]
        assert int(shown[5]) == len(lost) == (run is WRECKED and arm == "suspect")


# -- fine-tuning ---------------------------------------------------------------------------------------


def test_accuracy_over_steps() -> None:
    rows = cells(PAGE_FINETUNE, "Accuracy over steps")
    assert [int(row[0]) for row in rows] == [20, 40]
    for step, *shown in rows:
        counted = table(FINETUNE.evaluations, int(step))
        expected = [counted["", arm].right / counted["", arm].questions for arm in ("reference", "suspect", "baseline")]
        assert [value(n) for n in shown] == pytest.approx(expected, rel=1e-5)


def test_the_published_table_stands_beside_it() -> None:
    assert cells(PAGE_FINETUNE, "Published accuracy and disagreement") == [
        ["published healthy", "90.79", "–", "37.22", "–"],
        ["published healthy, other seed", "89.50", "6.70", "38.83", "56.75"],
        ["published node 1", "90.53", "5.15", "36.78", "42.24"],
        ["published node 6", "0.00", "100.00", "36.92", "36.82"],
    ]
