"""The API of the chart on real nodes: tokens of the cluster, a launch by REST watched to its verdict, its metrics."""

from __future__ import annotations

import html
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import pytest
import yaml

from api_server import SentEvent, events, is_problem
from cluster.e2e.installation import COMPILED, NAMESPACE, VERDICT_S, Tandem
from cluster.e2e.reaching import address, component, of_the_cluster, reached
from cluster.e2e.scraping import Looking, prometheus_in
from cluster.forwarded import forwarded
from cluster.handle import BareCluster, until
from plugins.parts import skip
from tandem.pairrun import names
from tandem.vocabulary import Role
from tokens import claims_of, forged, signed
from visitor import block, the_request, visiting

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.slow, pytest.mark.timeout(1200)]
PEOPLE = {"operator": "editor", "onlooker": "viewer"}
"""Service accounts and the roles of the chart that they are bound to."""


class Api:
    """The API through `kubectl port-forward`.

    Args:
        tandem: the installation.
        client: of the forwarded port.
    """

    def __init__(self, tandem: Tandem, client: httpx2.Client) -> None:
        self.tandem, self.client = tandem, client

    def token(self, person: str, audience: str = "tandem") -> str:
        words = ("create", "token", person, "--namespace", NAMESPACE, "--audience", audience)
        return self.tandem.cluster.kubectl(*words)

    def ask(self, path: str, who: str | None = "operator", *, order: Any = None, **headers: str) -> httpx2.Response:
        """GET, or POST with an order."""
        given = {"Authorization": f"Bearer {self.token(who)}"} if who else {}
        if order is None:
            return self.client.get(path, headers=given | headers)
        return self.client.post(path, json=order, headers=given | headers)

    def get(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status_code == 200, answer.text[:1000]
        return answer.json()

    def watch(self, run: str, into: list[SentEvent], last: str = "") -> None:
        """Take a run's events to the end of the stream; one that breaks lacks its verdict."""
        headers = {"Authorization": f"Bearer {self.token('operator')}"} | ({"Last-Event-ID": last} if last else {})
        with (
            suppress(httpx2.TransportError),
            self.client.stream("GET", f"/v1/runs/{run}/events", headers=headers) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            into.extend(events(answer.iter_lines()))


@pytest.fixture(scope="module")
def api(tandem: Tandem) -> Iterator[Api]:
    """With people who have the chart's roles; afterwards gone, so that an uninstall can be looked at."""

    def make(kind: str, name: str, *options: str) -> None:
        tandem.cluster.kubectl("create", kind, name, "--namespace", NAMESPACE, *options)
        stack.callback(tandem.cluster.kubectl, "delete", kind, name, "--namespace", NAMESPACE)

    with ExitStack() as stack:
        for person, role in PEOPLE.items():
            make("serviceaccount", person)
            account = f"--serviceaccount={NAMESPACE}:{person}"
            make("rolebinding", person, f"--clusterrole={NAMESPACE}-tandem-{role}", account)
        port = stack.enter_context(forwarded(tandem.cluster, NAMESPACE, "service/tandem-api", 80))
        client = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=VERDICT_S)
        found = Api(tandem, stack.enter_context(client))
        until("the API", lambda: client.get("/readyz").status_code == 200, 60)
        yield found


def pairruns(tandem: Tandem) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tandem.cluster.get("pairruns", "--namespace", NAMESPACE)["items"]
    return found


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_who_asks_must_be_known_to_the_cluster_and_may_do_what_its_roles_say(api: Api, tandem: Tandem) -> None:
    good = api.token("operator")
    now = int(time.time())
    strangers = {
        "another audience": api.token("operator", "somebody-else"),
        "forged": forged(good, sub=claims_of(good)["sub"].replace("operator", "tandem-controller")),
    }
    if isinstance(tandem.cluster, BareCluster):  # its key is ours
        key = tandem.cluster.root / "pki" / "sa.key"
        past = {"iat": now - 7200, "nbf": now - 7200}
        strangers["expired"] = signed(good, key, **past, exp=now - 3600)
        fresh = signed(good, key, **past, exp=now + 3600)
        assert api.client.get("/v1/nodes", headers=bearer(fresh)).status_code == 200, "signed as the cluster does"
    is_problem(api.client.get("/v1/nodes"), 401, "unauthenticated")
    for what, token in strangers.items():
        for answer in (
            api.client.get("/v1/nodes", headers=bearer(token)),
            api.client.post("/v1/runs", json={}, headers=bearer(token)),
        ):
            assert is_problem(answer, 401, "unauthenticated"), what
            assert answer.headers["www-authenticate"].startswith("Bearer")
    assert api.ask("/v1/nodes", "onlooker").status_code == 200
    refused = is_problem(api.ask("/v1/runs", "onlooker", order={}), 403, "forbidden")
    assert f"system:serviceaccount:{NAMESPACE}:onlooker may not create" in refused["detail"]
    assert pairruns(tandem) == []


@pytest.mark.parametrize("service", ["api", "controller"])
def test_it_reaches_names_the_api_server_and_postgresql_and_nothing_else(tandem: Tandem, service: str) -> None:
    pod = component(tandem, service)
    controller = component(tandem, "controller")["status"]["podIP"]
    targets = {
        "postgresql": (address(tandem, "pod", "tandem-postgres-0"), 5432),
        "postgresql's service": (address(tandem, "service", "tandem-postgres"), 5432),
        **of_the_cluster(tandem),
    }
    targets |= {
        "api": {"the controller's metrics": (controller, 8080), "the controller's health": (controller, 8081)},
        "controller": {"the API": (component(tandem, "api")["status"]["podIP"], 8080)},
    }[service]
    found = reached(tandem, pod["metadata"]["name"], f"tandem-postgres.{NAMESPACE}.svc", targets)
    assert found == {"dns", "postgresql", "postgresql's service", "api server", "api server's address"}
    spec = pod["spec"]["containers"][0]
    assert (spec["securityContext"]["readOnlyRootFilesystem"], pod["spec"]["securityContext"]["runAsUser"]) == (
        True,
        65532,
    )


def order_for(tandem: Tandem) -> dict[str, Any]:
    """A pair that lasts for some scrapes, on the CPUs, with the nodes' compiled programs."""
    template = {"template": COMPILED} if isinstance(tandem.cluster, BareCluster) else {}
    resources = {"device": "cpu", "cpu": "100m", "memory": "3Gi"}
    return {
        "node": tandem.suspect,
        "spec": {"duration": 20, "self_replays": 2},
        "cluster": {"resources": resources, "retry": {"maxAttempts": 3, "backoffSeconds": 1}, **template},
    }


def test_a_run_is_launched_by_rest_and_watched_to_its_verdict_while_prometheus_looks_on(
    api: Api, tandem: Tandem
) -> None:
    seen: list[SentEvent] = []
    with ExitStack() as stack:
        looking = (
            stack.enter_context(prometheus_in(tandem.cluster)) if isinstance(tandem.cluster, BareCluster) else None
        )
        stack.enter_context(tandem.quarantined())
        candidate = until_candidate(api, tandem)
        assert (candidate["reference"], "cordoned" in candidate["signs"]) == (tandem.reference, True)
        order = order_for(tandem) | {"reference": candidate["reference"]}
        key = {"Idempotency-Key": "night-shift-1"}
        first, again = (api.ask("/v1/runs", order=order, **key) for _ in range(2))
        assert (first.status_code, again.status_code) == (202, 202), first.text
        run = str(first.json()["run"])
        assert (again.json()["run"], first.headers["location"]) == (run, f"/v1/runs/{run}")
        (obj,) = pairruns(tandem)
        assert obj["metadata"]["annotations"]["tandem.dev/launched-by"] == f"system:serviceaccount:{NAMESPACE}:operator"
        watcher = threading.Thread(target=api.watch, args=(run, seen), daemon=True)
        watcher.start()
        if looking is not None:
            scraped(looking, tandem)
        watcher.join(VERDICT_S)
        assert not watcher.is_alive()
    assert seen[-1].kind == "verdict"
    assert (seen[-1].data["verdict"], seen[-1].data["reason"]) == ("match", "completed"), seen[-1]
    assert {"conditions", "attempt", "progress"} <= {event.kind for event in seen}
    placed = [event for event in seen if event.id is not None]
    rest: list[SentEvent] = []
    api.watch(run, rest, str(placed[0].id))
    assert [e for e in rest if e.id is not None][-1] == placed[-1], "a stream that is taken up again ends alike"
    assert placed[0] not in rest
    stored = api.get(f"/v1/runs/{run}")["stored"]
    assert (stored["verdict"], stored["suspect_node"]) == ("match", tandem.suspect)
    profile = api.get(f"/v1/nodes/{tandem.suspect}")
    assert run in [found["run"] for found in profile["runs"]]
    assert profile["verdict"] == "unknown", "20 seconds of a tiny model clear nobody"
    name = obj["metadata"]["name"]
    until("the PairRun's verdict", lambda: tandem.status(name).holds(names.FINISHED))
    assert tandem.status(name).verdict == "match"
    is_problem(api.client.post(f"/v1/runs/{run}/cancel", headers=bearer(api.token("operator"))), 409, "ended")
    tandem.delete(name)
    assert api.get(f"/v1/runs/{run}")["stored"]["verdict"] == "match", "its records stay"


def test_a_run_is_launched_by_the_console_and_the_pages_of_it_and_of_its_node_tell_of_it(
    api: Api, tandem: Tandem
) -> None:
    """As people do it, with a token of the cluster, through the same forwarded port; a pair of three steps."""
    url = str(api.client.base_url)
    with ExitStack() as stack:
        stack.enter_context(tandem.quarantined())
        operator = stack.enter_context(visiting(url, api.token("operator")))
        candidate = until_candidate(api, tandem)
        page = html.unescape(operator.page("/console/launch"))
        assert all(words in page for words in (tandem.suspect, tandem.reference, candidate["why"]))
        onlooker = stack.enter_context(visiting(url, api.token("onlooker")))
        assert "may not create pairruns" in onlooker.page("/console/launch")
        form = {
            "node": tandem.suspect, "reference": tandem.reference, "steps": "3", "self_replays": "2",
            "cluster": yaml.safe_dump(order_for(tandem)["cluster"]),
        }  # fmt: skip
        shown = operator.send("/console/launch/preview", **form).text
        dry = ("create", "--dry-run=server", "--namespace", NAMESPACE, "-f", "-")
        tandem.cluster.kubectl(*dry, input=block(shown, "yaml"))
        assert the_request(block(shown, "curl"))[0] == f"{url.rstrip('/')}/v1/runs"
        launched = operator.send("/console/launch", nonce="nightshift", **form)
        assert launched.status_code == 303, launched.text
        where = launched.headers["location"]
        (obj,) = pairruns(tandem)
        name, run = obj["metadata"]["name"], where.rsplit("/", 1)[1]
        assert obj["metadata"]["annotations"]["tandem.dev/launched-by"] == f"system:serviceaccount:{NAMESPACE}:operator"
        assert 'data-over="no"' in operator.page(where)
        until("the verdict on its page", lambda: 'data-over="yes"' in operator.page(f"{where}/now"), VERDICT_S)
        assert re.search(r"<h1>match: ", operator.page(where))
        assert "<section" in operator.page(f"{where}/report")
        profile = operator.page(f"/console/nodes/{tandem.suspect}")
        assert run in profile
        assert re.search(r"<h1[^>]*>\s*unknown", profile), "three steps of a tiny model clear nobody"
        assert tandem.suspect in operator.page("/")
        assert run in onlooker.page(f"/console/runs?node={tandem.suspect}")
    until("the PairRun's verdict", lambda: tandem.status(name).holds(names.FINISHED))
    tandem.delete(name)


def until_candidate(api: Api, tandem: Tandem) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = [c for c in api.get("/v1/candidates")["candidates"] if c["node"] == tandem.suspect]
        return bool(found)

    until("the candidate", there, 30)
    return found[0]


def scraped(looking: Looking, tandem: Tandem) -> None:
    """API, controller and the pair's reference, each found by the chart's own selectors; the suspect never.

    The pair may end meanwhile: what was seen once counts.
    """
    jobs = {
        "tandem-worker": f'tandem_pair_steps_total{{node="{tandem.suspect}"}} > 0',
        "tandem-api": "tandem_api_launches_total > 0",
        "tandem-controller": "tandem_controller_leading == 1",
    }
    found: dict[str, dict[str, str]] = {}
    for job, query in jobs.items():

        def there(query: str = query, job: str = job) -> bool:
            for series in looking.now(query):
                found[job] = series["metric"]
            return job in found

        until(query, there, VERDICT_S)
    assert {job: labels["job"] for job, labels in found.items()} == {job: f"{NAMESPACE}/{job}" for job in jobs}
    assert not {"pod", "container"} & set(found["tandem-worker"])
    (pair,) = pairruns(tandem)
    pods = {role: tandem.pod(pair["metadata"]["name"], role) for role in Role}
    addresses = {
        role: tandem.cluster.get("pod", pod, "--namespace", NAMESPACE)["status"]["podIP"] for role, pod in pods.items()
    }
    asked = [labels["instance"].rsplit(":", 1)[0] for labels in found.values()]
    assert asked[0] == addresses[Role.REFERENCE]
    ever = {one["metric"]["instance"]: one["metric"]["job"] for one in looking.now("max_over_time(up[1h]) == 1")}
    assert {address.rsplit(":", 1)[0] for address in ever} == set(asked)
    assert addresses[Role.SUSPECT] not in asked


def container(tandem: Tandem) -> dict[str, Any]:
    """How the API's container is."""
    (found,) = component(tandem, "api")["status"]["containerStatuses"]
    return dict(found)


def test_postgresql_away_stops_reading_and_not_launching(api: Api, tandem: Tandem) -> None:
    """The pod stays alive and Ready meanwhile, so that a launch finds its way to it."""
    if not tandem.keeps_records():
        skip("disk")
    cluster = tandem.cluster
    before = container(tandem)["restartCount"]
    scale = ["scale", "statefulset/tandem-postgres", "--namespace", NAMESPACE]
    cluster.kubectl(*scale, "--replicas=0")
    try:
        for path in ("/v1/runs", "/v1/nodes", f"/v1/nodes/{tandem.suspect}"):
            # A server that is asked to end still answers on connections that it has.
            until("PostgreSQL's end", lambda path=path: api.ask(path).status_code == 503, 60)
            answer = api.ask(path)
            is_problem(answer, 503, "database-away")
            assert int(answer.headers["retry-after"]) > 0
        is_problem(api.client.get("/readyz"), 503, "not-ready")
        assert api.client.get("/healthz").status_code == 200
        launched = api.ask("/v1/runs", order={"spec": {"steps": 2}})
        assert launched.status_code == 202, launched.text
        (obj,) = pairruns(tandem)
        tandem.wait_for(obj["metadata"]["name"], names.PAIRED, "False", "NoSuspect", 60)
        token = bearer(api.token("operator"))
        cancelled = api.client.post(f"/v1/runs/{launched.json()['run']}/cancel", headers=token)
        assert cancelled.status_code == 202, cancelled.text
        until("its end", lambda: pairruns(tandem) == [], 60)
        now = container(tandem)
        assert (now["ready"], now["restartCount"]) == (True, before), now
        # A busy machine's kubelet may have restarted it earlier; the process itself never fails.
        ended = now["lastState"].get("terminated", {"exitCode": 0})
        assert ended["exitCode"] in (0, 143), now
    finally:
        cluster.kubectl(*scale, "--replicas=1")
    until("its answers again", lambda: api.client.get("/readyz").status_code == 200, 120)
    assert api.ask("/v1/runs").status_code == 200
