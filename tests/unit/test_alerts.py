"""Every alert fires when it should, says what it means, and keeps still otherwise: `promtool test rules`."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from alert_rules import FOLDER, looked_at, matchers, rule
from expositions import api, controller, fleet, pairs
from node_runs import node_run
from tandem.pairrun.status import PairRunStatus
from tandem.vocabulary import Role
from tandem_controller.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
SCRAPED = {"namespace", "instance"}
"""Labels that Prometheus gives to everything that it scrapes in a cluster."""
NAMES = {"node", "reference"}
"""Labels whose values are anybody's."""
PAIR = {"namespace": "tandem", "node": "sick", "reference": "well", "workload": "submodule", "synthetic": "false"}


@dataclass(frozen=True)
class Case:
    """Series by the minute, and what comes of them."""

    about: str
    series: dict[str, str]
    """Series -> values in promtool's notation, one a minute."""
    at: str
    """When it is looked at."""
    labels: dict[str, str] | None = None
    """Of the alert that fires; None: none does."""
    summary: str = ""
    description: str = ""


def _series(name: str, labels: dict[str, str]) -> str:
    inner = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{inner}}}"


def of(name: str, **labels: str) -> str:
    """A series of a pair."""
    return _series(name, PAIR | {"kind": "suspect", "instance": "10.0.0.1:7734"} | labels)


def own(name: str, **labels: str) -> str:
    """A series of the controller or the API."""
    return _series(name, {"namespace": "tandem", "instance": "10.0.0.2:8080"} | labels)


CORRUPTING = own("tandem_fleet_node_verdict", node="sick", verdict="corrupting")
MISMATCHED = "tandem_pair_sites_mismatched_total"
FINISHED = "tandem_controller_runs_finished_total"
AGE, SUM, COUNT = (
    f"tandem_pair_{name}" for name in ("last_step_age_seconds", "step_seconds_sum", "step_seconds_count")
)
CONTROL = "tandem_pair_control_failures_total"
DIFFERS = own("tandem_controller_runs_inconclusive_total", reason="reference_differs")

