"""What pods need beside nodes, on a real API server: what is missing is named, and a half-made pair of keys mended."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from cluster.api.hands import Hands, leading
from cluster.handle import until
from tandem.kube.paths import PAIRRUNS, SECRETS
from tandem.pairrun import names
from tandem.vocabulary import Role
from tandem.worker_io import KeyFile

pytestmark = pytest.mark.needs("api-server")


def test_a_database_secret_that_is_missing_is_named_and_waited_for(pair: Hands) -> None:
    name = "tandem-database"
    pair.kube.delete(SECRETS.path(pair.namespace, name))
    with leading(pair):
        pair.create()
        message = pair.wait_for(names.PAIRED, "False", "InputMissing")
        assert f"secrets/{name} does not exist in {pair.namespace}" in message
        assert not pair.jobs()
        pair.kube.create(SECRETS.path(pair.namespace), {"metadata": {"name": name}, "data": {"uri": ""}})
        pair.wait_for(names.PAIRED, "True")


@pytest.mark.parametrize(
    ("source", "resource"), [("configMap", "configmaps"), ("persistentVolumeClaim", "persistentvolumeclaims")]
)
def test_a_volume_whose_source_is_missing_is_named(pair: Hands, source: str, resource: str) -> None:
    with leading(pair):
        pair.create(template={"volumes": [{"name": "questions", "mountPath": "/q", source: "nowhere"}]})
        message = pair.wait_for(names.PAIRED, "False", "InputMissing")
        assert f"volume questions: {resource}/nowhere does not exist in {pair.namespace}" in message


@pytest.mark.parametrize("left", list(Role))
def test_keys_of_a_try_that_was_cut_short_are_made_anew_and_fit_each_other(pair: Hands, left: Role) -> None:
    """A controller that died between the two: one side would wait for a partner with other keys for ever."""
    with leading(pair):
        uid = pair.create(suspend=True)["metadata"]["uid"]
        stale = base64.b64encode(b"x" * 40).decode()
        secret = {"metadata": {"name": names.child_name("check", uid, 1, left)}, "data": dict.fromkeys(KeyFile, stale)}
        pair.kube.create(SECRETS.path(pair.namespace), secret)
        pair.kube.patch(PAIRRUNS.path(pair.namespace, "check"), {"spec": {"suspend": False}})
        until("both Jobs", lambda: len(pair.jobs(1)) == 2)

        def keys(role: Role) -> dict[str, Any]:
            path = SECRETS.path(pair.namespace, names.child_name("check", uid, 1, role))
            return dict(pair.kube.get(path)["data"])

        reference, suspect = keys(Role.REFERENCE), keys(Role.SUSPECT)
        assert stale not in {*reference.values(), *suspect.values()}
        assert reference[KeyFile.PEER_PUBLIC] == suspect[KeyFile.OWN_PUBLIC]
        assert suspect[KeyFile.PEER_PUBLIC] == reference[KeyFile.OWN_PUBLIC]
