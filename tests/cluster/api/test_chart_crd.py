"""Whose the CRD is: real helm installs and uninstalls, on an API server of its own since they take every PairRun."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from chart.rendering import CHART
from cluster.handle import ApiServer, until
from cluster.sessions import booted
from tandem.pairrun import names

pytestmark = [pytest.mark.needs("api-server"), pytest.mark.needs("helm")]
CRD = f"{names.PLURAL}.{names.GROUP}"
NAMESPACE = "tandem"


@pytest.fixture
def fresh() -> Iterator[ApiServer]:
    with booted("--nodes", "0") as root:
        yield ApiServer(root)


def test_an_uninstall_takes_the_crd_and_its_pairruns_only_where_keep_is_false(fresh: ApiServer) -> None:
    """By default both stay, and the next installation finds them. The hooks are left out: they need pods."""

    def install(*options: str) -> None:
        fresh.helm("install", "tandem", str(CHART), "-n", NAMESPACE, "--create-namespace", "--no-hooks", *options)
        fresh.kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=60s")

    def uninstall() -> None:
        fresh.helm("uninstall", "tandem", "-n", NAMESPACE, "--no-hooks")

    def kept() -> list[str]:
        return fresh.kubectl("get", names.PLURAL, "-n", NAMESPACE, "-o", "name").split()

    mine = f"{names.SINGULAR}.{names.GROUP}/kept"
    install()
    body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "kept"}, "spec": {}}
    until("the definition to be served", lambda: fresh.apply(body, namespace=NAMESPACE))
    uninstall()
    assert kept() == [mine]
    install("--set", "crds.keep=false")
    assert kept() == [mine]
    uninstall()
    fresh.kubectl("wait", "--for=delete", f"crd/{CRD}", "--timeout=60s")
    assert names.GROUP not in json.dumps(fresh.get("crds"))
    install()
    until("the definition to be served", lambda: kept() == [])
    uninstall()
    assert CRD in fresh.kubectl("get", "crds", "-o", "name")