CASES: dict[str, list[Case]] = {
    "TandemNodeCorrupting": [
        Case(
            "new", {CORRUPTING: "_x60 1x60"}, "65m", {"namespace": "tandem", "node": "sick"}, "Node sick corrupts",
            "The verdict of sick became corrupting within the last day: its corruption was reproduced under control, "
            "or it differs from itself.",
        ),
        Case("known for more than a day", {CORRUPTING: "1x1600"}, "1580m"),
        Case("known, and the API was away a day ago", {CORRUPTING: "1x130 _x20 1x1500"}, "1580m"),
        Case("suspected only", {own("tandem_fleet_node_verdict", node="sick", verdict="suspected"): "1x60"}, "30m"),
    ],
    "TandemMismatchBurst": [
        Case(
            "a burst", {of(MISMATCHED, phase="fwd"): "0x5 50x20", of(MISMATCHED, phase="bwd"): "0x5 200x20"}, "8m",
            {"namespace": "tandem", "node": "sick", "reference": "well"}, "Node sick mismatches in a burst",
            "250 tensors of sick differed from reference well within 10 minutes.",
        ),
        Case("one now and then", {of(MISMATCHED): "0+5x30"}, "20m"),
        Case("injected", {of(MISMATCHED, synthetic="true"): "0+500x30"}, "20m"),
        Case("a null pair: another alert", {of(MISMATCHED, kind="null"): "0+500x30"}, "20m"),
        Case("trained apart", {of(MISMATCHED, workload="training"): "0+500x30"}, "20m"),
        Case("fine-tuned apart", {of(MISMATCHED, workload="finetune"): "0+500x30"}, "20m"),
    ],
    "TandemRunStuck": [
        Case(
            "no step", {of(AGE): "0+60x40", of(SUM): "600x40", of(COUNT): "100x40"}, "22m",
            {k: PAIR[k] for k in ("namespace", "node", "reference", "workload")}, "A pair makes no progress",
            "The pair of sick and well finished no step for 22m 0s.",
        ),
        Case("long steps", {of(AGE): "0+60x40", of(SUM): "9000x40", of(COUNT): "10x40"}, "22m"),
        Case("steps go on", {of(AGE): "30x40", of(SUM): "0+6x40", of(COUNT): "0+1x40"}, "22m"),
        Case("not yet long enough", {of(AGE): "0+60x40", of(SUM): "600x40", of(COUNT): "100x40"}, "17m"),
        Case(
            "nothing is stored", {
                own("tandem_controller_oldest_progress_seconds"): "0+60x200",
                own("tandem_controller_database_up"): "1x200",
            }, "130m", {"namespace": "tandem"}, "A pair makes no progress",
            "A running PairRun stored nothing new for 2h 10m 0s.",
        ),
        Case(
            "the database is away", {
                own("tandem_controller_oldest_progress_seconds"): "0+60x200",
                own("tandem_controller_database_up"): "0x200",
            }, "130m",
        ),
    ],
    "TandemInconclusiveShareHigh": [
        Case(
            "half of them", {
                own(FINISHED, verdict="inconclusive", kind="suspect"): "0+1x30",
                own(FINISHED, verdict="match", kind="suspect"): "0+1x30",
            }, "20m", {"namespace": "tandem"}, "Many runs are inconclusive",
            "50% of the PairRuns that ended within 6 hours were inconclusive: they say nothing about their nodes.",
        ),
        Case("too few to say", {own(FINISHED, verdict="inconclusive", kind="suspect"): "0x5 2x30"}, "20m"),
        Case(
            "a few", {
                own(FINISHED, verdict="inconclusive", kind="suspect"): "0+1x30",
                own(FINISHED, verdict="match", kind="suspect"): "0+9x30",
            }, "20m",
        ),
    ],
    "TandemSpoolGrowing": [
        Case(
            "grows", {of("tandem_pair_spool_records"): "0+100x40"}, "20m",
            {"namespace": "tandem", "node": "sick", "reference": "well"}, "Records wait in the spool of well",
            "2000 records of the pair sick, well wait in the reference's local spool, and they grow: PostgreSQL does "
            "not take them.",
        ),
        Case("drains", {of("tandem_pair_spool_records"): "4000-100x40"}, "20m"),
        Case("empty", {of("tandem_pair_spool_records"): "0x40"}, "20m"),
    ],
    "TandemControllerNotLeading": [
        Case(
            "none leads", {own("tandem_controller_leading"): "1x5 0x30"}, "15m", {"namespace": "tandem"},
            "No controller leads",
            "No replica of Tandem's controller has led for 5 minutes: PairRuns are neither started nor judged.",
        ),
        Case(
            "none is there", {"up": "1x30"}, "15m", {}, "No controller leads",
            "No replica of Tandem's controller has led for 5 minutes: PairRuns are neither started nor judged.",
        ),
        Case(
            "another took over", {
                own("tandem_controller_leading"): "1x5 0x30",
                own("tandem_controller_leading", instance="10.0.0.3:8080"): "0x6 1x30",
            }, "15m",
        ),
    ],
    "TandemSuspectWaiting": [
        Case(
            "for long", {own("tandem_controller_oldest_run_seconds", state="waiting"): "0+60x60"}, "40m",
            {"namespace": "tandem"}, "A suspect waits without a partner",
            "A PairRun has waited for a partner for 40m 0s.",
        ),
        Case("not for long", {own("tandem_controller_oldest_run_seconds", state="waiting"): "0+60x60"}, "20m"),
        Case("it runs", {own("tandem_controller_oldest_run_seconds", state="running"): "0+60x60"}, "40m"),
    ],
    "TandemControlFailed": [
        Case(
            "the reference's", {of(CONTROL, role="reference", control="self_replay_end"): "0x5 1x20"}, "10m",
            {
                "namespace": "tandem", "reference": "well", "control": "self_replay_end",
                "what": "a reference failed a control",
            },
            "A control failed: a reference failed a control",
            "a reference failed a control (reference well, control self_replay_end): the reference or the software is "
            "suspect, not the node under test.",
        ),
        Case(
            "a null pair, live", {of(MISMATCHED, kind="null"): "0x5 1x20"}, "10m",
            {"namespace": "tandem", "node": "sick", "reference": "well", "what": "two healthy nodes differ"},
            "A control failed: two healthy nodes differ",
            "two healthy nodes differ (reference well, against sick): the reference or the software is suspect, not "
            "the node under test.",
        ),
        Case(
            "a null run's verdict", {own(FINISHED, kind="null", verdict="mismatch"): "0x5 1x20"}, "10m",
            {"namespace": "tandem", "what": "a null run mismatched"}, "A control failed: a null run mismatched",
            "a null run mismatched (reference in the run's report): the reference or the software is suspect, not the "
            "node under test.",
        ),
        Case(
            "a run's reason", {DIFFERS: "0x5 1x20"}, "10m",
            {"namespace": "tandem", "what": "a reference did not repeat its own results"},
            "A control failed: a reference did not repeat its own results",
            "a reference did not repeat its own results (reference in the run's report): the reference or the software "
            "is suspect, not the node under test.",
        ),
        Case("the suspect's: a finding", {of(CONTROL, role="suspect", control="self_replay_end"): "0x5 1x20"}, "10m"),
        Case("injected", {of(CONTROL, role="reference", control="parity", synthetic="true"): "0x5 1x20"}, "10m"),
        Case("the suspect mismatched", {of(MISMATCHED): "0x5 1x20"}, "10m"),
        Case("null runs match", {own(FINISHED, kind="null", verdict="match"): "0x5 1x20", DIFFERS: "0x25"}, "10m"),
    ],
}  # fmt: skip


