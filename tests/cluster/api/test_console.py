"""The console before a real API server: what people with the cluster's own tokens see and do."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx2
import pytest
import yaml

from api_server import Served
from cluster.api.test_api import Cluster, api, cluster, with_crd
from cluster.handle import until
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect
from tandem.kube.paths import PAIRRUNS
from tandem.pairrun.names import run_id_of
from tandem_api.console.shell import SIGN_IN
from tandem_api.launch.cluster import ANNOTATION_BY
from visitor import OWN, Visitor, block, the_request, visiting

__all__ = ["api", "cluster", "with_crd"]
pytestmark = [pytest.mark.needs("api-server"), pytest.mark.needs("console")]
Come = Callable[[str], Visitor]


@pytest.fixture
def person(api: Served, cluster: Cluster) -> Iterator[Come]:
    """Signs in with the token of a service account."""
    with ExitStack() as stack:

        def come(name: str) -> Visitor:
            return stack.enter_context(visiting(api.url, cluster.token(name)))

        yield come


def test_only_tokens_of_the_cluster_sign_in_and_see_what_they_may_do(
    api: Served, cluster: Cluster, person: Come
) -> None:
    with httpx2.Client(base_url=api.url, timeout=60) as client:
        for token in ("x", cluster.token("editor", "somebody-else")):
            answer = client.post(SIGN_IN, data={"token": token}, headers=OWN)
            assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
            assert "not valid here" in answer.text
    viewer = person("viewer")
    assert f"system:serviceaccount:{cluster.namespace}:viewer" in viewer.page("/")
    assert "may not create pairruns" in viewer.page("/console/launch")
    refused = viewer.send("/console/launch", node=cluster.sick, steps="20")
    assert (refused.status_code, "may not create" in refused.text) == (403, True)
    assert cluster.pairruns() == []


def test_candidates_are_shown_with_their_reasons(api: Served, cluster: Cluster, person: Come) -> None:
    other = f"other-{cluster.namespace}"
    cluster.node(other, cordoned=True)
    page = html.unescape(person("viewer").page("/console/launch"))
    (row,) = (r for r in re.findall(r"<tr>.*?</tr>", page) if f'node={cluster.sick}"' in r)
    (candidate,) = (c for c in api.get("/v1/candidates")["candidates"] if c["node"] == cluster.sick)
    assert (candidate["reference"], candidate["signs"]) == (cluster.well, ["cordoned"])
    assert candidate["why"]
    over = {p["node"]: p["message"] for p in candidate["passed_over"]}
    assert over[other] == "quarantined itself (cordoned)"
    for words in (cluster.well, "cordoned", candidate["why"], *over, *over.values()):
        assert words in row, words


def test_what_the_form_shows_the_cluster_takes_and_it_launches_once(
    api: Served, cluster: Cluster, person: Come
) -> None:
    editor = person("editor")
    form = {
        "node": cluster.sick, "reference": cluster.well, "workload": "gradient", "steps": "25", "tp": "2",
        "cluster": "retry: {maxAttempts: 2}\nttlSecondsAfterFinished: 60",
    }  # fmt: skip
    shown = editor.send("/console/launch/preview", **form).text
    taken = block(shown, "yaml")
    cluster.server.kubectl("create", "--dry-run=server", "-f", "-", input=taken)
    assert cluster.pairruns() == []
    made = editor.send("/console/launch", nonce="abc123", **form)
    again = editor.send("/console/launch", nonce="abc123", **form)
    assert (made.status_code, again.headers["location"]) == (303, made.headers["location"]), made.text
    (obj,) = cluster.pairruns()
    run = run_id_of(obj["metadata"]["uid"], obj["metadata"]["creationTimestamp"])
    assert made.headers["location"] == f"/console/runs/{run}"
    assert obj["metadata"]["annotations"][ANNOTATION_BY] == f"system:serviceaccount:{cluster.namespace}:editor"
    assert (obj["spec"]["suspect"], obj["spec"]["retry"]["maxAttempts"]) == ({"nodeName": cluster.sick}, 2)
    url, body, headers = the_request(block(shown, "curl"))
    assert url.startswith(api.url), "the token goes nowhere else"
    by_rest = api.client.post(url, content=body, headers=headers)
    assert by_rest.status_code == 202, by_rest.text
    specs = [obj["spec"] for obj in cluster.pairruns()]
    assert specs == [obj["spec"]] * 2, "the command sends what the form does"
    shown_spec = cluster.kube.create(PAIRRUNS.path(cluster.namespace), yaml.safe_load(taken), dry_run=True)["spec"]
    assert shown_spec == obj["spec"], "and so does the object"


def test_a_run_is_seen_and_cancelled(api: Served, cluster: Cluster, person: Come) -> None:
    editor, viewer = (person(name) for name in ("editor", "viewer"))
    where = editor.send("/console/launch", node=cluster.sick, steps="20", tp="1").headers["location"]
    (obj,) = cluster.pairruns()
    condition = {"type": "Paired", "status": "False", "reason": "NoReference", "message": "nobody is like <it>",
                 "lastTransitionTime": "2026-11-30T00:00:00Z"}  # fmt: skip
    cluster.says(obj["metadata"]["name"], conditions=[condition])
    told = lambda page: "nobody is like &lt;it&gt;" in page
    for page in (where, "/", "/console/runs"):
        until(f"the reason on {page}", lambda page=page: told(viewer.page(page)))
    assert "Its PairRun is deleted" in editor.page(where)
    assert "Cancel the run" not in viewer.page(where)
    refused = viewer.send(f"{where}/cancel")
    assert (refused.status_code, "may not delete" in refused.text) == (403, True)
    assert len(cluster.pairruns()) == 1
    assert editor.send(f"{where}/cancel").headers["location"] == where
    until("its end", lambda: cluster.pairruns() == [])
    until("it to be forgotten", lambda: editor.client.get(where).status_code == 404)


def test_a_node_is_cleared_by_whom_the_cluster_lets(api: Served, cluster: Cluster, person: Come) -> None:
    engine = connect(cluster.database)
    for seed, reference in enumerate(("r-1", "r-2")):
        store_run(engine, node_run(suspect=cluster.sick, reference=reference, hits={3: 5}, seed=seed,
                                   began=BEGAN + seed * HOUR))  # fmt: skip
    engine.dispose()
    editor, viewer = (person(name) for name in ("editor", "viewer"))
    node = f"/console/nodes/{cluster.sick}"
    assert ('name="reason"' in editor.page(node), 'name="reason"' in viewer.page(node)) == (True, False)
    assert viewer.send(f"{node}/clear", reason="mine").status_code == 403
    assert editor.send(f"{node}/clear", reason="a new board").headers["location"] == f"{node}#decisions"
    (decision,) = api.get(f"/v1/nodes/{cluster.sick}")["decisions"]
    by = f"system:serviceaccount:{cluster.namespace}:editor"
    assert (decision["reason"], decision["decided_by"]) == ("a new board", by)
    assert by in editor.page(node)


@pytest.mark.needs("chromium")
@pytest.mark.needs("axe")
def test_the_clusters_launch_page_is_sane_in_a_browser_and_launches_once(api: Served, cluster: Cluster) -> None:
    """Its nodes, the PairRun's own fields and the candidates are on no page of one machine."""
    from browser import chromium  # its library is no part of what a machine without Chromium needs
    from console import fits, sign_in, violations

    with chromium() as tab:
        sign_in(tab, api.url, cluster.token("editor"), f"/console/launch?node={cluster.sick}")
        tab.until("document.querySelector('#yaml')")
        tab.run("document.querySelector('details').open = true")
        for look in ({}, {"dark": True}, {"width": 390}):
            tab.look(**look)
            assert violations(tab) == [], look
            assert fits(tab), look
        tab.look()
        assert tab.ask("document.querySelector('#f-node').value") == cluster.sick
        tab.fill("#f-steps", "23")
        tab.fill("#f-cluster", "retry: {maxAttempts: 2}")
        tab.until("document.querySelector('#yaml').textContent.includes('maxAttempts: 2')")
        tab.click("#launch button")
        tab.until("location.pathname.startsWith('/console/runs/')")
        (made,) = cluster.pairruns()
        assert (made["spec"]["suspect"], made["spec"]["workload"]["steps"]) == ({"nodeName": cluster.sick}, 23)
        assert made["spec"]["retry"]["maxAttempts"] == 2
        tab.open(f"{api.url}/")
        tab.until("document.querySelector('#fleet')")
        assert [line for line in tab.said if not line.startswith("info: Autofocus")] == []
        assert all(url.startswith((f"{api.url}/", "data:")) for url in tab.requests), tab.requests
