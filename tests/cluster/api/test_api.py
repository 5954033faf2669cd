"""The API before a real API server: its tokens and rights rule, and what it launches are PairRuns."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from api_server import Served, is_problem, serving, watching
from cluster.api.test_kube import NAMESPACES, with_crd
from cluster.bare.tools import free_ports
from cluster.handle import ApiServer, until
from node_runs import BEGAN, HOUR, node_run, store_run
from tandem.db.engine import connect
from tandem.kube.client import Kube, Object
from tandem.kube.paths import NODES, PAIRRUNS, Resource
from tandem.kube.world import world
from tandem.pairing.candidates import of_world
from tandem.pairing.policy import read_policy
from tandem.pairrun.names import run_id_of
from tandem_api.launch.cluster import ANNOTATION_BY, ClusterLauncher
from tandem_api.security.cluster import REVIEWS, ClusterAuthenticator
from tokens import forged, signed

__all__ = ["with_crd"]
pytestmark = pytest.mark.needs("api-server")
ACCOUNTS = Resource("/api/v1", "serviceaccounts")
QUOTAS = Resource("/api/v1", "resourcequotas")
ROLES = Resource("/apis/rbac.authorization.k8s.io/v1", "roles")
BINDINGS = Resource("/apis/rbac.authorization.k8s.io/v1", "rolebindings")
VERBS = {
    "editor": ["get", "list", "watch", "create", "update", "patch", "delete"],
    "viewer": ["get", "list", "watch"],
    "starter": ["create"],
    "getter": ["get"],
    "lister": ["list"],
    "clearer": ["update"],
    "canceller": ["delete"],
    "nobody": [],
}
"""As the chart's roles for people; and those that may do one thing only."""


