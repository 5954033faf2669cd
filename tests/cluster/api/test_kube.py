"""Client, informer and election against a real API server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.handle import ApiServer, until
from tandem.kube import client
from tandem.kube.client import Kube, Object
from tandem.kube.errors import Conflict, Forbidden, Gone, KubeError, NotFound, Unreachable
from tandem.kube.informer import Informer
from tandem.kube.lease import TOKEN, Election
from tandem.kube.paths import CRDS, LEASES, PAIRRUNS, PODS, Resource
from tandem.pairrun.crd import crd
from tandem.pairrun.names import API_VERSION

pytestmark = pytest.mark.needs("api-server")
CONFIG_MAPS = Resource("/api/v1", "configmaps")
NAMESPACES = Resource("/api/v1", "namespaces")


@pytest.fixture(scope="session")
def with_crd(api_server: ApiServer) -> ApiServer:
    """The API server, which serves PairRuns."""
    kube = Kube.connect(kubeconfig=str(api_server.kubeconfig))
    name = crd()["metadata"]["name"]
    kube.apply(CRDS.path(name=name), crd(), manager="test")

    def served() -> bool:
        try:
            return kube.list(PAIRRUNS.path("default")) is not None
        except NotFound:
            return False

    until("PairRuns to be served", served)
    return api_server


@pytest.fixture
def kube(with_crd: ApiServer) -> Iterator[Kube]:
    """In a namespace of the test's own."""
    namespace = f"t-{os.urandom(4).hex()}"
    kube = Kube.connect(kubeconfig=str(with_crd.kubeconfig), namespace=namespace)
    kube.create(NAMESPACES.path(), {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    yield kube
    kube._api.close()


def config_map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def pairrun(name: str, **spec: Any) -> Object:
    return {"apiVersion": API_VERSION, "kind": "PairRun", "metadata": {"name": name}, "spec": spec}


def test_objects_are_made_read_changed_and_deleted(kube: Kube) -> None:
    path = CONFIG_MAPS.path(kube.namespace, "a")
    made = kube.create(CONFIG_MAPS.path(kube.namespace), config_map("a", x="1"))
    assert kube.get(path)["data"] == {"x": "1"}
    with pytest.raises(Conflict) as caught:
        kube.create(CONFIG_MAPS.path(kube.namespace), config_map("a"))
    assert caught.value.reason == "AlreadyExists"
    kube.replace(path, {**made, "data": {"x": "2"}})
    with pytest.raises(Conflict) as caught:
        kube.replace(path, {**made, "data": {"x": "3"}})
    assert caught.value.reason == "Conflict"
    with pytest.raises(Conflict):
        kube.delete(path, uid="another")
    kube.delete(path, uid=made["metadata"]["uid"])
    with pytest.raises(NotFound):
        kube.get(path)
    kube.delete(path)


def test_apply_owns_its_fields_and_no_others(kube: Kube) -> None:
    path = CONFIG_MAPS.path(kube.namespace, "a")
    kube.apply(path, config_map("a", mine="1", old="1"), manager="one")
    kube.apply(path, config_map("a", theirs="1"), manager="two", force=False)
    kube.apply(path, config_map("a", mine="2"), manager="one")
    assert kube.get(path)["data"] == {"mine": "2", "theirs": "1"}
    with pytest.raises(Conflict):
        kube.apply(path, config_map("a", theirs="2"), manager="one", force=False)
    before = kube.get(path)["metadata"]["resourceVersion"]
    kube.apply(path, config_map("a", mine="2"), manager="one")
    assert kube.get(path)["metadata"]["resourceVersion"] == before
    kube.apply(path, config_map("a", mine="3"), manager="one", dry_run=True)
    assert kube.get(path)["metadata"]["resourceVersion"] == before


def test_a_status_is_replaced_whole_and_only_if_nobody_wrote_meanwhile(kube: Kube) -> None:
    made = kube.create(PAIRRUNS.path(kube.namespace), pairrun("p", kind="null"))
    path, version = PAIRRUNS.path(kube.namespace, "p"), made["metadata"]["resourceVersion"]
    after = kube.patch_status(path, {"attempt": 1, "step": 3}, resource_version=version)
    assert after["status"]["step"] == 3
    again = kube.patch_status(path, {"attempt": 2})
    assert again["status"]["attempt"] == 2
    assert again["status"].get("step") != 3
    with pytest.raises(Conflict):
        kube.patch_status(path, {"attempt": 3}, resource_version=version)
    assert kube.get(path)["spec"]["kind"] == "null"


def test_a_long_collection_is_one_snapshot(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 7)
    for number in range(20):
        kube.create(CONFIG_MAPS.path(kube.namespace), config_map(f"c-{number:02}"))
    listing = kube.list(CONFIG_MAPS.path(kube.namespace), field_selector="metadata.name!=kube-root-ca.crt")
    assert [o["metadata"]["name"] for o in listing.items] == [f"c-{number:02}" for number in range(20)]
    assert listing.items[0]["kind"] == "ConfigMap"


def test_what_the_schema_refuses_and_what_is_forbidden_are_one_line(kube: Kube, with_crd: ApiServer) -> None:
    with pytest.raises(KubeError, match="no-such-kind") as caught:
        kube.create(PAIRRUNS.path(kube.namespace), pairrun("p", kind="no-such-kind"))
    assert caught.value.status == 422
    assert "\n" not in str(caught.value)
    nobody = Kube.connect(kubeconfig=str(with_crd.kubeconfig), namespace=kube.namespace)
    nobody._api.set_default_header("Impersonate-User", "nobody")
    with pytest.raises(Forbidden) as refused:
        nobody.list(PODS.path())
    assert (refused.value.verb, refused.value.resource, refused.value.namespace) == ("list", "pods", None)
    with pytest.raises(Forbidden, match=f"create pairruns.tandem.dev in namespace {kube.namespace}"):
        nobody.create(PAIRRUNS.path(kube.namespace), pairrun("q"))


def test_a_version_that_is_long_gone_is_called_so(kube: Kube, with_crd: ApiServer) -> None:
    """After its restart the server keeps no older events."""
    path = CONFIG_MAPS.path(kube.namespace)
    old = kube.list(path).resource_version
    for number in range(5):
        kube.create(path, config_map(f"c-{number}"))
    with_crd.stop("kube-apiserver")
    with_crd.start("kube-apiserver")
    until("an answer", lambda: _works(kube, path))
    with pytest.raises(Gone):
        list(kube.watch(path, str(min(int(old), 2)), seconds=5))
    seen = Seen()
    informer = Informer(kube, path, seen)
    informer._version = "2"
    informer.start()
    until("a new listing", lambda: informer.get(f"{kube.namespace}/c-4"))
    informer.stop()


class Seen:
    """What an informer told."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: dict[str, Object | None] = {}
        self.errors: list[str] = []

    def __call__(self, key: str, before: Object | None, now: Object | None) -> None:
        with self.lock:
            self.last[key] = now


def test_an_informer_survives_the_api_servers_restart(kube: Kube, with_crd: ApiServer) -> None:
    """Whatever happened meanwhile is told, and `last_heard` stands still while nobody answers."""
    seen, path = Seen(), CONFIG_MAPS.path(kube.namespace)
    informer = Informer(kube, path, seen, on_error=seen.errors.append, field_selector="metadata.name!=kube-root-ca.crt")
    informer.start()
    assert informer.wait_synced(30)
    kube.create(path, config_map("a", x="1"))
    until("the event", lambda: informer.get(f"{kube.namespace}/a"))
    with_crd.stop("kube-apiserver")
    until("the error", lambda: informer.error)
    with pytest.raises(Unreachable):
        kube.get(path)
    heard = informer.last_heard
    with_crd.start("kube-apiserver")
    until("an answer", lambda: _works(kube, path))
    kube.apply(f"{path}/a", config_map("a", x="2"), manager="test")
    kube.create(path, config_map("b"))
    until(
        "both",
        lambda: (informer.get(f"{kube.namespace}/a") or {}).get("data") == {"x": "2"} and len(informer.list()) == 2,
    )
    assert informer.last_heard > heard
    assert informer.error is None
    kube.delete(f"{path}/a")
    until("the deletion", lambda: seen.last[f"{kube.namespace}/a"] is None)
    informer.stop()
    assert not informer._thread.is_alive()


def _works(kube: Kube, path: str) -> bool:
    try:
        return bool(kube.list(path).resource_version)
    except KubeError:
        return False


def test_an_informer_that_may_not_look_says_so_and_goes_on_when_it_may(kube: Kube, with_crd: ApiServer) -> None:
    someone = Kube.connect(kubeconfig=str(with_crd.kubeconfig), namespace=kube.namespace)
    someone._api.set_default_header("Impersonate-User", "someone")
    seen = Seen()
    informer = Informer(someone, CONFIG_MAPS.path(kube.namespace), seen, on_error=seen.errors.append)
    informer.start()
    until("the refusal", lambda: informer.error)
    assert "not allowed to list configmaps" in seen.errors[0]
    with_crd.kubectl("create", "role", "look", "--verb=list,watch", "--resource=configmaps", "-n", kube.namespace)
    with_crd.kubectl("create", "rolebinding", "look", "--role=look", "--user=someone", "-n", kube.namespace)
    assert informer.wait_synced(60)
    kube.create(CONFIG_MAPS.path(kube.namespace), config_map("a"))
    until("the event", lambda: informer.get(f"{kube.namespace}/a"))
    informer.stop()


def test_one_leads_and_the_next_follows_with_a_larger_token(kube: Kube) -> None:
    terms: list[tuple[str, int]] = []
    lost = threading.Event()

    def candidate(name: str) -> Election:
        one = Election(
            kube, "controller", name, lambda token: terms.append((name, token)), lambda _: lost.set(), lease_s=3.0
        )  # fmt: skip
        one.start()
        return one

    first = candidate("a")
    until("a leader", lambda: first.leads)
    second = candidate("b")
    until("a renewal", lambda: kube.get(LEASES.path(kube.namespace, "controller"))["spec"]["holderIdentity"] == "a")
    assert not second.leads
    first.stop()
    until("the next leader", lambda: second.leads, 20)
    lease = kube.get(LEASES.path(kube.namespace, "controller"))
    assert [name for name, _ in terms] == ["a", "b"]
    assert terms[1][1] == terms[0][1] + 1 == int(lease["metadata"]["annotations"][TOKEN])
    assert lease["spec"]["leaseTransitions"] == 1
    assert not lost.is_set()
    kube.delete(LEASES.path(kube.namespace, "controller"))
    assert lost.wait(20)
    assert not second.leads
    third = candidate("c")
    until("a leader after the Lease was deleted", lambda: third.leads)
    assert terms[2][1] > terms[1][1]
    third.stop()
