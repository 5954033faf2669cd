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
        ("controller.replicas=0", "replicas"),
        ("controller.markNodes=sometimes", "markNodes"),
        ("api.replicas=0", "replicas"),
        ("api.setting.pool=3", "setting"),
        ("api.settings.pols=3", "pols"),
        ("api.settings.pool=0", "pool"),
        ("api.settings.events.clients=many", "clients"),
        ("api.settings.namespace=other", "namespace"),
        ("api.settings.hosts={tandem.example.com}", "hosts"),
        ("api.ingress.host=https://tandem.example.com", "host"),
        ("api.networkPolicy.from[0].podSelectors.a=b", "podSelectors"),
        ("api.networkPolicy.kubernetes.ports={https}", "ports"),
        ("controller.networkPolicy.kubernetes.ports={https}", "ports"),
        ("controller.networkPolicy.from[0].podSelector.matchLabels.a=b", "from"),
        ("metrics.controller.from[0].podSelectors.a=b", "podSelectors"),
        ("api.service.port=0", "port"),
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
        ("metrics.worker.from[0].podSelectors.a=b", "podSelectors"),
        ("metrics.alerts.runbooks=docs", "runbooks"),
        ("metrics.dashboard.enabled=true", "dashboard"),
    ],
)
def test_the_schema_refuses_unknown_keys_and_wrong_values(setting: str, word: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    assert word in done.stderr


def test_nowhere_to_ask_for_names_is_refused() -> None:
    """A rule that lists no peer is open to all: the suspect, and the API, would reach port 53 of everybody."""
    done = template("--set-json", "worker.dns=[]")
    assert done.returncode != 0
    assert "/worker/dns" in done.stderr.replace(".", "/")


def test_no_database_at_all_is_one_clear_sentence() -> None:
    done = template("--set", "database.trial.enabled=false")
    assert done.returncode != 0
    assert "database.existingSecret: name the Secret with the database's URL" in done.stderr


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("image.registry=https://r.io/a", 'image.registry "https://r.io/a": give a host and a path'),
        ("image.registry=r.io/Team", "image.registry"),
        ("image.registry=r.io/a//", "image.registry"),
        ("controller.image.repository=https://r.io/c", 'controller.image.repository "https://r.io/c": give a name'),
        ("controller.image.repository=r.io/c:1.0", "without a tag"),
        ("api.image.repository=https://r.io/a", 'api.image.repository "https://r.io/a": give a name'),
        ("worker.image.repository=http://w", "worker.image.repository"),
        ("worker.image.repository=team/Worker", "small letters"),
        ("worker.image.repository=a worker", "worker.image.repository"),
        ("database.trial.image=https://r.io/postgres:18", "database.trial.image"),
        ("fullnameOverride=Tandem", 'fullnameOverride "Tandem": use small letters, digits and dashes'),
        ("fullnameOverride=tan_dem", "fullnameOverride"),
        ("fullnameOverride=1st", "a letter first"),
        ("nameOverride=-x", "nameOverride"),
        ("nameOverride=x.y", "nameOverride"),
        ("nameOverride=TANDEM", "nameOverride"),
        ("worker.allowedHostPaths={/}", 'worker.allowedHostPaths "/": name a folder below /'),
        ("worker.allowedHostPaths={/mnt,//}", "the whole disk is never allowed"),
        ("worker.allowedHostPaths={/.}", "worker.allowedHostPaths"),
        ("worker.allowedHostPaths={/mnt/..}", "worker.allowedHostPaths"),
    ],
)
def test_what_no_cluster_could_take_is_one_line_with_the_mend(setting: str, says: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert says in line


@pytest.mark.parametrize(
    "setting",
    [
        "image.registry=localhost:5000",
        "image.registry=r.io:5000/a/",
        "image.registry=team",
        "controller.image.repository=r.io:443/a_b/c--d.e",
        f"database.trial.image=postgres:18@sha256:{'0' * 64}",
        "database.trial.image=r.io:5000/mirror/postgres",
        "fullnameOverride=tandem-2",
        "nameOverride=2nd",
        "worker.allowedHostPaths={/mnt/.weights/,/..data,/a//b.c}",
    ],
)
def test_what_is_unusual_but_works_is_taken(setting: str) -> None:
    done = template("--set", setting)
    assert done.returncode == 0, done.stderr


def test_a_parent_chart_may_hand_down_globals() -> None:
    assert template("--set", "global.anything=1").returncode == 0
