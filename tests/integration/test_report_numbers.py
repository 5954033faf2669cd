"""Every number of a run's page, computed anew from the raw tensors with numpy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from finetune_table import check_json, check_page, table
from pages import cells, strip, value
from raw_runs import STEPS, TP, RawRun, finetune_run, gradient_run, made_page, submodule_run, training_run
from tandem.report.run_page import render
from tandem.vocabulary import Phase

(RQ1, PAGE1), (RQ2, PAGE2), (RQ3, PAGE3) = (made_page(make) for make in (submodule_run, gradient_run, training_run))
RESUMED = training_run(resumed=True)
PAGE4 = render(RESUMED.records)
DIGITS = 2e-3
"""A shown number is rounded to three significant digits or more."""


def bits_of(run: RawRun) -> Iterator[tuple[tuple, np.ndarray, np.ndarray, np.ndarray]]:
    """(step, site, rank), reference, suspect in fp64, and which elements differ in any bit."""
    for key, (r, s) in run.tensors.items():
        raw = [x.tobytes() for x in (r, s)]
        a, b = (np.frombuffer(x, np.uint8).reshape(r.size, r.dtype.itemsize) for x in raw)
        yield key, r.reshape(-1).astype(np.float64), s.reshape(-1).astype(np.float64), (a != b).any(axis=1)


# -- RQ1 -----------------------------------------------------------------------------------------------


def test_totals() -> None:
    wrong = [(key, mask) for key, _, _, mask in bits_of(RQ1) if mask.any()]
    assert strip(PAGE1, "steps compared") == str(STEPS)
    assert strip(PAGE1, "tensors compared") == f"{len(RQ1.tensors):,}"
    assert strip(PAGE1, "elements compared") == f"{sum(r.size for r, _ in RQ1.tensors.values()):,}"
    assert strip(PAGE1, "mismatching tensors") == str(len(wrong))
    assert strip(PAGE1, "mismatching elements") == str(sum(int(mask.sum()) for _, mask in wrong))


def test_the_papers_table() -> None:
    own = cells(PAGE1, "Mismatch frequency beside published nodes")[0]
    columns = [(p, m) for p in ("fwd", "bwd") for m in ("attn", "ffn")]
    for shown, (phase, module) in zip(own[1:], columns, strict=True):
        found = [
            mask for (_, s, _), *_, mask in bits_of(RQ1) if (s.phase, s.module) == (phase, module) and s.family != "dw"
        ]
        assert value(shown) == pytest.approx(np.concatenate(found).mean(), rel=5e-3)


@pytest.mark.parametrize(
    ("caption", "family"),
    [
        ("Per-rank partials (out, dx): the only ones in the frequency", ""),
        ("Other tensors, each on its own line and outside the frequency", "dw"),
    ],
)
def test_counts_and_severity(caption: str, family: str) -> None:
    rows = cells(PAGE1, caption)
    assert len(rows) == (2 if family else 4)
    for row in rows:
        phase, module = row[0].split(" / ")
        numbers = row[2:] if family else row[1:]
        mine = [
            (r, s, mask)
            for (_, site, _), r, s, mask in bits_of(RQ1)
            if (site.phase, site.module) == (phase, module) and (site.family == "dw") == bool(family)
        ]
        severities = []
        for r, s, mask in mine:
            if mask.any():
                relative = np.abs(s[mask] - r[mask]) / np.abs(r[mask])
                severities.append(relative[np.isfinite(relative) & (relative > 0)])
        everything = np.concatenate(severities)
        bad = [int(mask.sum()) for *_, mask in mine if mask.any()]
        assert [value(n) for n in numbers[:4]] == [len(mine), sum(r.size for r, *_ in mine), len(bad), sum(bad)]
        assert value(numbers[4]) == pytest.approx(sum(bad) / sum(r.size for r, *_ in mine), rel=5e-3)
        assert value(numbers[5]) == pytest.approx(everything.mean(), rel=0.06)
        assert value(numbers[6]) == pytest.approx(np.median([np.median(s) for s in severities if s.size]), rel=0.06)
        assert value(numbers[7]) == pytest.approx(everything.max(), rel=0.06)


def test_frequency_over_steps_and_its_bursts() -> None:
    rows = cells(PAGE1, "Mismatch frequency over steps")
    partial = {step: [m for (n, s, _), *_, m in bits_of(RQ1) if n == step and s.family != "dw"]
               for step in range(1, STEPS + 1)}  # fmt: skip
    assert [int(r[0]) for r in rows] == list(partial)
    for row, masks in zip(rows, partial.values(), strict=True):
        bad = np.concatenate(masks)
        assert (value(row[1]), value(row[2])) == (bad.size, bad.sum())
        assert value(row[3]) == pytest.approx(bad.mean(), rel=5e-3)
    hit = sorted({n for (n, *_), *_, mask in bits_of(RQ1) if mask.any()})
    runs = np.split(np.array(hit), np.flatnonzero(np.diff(hit) > 1) + 1)
    gaps = np.diff(hit)
    burst = (gaps.std() - gaps.mean()) / (gaps.std() + gaps.mean())
    assert f"{len(hit)} of {STEPS} steps affected, the first is step {hit[0]}" in PAGE1
    assert f"{len(runs)} bursts" in PAGE1
    assert f"longest of {max(map(len, runs))} steps" in PAGE1
    assert f"Burstiness of the gaps {burst:+.2f}" in PAGE1


@pytest.mark.parametrize(("label", "place"), [("By site and layer", 1), ("By site and rank", 2)])
def test_maps(label: str, place: int) -> None:
    shown = {row[0]: row[1:] for row in cells(PAGE1, label)}
    sums: dict[tuple[str, int], int] = {}
    for (_, site, rank), *_, mask in bits_of(RQ1):
        column = site.layer if place == 1 else rank
        name = f"{site.phase}/{site.module} {site.family}"
        sums[name, column] = sums.get((name, column), 0) + int(mask.sum())
    assert {(name, i): value(c) for name, row in shown.items() for i, c in enumerate(row) if c != "·"} == {
        k: n for k, n in sums.items() if n
    }


@pytest.mark.parametrize(("width", "dtype"), [(16, "bfloat16"), (32, "float32")])
def test_bits(width: int, dtype: str) -> None:
    times = np.zeros(width, int)
    for reference, suspect in RQ1.tensors.values():
        if reference.dtype.itemsize * 8 == width:
            a, b = (np.frombuffer(x.tobytes(), np.uint8).reshape(-1, width // 8) for x in (reference, suspect))
            times += np.unpackbits(a ^ b, axis=1, bitorder="little").sum(axis=0, dtype=int)
    rows = cells(PAGE1, f"Differing bits of {width}-bit elements ({dtype})")
    assert [(int(bit), value(n)) for bit, _, n in rows] == [(b, times[b]) for b in reversed(range(width))]
    mantissa = {16: 7, 32: 23}[width]
    assert [part for _, part, _ in rows] == ["sign"] + ["exponent"] * 8 + ["mantissa"] * mantissa


def test_severity_distribution() -> None:
    decades: dict[str, int] = {}
    for _, r, s, mask in bits_of(RQ1):
        if mask.any():
            relative = np.abs(s[mask] - r[mask]) / np.abs(r[mask])
            d = math.floor(math.log10(np.median(relative[np.isfinite(relative) & (relative > 0)])))
            decades[f"1e{d} to 1e{d + 1}"] = decades.get(f"1e{d} to 1e{d + 1}", 0) + 1
    assert {name: value(n) for name, n in cells(PAGE1, "Mismatching tensors by their median severity")} == decades


# -- RQ2 -----------------------------------------------------------------------------------------------


def whole(run: RawRun, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of one step, reference and suspect, as one vector."""
    mine = [pair for (n, *_), pair in run.tensors.items() if n == step]
    r, s = (np.concatenate([p[i].reshape(-1) for p in mine]).astype(np.float64) for i in (0, 1))
    return r, s