class Cluster:
    """A namespace with people, nodes and PairRuns, and an API that serves it."""

    def __init__(self, server: ApiServer, database: str) -> None:
        self.server, self.database, self.namespace = server, database, f"t-{os.urandom(4).hex()}"
        self.kube = Kube.connect(kubeconfig=str(server.kubeconfig), namespace=self.namespace)
        self.kube.create(NAMESPACES.path(), {"metadata": {"name": self.namespace}})
        self._nodes: list[str] = []
        self.sick, self.well = f"sick-{self.namespace}", f"well-{self.namespace}"
        for name, cordoned in ((self.sick, True), (self.well, False)):
            self.node(name, cordoned=cordoned)
        for name, verbs in VERBS.items():
            self._person(name, verbs)

    def node(self, name: str, *, cordoned: bool) -> None:
        """A Ready node, until the test ends."""
        self._nodes.append(name)
        labels = {"node.kubernetes.io/instance-type": self.namespace}
        self.kube.create(
            NODES.path(), {"metadata": {"name": name, "labels": labels}, "spec": {"unschedulable": cordoned}}
        )
        amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": None}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        self.kube.patch_status(NODES.path(name=name), status)
        self.kube.patch(NODES.path(name=name), {"spec": {"taints": None}})

    def _person(self, name: str, verbs: list[str]) -> None:
        self.kube.create(ACCOUNTS.path(self.namespace), {"metadata": {"name": name}})
        if not verbs:
            return
        rule = {"apiGroups": ["tandem.dev"], "resources": ["pairruns"], "verbs": verbs}
        self.kube.create(ROLES.path(self.namespace), {"metadata": {"name": name}, "rules": [rule]})
        self.kube.create(BINDINGS.path(self.namespace), {
            "metadata": {"name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        })  # fmt: skip

    def token(self, name: str, audience: str = "tandem", seconds: int = 3600) -> str:
        """A real token of a service account."""
        spec = {"audiences": [audience], "expirationSeconds": seconds}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        made = self.kube.create(f"{ACCOUNTS.path(self.namespace, name)}/token", body)
        return str(made["status"]["token"])

    def pairruns(self) -> list[Object]:
        return self.kube.list(PAIRRUNS.path(self.namespace)).items

    def says(self, name: str, **status: Any) -> None:
        """Write a PairRun's status, as the controller would."""
        self.kube.patch_status(PAIRRUNS.path(self.namespace, name), status)

    def serve(self, token: str, **more: Any) -> Any:
        launcher = ClusterLauncher(self.kube, self.namespace, read_policy({}))
        authenticator = ClusterAuthenticator(
            self.kube, self.namespace, ["tandem"], believed_s=more.pop("believed_s", 30.0), **more.pop("clocks", {})
        )
        return serving(
            self.database, launcher=launcher, authenticator=authenticator, token=token, namespace=self.namespace,
            events={"poll_seconds": 0.1}, **more,
        )  # fmt: skip

    def close(self) -> None:
        for name in self._nodes:
            self.kube.delete(NODES.path(name=name))


@pytest.fixture
def cluster(with_crd: ApiServer, database_url: str) -> Iterator[Cluster]:
    found = Cluster(with_crd, database_url)
    yield found
    found.close()


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Served]:
    """As an editor."""
    with cluster.serve(cluster.token("editor")) as served:
        until("the PairRuns to be listed", lambda: served.client.get("/readyz").status_code == 200)
        yield served


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_the_rbac_of_the_cluster_rules(api: Served, cluster: Cluster) -> None:
    """Each verb on pairruns opens what it names, and nothing else."""
    tokens = {name: bearer(cluster.token(name)) for name in VERBS}
    order = {"node": cluster.sick, "spec": {"steps": 20}}
    wanted = {
        "editor": (200, 404, 202, 404, 404), "viewer": (200, 404, 403, 403, 403), "starter": (403, 403, 202, 403, 403),
        "getter": (403, 404, 403, 403, 403), "lister": (200, 403, 403, 403, 403),
        "clearer": (403, 403, 403, 403, 404), "canceller": (403, 403, 403, 404, 403),
        "nobody": (403, 403, 403, 403, 403),
    }  # fmt: skip
    nothing = "01a22cc1-d103-7888-87fa-7d0f4c4e4b65"
    for name, headers in tokens.items():
        got = (
            api.client.get("/v1/runs", headers=headers).status_code,
            api.client.get(f"/v1/runs/{nothing}", headers=headers).status_code,
            api.client.post("/v1/runs", json=order, headers=headers).status_code,
            api.client.post(f"/v1/runs/{nothing}/cancel", headers=headers).status_code,
            api.client.post("/v1/nodes/gpu-1/clear", json={"reason": "x"}, headers=headers).status_code,
        )
        assert got == wanted[name], name
    is_problem(api.client.get("/v1/runs", headers=tokens["nobody"]), 403, "forbidden")
    assert len(cluster.pairruns()) == 2
    by = {obj["metadata"]["annotations"][ANNOTATION_BY] for obj in cluster.pairruns()}
    assert by == {f"system:serviceaccount:{cluster.namespace}:{name}" for name in ("editor", "starter")}


def test_tokens_that_are_not_for_us(api: Served, cluster: Cluster) -> None:
    """Forged, of another audience, of the API server itself, of an account that is gone, or none at all."""
    good = cluster.token("editor")
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    bad = [
        forged(good, sub=f"system:serviceaccount:{cluster.namespace}:viewer"), forged(good, exp=2**33), good[:-4],
        f"{none}.{good.split('.')[1]}.", cluster.token("editor", "https://kubernetes.default.svc.cluster.local"),
        cluster.token("editor", "somebody-else"), "x", "a.b.c",
    ]  # fmt: skip
    gone = cluster.token("viewer")
    cluster.kube.delete(ACCOUNTS.path(cluster.namespace, "viewer"))
    for token in [*bad, gone]:
        is_problem(api.client.get("/v1/runs", headers=bearer(token)), 401, "unauthenticated")
        is_problem(api.client.post("/v1/runs", json={}, headers=bearer(token)), 401, "unauthenticated")
    assert cluster.pairruns() == []
    assert api.client.get("/v1/runs", headers=bearer(good)).status_code == 200


def test_a_token_that_has_expired_is_refused(api: Served, cluster: Cluster) -> None:
    """A right one in all else: the same with its end in the future, by the same key, is taken."""
    key, now = cluster.server.root / "pki" / "sa.key", int(time.time())
    token = cluster.token("editor")
    late = signed(token, key, iat=now - 7200, nbf=now - 7200, exp=now - 3600)
    fresh = signed(token, key, iat=now - 7200, nbf=now - 7200, exp=now + 3600)
    is_problem(api.client.get("/v1/runs", headers=bearer(late)), 401, "unauthenticated")
    is_problem(api.client.post("/v1/runs", json={}, headers=bearer(late)), 401, "unauthenticated")
    assert api.client.get("/v1/runs", headers=bearer(fresh)).status_code == 200


def test_an_expired_token_ends_with_its_time(cluster: Cluster) -> None:
    """Not with the time for which an answer is believed; the clock of the cache is moved, not slept through."""
    token = cluster.token("editor", seconds=600)
    ahead, back = [0.0], [0.0]
    asked: list[str] = []
    create = cluster.kube.create

    def counted(path: str, body: Object, **more: Any) -> Object:
        asked.append(path)
        return create(path, body, **more)

    cluster.kube.create = counted  # type: ignore[method-assign]
    clocks = {"clock": lambda: time.time() + ahead[0] - back[0], "monotonic": lambda: time.monotonic() + ahead[0]}
    with cluster.serve(token, believed_s=300.0, clocks=clocks) as api:
        for _ in range(5):
            assert api.client.get("/v1/runs").status_code == 200
        assert asked.count(REVIEWS) == 1, "believed for a while"
        ahead[0] = 299.0
        assert api.client.get("/v1/runs").status_code == 200
        assert asked.count(REVIEWS) == 1
        ahead[0] = 301.0
        assert api.client.get("/v1/runs").status_code == 200
        assert asked.count(REVIEWS) == 2
        ahead[0] = 590.0
        assert api.client.get("/v1/runs").status_code == 200
        assert asked.count(REVIEWS) == 2
        ahead[0] = 601.0  # 301 + 300: the cache alone would still believe it
        assert api.client.get("/v1/runs").status_code == 200
        assert asked.count(REVIEWS) == 3, "asked again once the token itself says that it has ended"
        back[0] = 1000.0
        for more in (0.0, 301.0):
            ahead[0] += more
            back[0] += 10 * more
            assert api.client.get("/v1/runs").status_code == 200
        assert asked.count(REVIEWS) == 5, "a clock that is set back makes nothing be believed for longer"


def test_strangers_do_not_lock_out_whom_the_cluster_let_in(cluster: Cluster) -> None:
    """From the same address, as through an Ingress: also when the answer about a token is to be asked for anew. Who was
    never seen waits."""
    ahead = [0.0]
    token, new = cluster.token("editor"), cluster.token("viewer")
    with cluster.serve(token, clocks={"monotonic": lambda: time.monotonic() + ahead[0]}) as api:
        assert api.client.get("/v1/runs").status_code == 200
        api.app.state.parts.strangers._clock = lambda: 0.0  # on a slow machine too nothing is forgotten meanwhile
        statuses = [api.client.get("/v1/runs", headers=bearer(f"x{n}")).status_code for n in range(40)]
        assert statuses[-1] == 429
        ahead[0] = 31.0  # nothing is believed any more
        assert api.client.post("/v1/runs", json={"node": cluster.sick}).status_code == 202
        is_problem(api.client.get("/v1/runs", headers=bearer(new)), 429, "too-many")


def test_an_order_becomes_a_pairrun_once(api: Served, cluster: Cluster) -> None:
    """At once and many times over with one key: one object; with another body: refused."""
    order = {
        "node": cluster.sick, "reference": cluster.well,
        "spec": {"workload": "submodule", "model": "tiny", "steps": 20, "tp": 1, "fault": "node-11"},
        "cluster": {"resources": {"cpu": "500m"}, "retry": {"maxAttempts": 1}, "ttlSecondsAfterFinished": 60},
    }  # fmt: skip
    answers: list[Any] = []

    def send() -> None:
        answers.append(api.client.post("/v1/runs", json=order, headers={"Idempotency-Key": "one"}))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {a.status_code for a in answers} == {202}
    (obj,) = cluster.pairruns()
    run = str(run_id_of(obj["metadata"]["uid"], obj["metadata"]["creationTimestamp"]))
    assert {a.json()["run"] for a in answers} == {run}
    assert {a.headers["location"] for a in answers} == {f"/v1/runs/{run}"}
    assert sorted(a.headers.get("idempotent-replayed", "") for a in answers) == [""] + ["true"] * 7
    spec = obj["spec"]
    assert (spec["suspect"], spec["reference"]) == ({"nodeName": cluster.sick}, {"nodeName": cluster.well})
    assert (spec["workload"]["steps"], spec["workload"]["fault"]) == (20, "node-11")
    assert (spec["resources"]["cpu"], spec["retry"]["maxAttempts"]) == ("500m", 1)
    other = api.client.post("/v1/runs", json=order | {"reference": None}, headers={"Idempotency-Key": "one"})
    is_problem(other, 422, "idempotency-key-reused")
    theirs = bearer(cluster.token("starter"))
    assert api.client.post("/v1/runs", json=order, headers=theirs | {"Idempotency-Key": "one"}).json()["run"] != run
    assert len(cluster.pairruns()) == 2


def test_a_run_is_seen_from_its_order_to_its_end(api: Served, cluster: Cluster) -> None:
    """It waits with the controller's reason, runs, and is cancelled; the database knows nothing of it all the while."""
    run = api.client.post("/v1/runs", json={"node": cluster.sick}).json()["run"]
    name = cluster.pairruns()[0]["metadata"]["name"]
    got = api.get(f"/v1/runs/{run}")
    assert (got["state"], got["stored"], got["launch"]["name"]) == ("pending", None, name)
    condition = {"type": "Paired", "status": "False", "reason": "NoReference", "message": "nobody is like it",
                 "lastTransitionTime": "2026-11-30T00:00:00Z"}  # fmt: skip
    with watching(api, run) as stream:
        assert next(stream).data["state"] == "pending"
        cluster.says(name, conditions=[condition])
        event = next(stream)
        assert (event.kind, event.data["reason"], event.data["message"]) == (
            "conditions", "NoReference", "nobody is like it",
        )  # fmt: skip
        (waiting,) = api.get("/v1/nodes")["waiting"]
        assert (waiting["run"], waiting["message"]) == (run, "nobody is like it")
        assert [p["run"] for p in api.get("/v1/runs")["pending"]] == [run]
        cluster.says(name, conditions=[{**condition, "type": "Running", "status": "True"}])
        assert next(stream).data["state"] == "running"
        (begun,) = api.get("/v1/runs")["pending"]
        assert (begun["run"], begun["state"]) == (run, "running"), "in a list until it is stored"
        assert api.client.post(f"/v1/runs/{run}/cancel").status_code == 202
        *_, end = stream
        assert (end.kind, end.data["reason"]) == ("failed", "cancelled"), "whoever watches is not left to wait"
    until("its end", lambda: cluster.pairruns() == [])
    until("it to be forgotten", lambda: api.client.get(f"/v1/runs/{run}").status_code == 404)


def test_who_may_watch_no_more_is_not_shown_more(cluster: Cluster) -> None:
    """A stream ends with the right to it, and coming back tells why."""
    viewer, editor = cluster.token("viewer"), bearer(cluster.token("editor"))
    with cluster.serve(viewer, auth_seconds=1, believed_s=0.5) as api:
        run = api.client.post("/v1/runs", json={"node": cluster.sick}, headers=editor).json()["run"]
        with watching(api, run) as stream:
            next(stream)
            cluster.kube.delete(BINDINGS.path(cluster.namespace, "viewer"))
            assert [e.kind for e in stream if e.kind != "conditions"] == []
        is_problem(api.client.get(f"/v1/runs/{run}/events"), 403, "forbidden")


def test_what_the_cluster_would_refuse_is_told(api: Served, cluster: Cluster) -> None:
    for order, where in (
        ({"node": "not-there"}, "body.node"), ({"reference": "not-there"}, "body.reference"),
        ({"node": cluster.sick, "reference": cluster.sick}, "body.reference"),
        ({"spec": {"duration": 1.5}}, "body.spec"), ({"spec": {"kind": "swap"}}, "body.node"),
        ({"cluster": {"template": {"env": [{"name": "TANDEM_DB", "value": "x"}]}}}, "body.cluster"),
        ({"cluster": {"template": {"volumes": [{"name": "v", "mountPath": "/v"}]}}}, "body.cluster"),
    ):  # fmt: skip
        values = is_problem(api.client.post("/v1/runs", json=order), 422, "validation")
        assert where in values["errors"][0]["where"], values
    assert cluster.pairruns() == []


def test_a_quota_that_is_used_up_is_told(api: Served, cluster: Cluster) -> None:
    """By whoever set it: what is full, and not that something is broken."""
    amount = "count/pairruns.tandem.dev"
    body = {"metadata": {"name": "few"}, "spec": {"hard": {amount: "1"}}}
    cluster.kube.create(QUOTAS.path(cluster.namespace), body)
    # The controller that sums up is not there: what it would have written.
    cluster.kube.patch_status(QUOTAS.path(cluster.namespace, "few"), {"hard": {amount: "1"}, "used": {amount: "0"}})
    order = {"node": cluster.sick}
    until("the quota to be known", lambda: api.client.post("/v1/runs", json=order).status_code == 202)
    answer = api.client.post("/v1/runs", json=order)
    assert "few" in is_problem(answer, 403, "quota")["detail"]
    assert len(cluster.pairruns()) == 1


def test_candidates_of_the_cluster(api: Served, cluster: Cluster) -> None:
    """With why that reference, and why no other node."""
    cluster.node(other := f"other-{cluster.namespace}", cordoned=True)
    try:
        found = {c["node"]: c for c in api.get("/v1/candidates")["candidates"]}
        wanted = {c.node: c for c in of_world(world(cluster.kube, print), read_policy({}))}
    finally:
        cluster.kube.delete(NODES.path(name=other))
    sick = found[cluster.sick]
    assert (sick["reference"], sick["signs"]) == (cluster.well, ["cordoned"])
    assert sick == msgspec.to_builtins(wanted[cluster.sick])
    assert sick["why"]
    assert [p["message"] for p in sick["passed_over"] if p["node"] == other] != []


def test_who_clears_a_node_is_whose_token_it_was(api: Served, cluster: Cluster) -> None:
    engine = connect(cluster.database)
    store_run(engine, node_run(kind="null", suspect="well-1", reference="well-2"))
    store_run(engine, node_run(hits={3: 5}, began=BEGAN + HOUR))
    engine.dispose()
    answer = api.client.post("/v1/nodes/sick/clear", json={"reason": "a new board"})
    assert answer.status_code == 200
    (kept,) = answer.json()["decisions"]
    assert kept["decided_by"] == f"system:serviceaccount:{cluster.namespace}:editor"


def test_the_api_server_goes_away(cluster: Cluster) -> None:
    """Nobody gets in by that: what is not known is 503, never 200; reads go on for those who are known."""
    known, new = cluster.token("editor"), cluster.token("viewer")
    with cluster.serve(known) as api:
        assert api.client.get("/v1/runs").status_code == 200
        assert api.client.post("/v1/runs", json={"node": cluster.sick}).status_code == 202
        cluster.server.stop("kube-apiserver")
        try:
            assert api.client.get("/v1/runs").status_code == 200
            answer = api.client.get("/v1/runs", headers=bearer(new))
            is_problem(answer, 503, "authentication-away")
            assert int(answer.headers["retry-after"]) > 0
            for path, method, operation in operations():
                address = path.format(run_id="01a22cc1-d103-7888-87fa-7d0f4c4e4b65", name="gpu-1", table="steps")
                is_problem(api.client.request(method, address, headers=bearer(new)), 503, "authentication-away")
                assert "503" in operation["responses"], (method, path)
            refused = api.client.post("/v1/runs", json={"node": cluster.sick})
            is_problem(refused, 503, "cluster-away")
            assert int(refused.headers["retry-after"]) > 0
            assert len(api.get("/v1/nodes")["waiting"]) == 1, "what was launched is known"
        finally:
            cluster.server.start("kube-apiserver")
        until("it to answer again", lambda: api.client.get("/v1/runs", headers=bearer(new)).status_code == 200)


def operations() -> list[tuple[str, str, Any]]:
    """Path, method and documentation of all that asks for a token."""
    paths = json.loads((Path(__file__).parents[3] / "docs" / "openapi.json").read_text())["paths"]
    return [(path, method, it) for path, item in paths.items() for method, it in item.items() if it["security"]]


def test_launching_needs_no_database(cluster: Cluster) -> None:
    broken = cluster.database.replace("/test_", "/absent_")
    cluster.database = broken
    with cluster.serve(cluster.token("editor")) as api:
        is_problem(api.client.get("/v1/runs"), 503, "database-away")
        assert api.client.post("/v1/runs", json={"node": cluster.sick}).status_code == 202
        assert len(cluster.pairruns()) == 1
        assert api.client.get("/v1/candidates").status_code == 200
        is_problem(api.client.get("/readyz"), 503, "not-ready")


def test_the_command_of_the_pod_serves_and_ends_in_order(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "uri").write_text(cluster.database + "\n")
    (tmp_path / "settings.yaml").write_text(f"namespace: {cluster.namespace}\naudiences: [tandem]\n")
    (port,) = free_ports(1)
    words = [sys.executable, "-m", "tandem_api", "--config", str(tmp_path / "settings.yaml"), "--host", "127.0.0.1"]
    environment = cluster.server.environment | {"TANDEM_DB_FILE": str(tmp_path / "uri")}
    process = subprocess.Popen(
        [*words, "--port", str(port)], env=environment, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as client:

            def ready() -> bool:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx2.TransportError:
                    assert process.poll() is None
                    return False

            until("the API", ready)
            assert client.get("/v1/runs").status_code == 401
            editor = bearer(cluster.token("editor"))
            assert client.get("/v1/runs", headers=editor).status_code == 200
            made = client.post("/v1/runs", json={"node": cluster.sick}, headers=editor)
            assert made.status_code == 202
            assert len(cluster.pairruns()) == 1
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()
        process.wait()


def test_settings_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("nmespace: x\n")
    done = subprocess.run(
        [sys.executable, "-m", "tandem_api", "--config", str(tmp_path / "settings.yaml")], capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert "nmespace" in done.stderr
