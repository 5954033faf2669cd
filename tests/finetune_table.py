"""The fine-tuning table from the stored answers by another path: counting, `math.comb`, bisection and convolution."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tandem.records import EvaluationRecord, RunRecords
from tandem.report.run_page import render
from tandem.runs.as_json import to_json
from tandem.runs.summary import summarise

ARMS = ("reference", "suspect", "baseline")


@dataclass(frozen=True)
class Row:
    """One arm on one task (empty: all)."""

    questions: int
    right: int
    unanswered: int
    other: int = 0
    """Questions answered otherwise than by the reference; the rest is about those that both answered, too."""
    both: int = 0
    only_arm: int = 0
    only_reference: int = 0
    equal_scores: int = 0
    missing: int = 0


def table(evaluations: Sequence[EvaluationRecord], step: int) -> dict[tuple[str, str], Row]:
    """(task, arm) -> its row, by a loop over the questions."""
    answered: dict[str, dict[tuple[str, str], EvaluationRecord]] = {arm: {} for arm in ARMS}
    for e in sorted(evaluations, key=lambda e: e.attempt):
        if e.step == step:
            answered[e.arm][e.task, e.question] = e
    tasks = {task for of in answered.values() for task, _ in of}
    out = {}
    for task in (*tasks, ""):
        for arm in ARMS:
            mine = {k: e for k, e in answered[arm].items() if task in ("", k[0])}
            theirs = {k: e for k, e in answered["reference"].items() if task in ("", k[0])}
            if not mine:
                continue
            counts = [0] * 5
            for key, a in mine.items():
                if key in theirs:
                    r = theirs[key]
                    right, reference_right = a.chosen == a.answer, r.chosen == r.answer
                    same = np.array(a.scores).tobytes() == np.array(r.scores).tobytes()
                    found = (a.chosen != r.chosen, True, right and not reference_right, reference_right and not right)
                    counts = [n + bool(x) for n, x in zip(counts, (*found, same), strict=True)]
            out[task, arm] = Row(
                len(mine), sum(e.chosen == e.answer for e in mine.values()), sum(e.chosen < 0 for e in mine.values()),
                *counts, len(set(mine) ^ set(theirs)),
            )  # fmt: skip
    return out


def mcnemar(one: int, other: int) -> float:
    """Two-sided, exact: both tails of a fair coin, in whole numbers."""
    n, k = one + other, min(one, other)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def exact_interval(found: int, of: int) -> tuple[float, float]:
    """Clopper-Pearson at 95 %: the rates at which so many, or so few, have a probability of 2.5 %."""

    def tail(p: float, numbers: range) -> float:
        return math.fsum(math.comb(of, i) * p**i * (1 - p) ** (of - i) for i in numbers)

    low = _root(lambda p: tail(p, range(found, of + 1)) - 0.025) if found else 0.0
    high = _root(lambda p: 0.025 - tail(p, range(found + 1))) if found < of else 1.0
    return low, high


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def paired(gained: int, lost: int, n: int) -> tuple[set[float], set[float]]:
    """The paired bootstrap without a random number: the distribution of one question, n times convolved.

    What each end may be: two values where its share is reached exactly (none of three questions discordant, for one),
    so that rounding decides.
    """
    up, down = (gained + 0.5) / (n + 2), (lost + 0.5) / (n + 2)
    one, total = np.array([down, 1 - up - down, up]), np.array([1.0])
    for _ in range(n):
        total = np.convolve(total, one)
    cumulative = np.cumsum(total)
    low, high = (
        {(int(np.flatnonzero(cumulative >= q + tie)[0]) - n) / n for tie in (-1e-12, 1e-12)} for q in (0.025, 0.975)
    )
    return low, high


def near(*values: float) -> Any:
    return pytest.approx(values, rel=1e-9, abs=1e-12)


def check_json(records: RunRecords, steps: Sequence[int]) -> None:
    """``answers`` of ``--json`` are those of the stored rows, after each of these steps."""
    shown = to_json(summarise(records))["answers"]
    assert [a["step"] for a in shown] == sorted(a["step"] for a in shown)
    expected = {(step, *key): row for step in steps for key, row in table(records.evaluations, step).items()}
    assert {(a["step"], a["task"], a["arm"]) for a in shown} == set(expected)
    for a in shown:
        row = expected[a["step"], a["task"], a["arm"]]
        accuracy, against = a["accuracy"], a["against_reference"]
        assert (accuracy["of"], accuracy["found"], a["unanswered"]) == (row.questions, row.right, row.unanswered)
        assert accuracy["share"] == row.right / row.questions
        assert (accuracy["low"], accuracy["high"]) == near(*exact_interval(row.right, row.questions))
        assert (against is None) == (a["arm"] == "reference")
        if against:
            other = against["disagreement"]
            assert (other["found"], other["of"], other["share"]) == (row.other, row.both, row.other / row.both)
            assert (other["low"], other["high"]) == near(*exact_interval(row.other, row.both))
            counts = [against[k] for k in ("only_arm", "only_reference", "equal_scores", "missing")]
            assert counts == [row.only_arm, row.only_reference, row.equal_scores, row.missing]
            assert against["difference"] == (row.only_arm - row.only_reference) / row.both
            ends = paired(row.only_arm, row.only_reference, row.both)
            assert all(x in may for x, may in zip(against["difference_interval"], ends, strict=True))
            assert against["p_value"] == pytest.approx(mcnemar(row.only_arm, row.only_reference), rel=1e-9)


def check_page(records: RunRecords, step: int) -> None:
    """The table of the page is that of the stored rows after the last evaluated step."""
    page = render(records)
    assert f"After step {step}." in page
    body = re.search(r'aria-label="Accuracy and disagreement">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert body is not None
    expected = table(records.evaluations, step)
    seen = set()
    for line in re.findall(r"<tr.*?</tr>", body[1], re.DOTALL):
        texts = [html.unescape(re.sub(r"<[^>]+>", " ", c)).split() for c in re.findall(r"<t[hd].*?</t[hd]>", line)]
        task = " ".join(texts[0])
        key = ("" if task == "all tasks" else task, texts[1][0])
        row = expected[key]
        seen.add(key)
        assert int(texts[2][0]) == row.questions
        assert texts[3] == _share(row.right, row.questions)
        assert int(texts[9][0]) == row.unanswered
        if key[1] == "reference":
            assert texts[4:9] == [["–"]] * 5
            continue
        assert texts[4] == _share(row.other, row.both)
        difference = (row.only_arm - row.only_reference) / row.both
        ends = [{f"{100 * x:+.2f}" for x in may} for may in paired(row.only_arm, row.only_reference, row.both)]
        assert texts[5][:2] == [f"{100 * difference:+.2f}", "points"]
        assert texts[5][3] == "to"
        assert all(x in may for x, may in zip(texts[5][2::2], ends, strict=True))
        assert abs(float(texts[6][0]) / mcnemar(row.only_arm, row.only_reference) - 1) < 0.06
        assert texts[7] == [str(row.only_arm), "/", str(row.only_reference)]
        assert int(texts[8][0]) == row.equal_scores
    assert seen == set(expected)


def _share(found: int, of: int) -> list[str]:
    low, high = exact_interval(found, of)
    return [f"{100 * found / of:.2f}", "%", f"{100 * low:.2f}", "to", f"{100 * high:.2f}"]