def test_noise_over_steps_and_wcnts() -> None:
    rows = cells(PAGE2, "Noise-to-signal of the gradient over steps")
    assert [int(r[0]) for r in rows] == list(range(1, STEPS + 1))
    ratios = {}
    for row in rows:
        r, s = whole(RQ2, int(row[0]))
        with np.errstate(invalid="ignore"):
            ratio = np.linalg.norm(s - r) / np.linalg.norm(r)
        ratios[int(row[0])] = ratio
        if np.isnan(ratio):
            assert row[1] == "inf"
        elif ratio == 0:
            assert row[1:] == ["0", "0", "–", "–", "0"]
        else:
            assert value(row[1]) == pytest.approx(ratio, rel=DIGITS)
            assert value(row[2]) == pytest.approx(np.linalg.norm(s - r), rel=DIGITS)
            assert value(row[3]) == pytest.approx(np.linalg.norm(r), rel=DIGITS)
            assert value(row[4]) == pytest.approx(r @ s / np.linalg.norm(r) / np.linalg.norm(s), rel=1e-6)
            assert value(row[5]) == np.count_nonzero(r != s)
    finite = {step: x for step, x in ratios.items() if np.isfinite(x)}
    worst = max(finite, key=lambda step: finite[step])
    own = cells(PAGE2, "WCNTS beside published nodes")[0]
    noisy = sum(x != 0 for x in ratios.values())
    assert own[1] == strip(PAGE2, "WCNTS") == "inf"  # one step has a NaN
    assert value(own[2]) == pytest.approx(finite[worst], rel=DIGITS)
    assert (int(own[3]), own[4]) == (worst, f"{noisy} of {STEPS}")
    cosines = [
        r @ s / np.linalg.norm(r) / np.linalg.norm(s)
        for r, s in (whole(RQ2, n) for n in finite)
        if not np.array_equal(r, s)
    ]
    assert value(own[5]) == pytest.approx(min(cosines), rel=1e-6)