def test_every_alert_has_cases_of_both_kinds() -> None:
    assert set(CASES) == {path.stem for path in FOLDER.glob("*.yaml")}
    for name, cases in CASES.items():
        assert {case.labels is None for case in cases} == {True, False}, name


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should_and_only_then(name: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "tandem", "rules": [rule(name)]}]}))
    tests = [_test(name, case) for case in CASES[name]]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _test(name: str, case: Case) -> dict[str, Any]:
    there = rule(name)
    expected = []
    if case.labels is not None:
        annotations = {
            "summary": case.summary,
            "description": case.description,
            "runbook_url": there["annotations"]["runbook_url"],
        }
        expected = [{"exp_labels": {**there["labels"], **case.labels}, "exp_annotations": annotations}]
    return {
        "name": case.about,
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": name, "exp_alerts": expected}],
    }


def test_alerts_look_only_at_metrics_that_are_documented() -> None:
    known = set(re.findall(r"`(tandem_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for name in CASES:
        used = set(re.findall(r"tandem_\w+", rule(name)["expr"]))
        assert {re.sub(r"_(sum|count|bucket)$", "", metric) for metric in used} <= known, name


# -- against what the processes tell ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def told() -> dict[str, list[dict[str, str]]]:
    """Series -> the labels of each that the code of the processes tells."""
    found = defaultdict(list)
    for family in (*pairs(), *controller(), *fleet(), *api()):
        for sample in family.samples:
            found[sample.name].append(sample.labels)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_series_of_its_cases_are_told(name: str, told: dict[str, list[dict[str, str]]]) -> None:
    """With these labels, and these values. So a label that is renamed, or a value, is not only an alert that keeps
    still: each alert fires above on such series, with the labels and texts that are written there.
    """
    for series in (series for case in CASES[name] for series in case.series if series != "up"):
        metric, inner = re.fullmatch(r"(\w+)\{(.*)\}", series).groups()  # type: ignore[union-attr]
        mine = {label: value for label, _, value in matchers(inner) if label not in SCRAPED}
        assert any(
            mine.keys() <= there.keys() and all(there[label] == mine[label] for label in mine.keys() - NAMES)
            for there in told[metric]
        ), series


@pytest.mark.parametrize("name", CASES)
def test_every_label_and_value_that_it_looks_at_is_told(name: str, told: dict[str, list[dict[str, str]]]) -> None:
    """Also those that only keep it still, and each of several."""
    for metric, label, values in looked_at(rule(name)["expr"]):
        if label not in SCRAPED:
            assert all(label in there for there in told[metric]), (metric, label)
            assert values <= {there[label] for there in told[metric]}, (metric, label)


@pytest.mark.parametrize("name", CASES)
def test_its_texts_name_labels_of_what_fires(name: str) -> None:
    """The labels of its cases are those of a real evaluation, see above."""
    used = set(re.findall(r"\$labels\.(\w+)", str(rule(name)["annotations"])))
    assert used <= {label for case in CASES[name] for label in case.labels or ()}


def test_the_reason_that_an_alert_waits_for_is_that_of_the_verdict() -> None:
    run, metrics = node_run(differs=[Role.REFERENCE]).run, Metrics()
    metrics.finished(run.kind, PairRunStatus(verdict=run.verdict, reason=run.reason))
    assert metrics.registry.get_sample_value(
        "tandem_controller_runs_inconclusive_total", {"reason": "reference_differs"}
    ) == 1  # fmt: skip
