"""`helm lint`, and the schema: what a value may be."""

from __future__ import annotations

import pytest

from chart.rendering import CHART, CHOICES, run, template

pytestmark = pytest.mark.needs("helm")


@pytest.mark.parametrize("choice", CHOICES)
def test_lint_has_no_complaint(choice: str) -> None:
    done = run("lint", "--strict", str(CHART), *CHOICES[choice])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("contoller.replicas=2", "contoller"),
        ("controller.replica=2", "replica"),
        ("controller.replicas=two", "replicas"),
        ("controller.replicas=-1", "replicas"),
        ("controller.markNodes=sometimes", "markNodes"),
        ("worker.accelerator=cuda11", "accelerator"),
        ("worker.image.tag=a b", "tag"),
        ("worker.image.digest=sha256:12", "digest"),
        ("worker.allowedHostPaths={relative}", "allowedHostPaths"),
        ("worker.dns[0].labels.a=b", "dns"),
        ("worker.dns[0].cidr=everywhere", "dns"),
        ("policy.quarantined[0].kind=taint", "quarantined"),
        ("policy.quarantine[0].kind=rumour", "quarantine"),
        ("database.trial.persistence.size=big", "size"),
        ("database.trial.password=secret", "password"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("metrics.podMonitor.interval=often", "interval"),
    ],
)
def test_the_schema_refuses_unknown_keys_and_wrong_values(setting: str, word: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    assert word in done.stderr


def test_no_database_at_all_is_one_clear_sentence() -> None:
    done = template("--set", "database.trial.enabled=false")
    assert done.returncode != 0
    assert "database.existingSecret: name the Secret with the database's URL" in done.stderr


def test_a_parent_chart_may_hand_down_globals() -> None:
    assert template("--set", "global.anything=1").returncode == 0