def test_angles() -> None:
    for step, angle, _ in cells(PAGE2, "Angle between the two gradients over steps"):
        r, s = (v / np.linalg.norm(v) for v in whole(RQ2, int(step)))
        assert value(angle) == pytest.approx(np.sum((r - s) ** 2) / 2, rel=DIGITS, abs=1e-15)


def test_leaves() -> None:
    rows = cells(PAGE2, "Leaves that differed")
    by_leaf: dict[str, dict[int, list]] = {}
    for (step, site, _), pair in RQ2.tensors.items():
        name = f"{site.module}.{site.layer}.{site.tensor.split('.')[1]}"
        by_leaf.setdefault(name, {}).setdefault(step, []).append(pair)
    worst = {}
    for name, steps in by_leaf.items():
        joined = {n: [np.concatenate([p[i].reshape(-1) for p in pairs]).astype(np.float64) for i in (0, 1)]
                  for n, pairs in steps.items()}  # fmt: skip
        bad = {n: (r, s) for n, (r, s) in joined.items() if not np.array_equal(r, s)}
        if not bad:
            continue
        with np.errstate(invalid="ignore"):
            ratios = {
                n: np.nan_to_num(np.linalg.norm(s - r) / np.linalg.norm(r), nan=np.inf) for n, (r, s) in bad.items()
            }
        at = max(ratios, key=lambda n: ratios[n])
        worst[name] = (len(bad), sum(np.count_nonzero(r != s) for r, s in bad.values()),
                       sum(r.size for r, _ in joined.values()), ratios[at], at)  # fmt: skip
    assert [row[0] for row in rows] == sorted(worst, key=lambda name: -worst[name][3])
    for name, steps, counted, frequency, ratio, at, _ in rows:
        n, mismatched, elements, expected, where = worst[name]
        assert (value(steps), counted, int(at)) == (n, f"{mismatched:,} of {elements:,}", where)
        assert value(frequency) == pytest.approx(mismatched / elements, rel=5e-3)
        assert float(ratio) == pytest.approx(expected, rel=DIGITS)


# -- RQ3 -----------------------------------------------------------------------------------------------


def flat(run: RawRun, step: int, arm: str) -> np.ndarray:
    return np.concatenate([v for _, v in sorted(run.params[step, arm].items())]).astype(np.float64)


@pytest.mark.parametrize(("run", "page"), [(RQ3, PAGE3), (RESUMED, PAGE4)], ids=["whole", "resumed"])
def test_losses(run: RawRun, page: str) -> None:
    """A resumed run shows one course: what its first attempt did beyond the checkpoint is not part of it."""
    rows = cells(page, "Losses over steps")
    assert [int(r[0]) for r in rows] == list(range(1, STEPS + 1))
    for step, *shown in rows:
        expected = [run.losses[int(step), arm] for arm in ("reference", "suspect", "baseline")]
        assert [value(n) for n in shown] == pytest.approx(expected, rel=1e-5)
    for step, apart in cells(page, "Difference of the losses over steps"):
        r, s = (run.losses[int(step), arm] for arm in ("reference", "suspect"))
        assert value(apart) == pytest.approx(abs(r - s), rel=DIGITS)
    assert "suspect: 1, beginning at step 33" in page


def test_drift_exact_and_estimated() -> None:
    rows = cells(PAGE3, "Drift of the parameters over steps")
    relative = cells(PAGE3, "Drift relative to the parameters over steps")
    kinds = {("suspect", "exact"): 0, ("suspect", "sketch estimate"): 0, ("baseline", "exact"): 0,
             ("baseline", "sketch estimate"): 0}  # fmt: skip
    for (step, arm, way, drift, error), (*_, ratio, _) in zip(rows, relative, strict=True):
        reference = flat(RQ3, int(step), "reference")
        expected = np.linalg.norm(flat(RQ3, int(step), arm) - reference)
        kinds[arm, way] += 1
        tolerance = DIGITS if way == "exact" else 0.05
        assert value(drift) == pytest.approx(expected, rel=tolerance)
        assert value(ratio) == pytest.approx(expected / np.linalg.norm(reference), rel=tolerance)
        assert error == ("0" if way == "exact" else "± 1 %")
    assert kinds == {key: STEPS // 10 if key[1] == "exact" else STEPS for key in kinds}


def test_drift_of_the_arms() -> None:
    for arm, first, last, drift, ratio, *_ in cells(PAGE3, "Drift by arm"):
        path = {n: np.linalg.norm(flat(RQ3, n, arm) - flat(RQ3, n, "reference")) for n in range(1, STEPS + 1)}
        assert int(first) == next(n for n, d in path.items() if d > 0)
        assert int(last) == STEPS
        assert value(drift) == pytest.approx(path[STEPS], rel=DIGITS)
        expected = path[STEPS] / np.linalg.norm(flat(RQ3, STEPS, "reference"))
        assert value(ratio) == pytest.approx(expected, rel=DIGITS)
        assert value(strip(PAGE3, f"drift / norm, {arm}")) == pytest.approx(expected, rel=DIGITS)
    assert strip(PAGE3, "first step of divergence") == "12"


@pytest.mark.parametrize("arm", ["suspect", "baseline"])
def test_drift_of_parameter_groups(arm: str) -> None:
    rows = cells(PAGE3, f"Drift by parameter group, {arm}")
    assert [row[0] for row in rows] == ["embed", "attn.0", "ffn.0", "attn.1", "ffn.1", "attn.2", "ffn.2", "head"]
    for group, *shown in rows:
        for step, n in zip(range(10, STEPS + 1, 10), shown, strict=True):
            mine, reference = (RQ3.params[step, a][group].astype(np.float64) for a in (arm, "reference"))
            expected = np.linalg.norm(mine - reference) / np.linalg.norm(reference)
            assert value(n) == pytest.approx(expected, rel=0.06)


# -- RQ3, fine-tuning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_accuracy_disagreement_and_their_paired_comparison(seed: int) -> None:
    records = finetune_run(seed)
    check_json(records, (20, 40))
    check_page(records, 40)


def test_the_sample_is_what_it_says() -> None:
    """The runs differ where they are made to, else the tests above would compare nothing."""
    assert {rank for (_, _, rank), *_, mask in bits_of(RQ1) if mask.any()} == {1}
    assert {site.phase for (_, site, _), *_, mask in bits_of(RQ2) if mask.any()} == {Phase.BWD}
    assert TP == 2
    arms = [table(finetune_run(seed).evaluations, 40)["", arm] for seed in range(3) for arm in ("suspect", "baseline")]
    for count in ("other", "only_arm", "only_reference", "equal_scores", "missing", "unanswered"):
        assert sum(getattr(row, count) for row in arms) > 0, count
