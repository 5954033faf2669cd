"""One pair that runs on while things around it break, one after another: it never loses a step nor an attempt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.e2e.installation import NAMESPACE, Tandem
from cluster.handle import BareCluster, until
from tandem.vocabulary import Role

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.slow, pytest.mark.timeout(1200)]
NAME = "lasting"


@pytest.fixture(scope="module")
def lasting(tandem: Tandem) -> Iterator[Tandem]:
    """The installation, with that pair at work; it would go on for longer than these tests take."""
    with tandem.quarantined():
        tandem.create(NAME, workload={"durationSeconds": 1200, "selfReplays": 2})
        try:
            tandem.stepping(NAME)
            yield tandem
        finally:
            tandem.delete(NAME)


def test_a_controller_that_is_killed_is_replaced_and_the_pair_goes_on(lasting: Tandem) -> None:
    labels = ["-l", "app.kubernetes.io/component=controller"]
    controllers = ("get", "pods", *labels, "--namespace", NAMESPACE, "-o", "name")
    before = lasting.cluster.kubectl(*controllers)
    lasting.cluster.kubectl(
        "delete", "pod", *labels, "--namespace", NAMESPACE, "--grace-period=0", "--force", "--wait=false"
    )
    until("another controller", lambda: lasting.cluster.kubectl(*controllers) not in ("", before), 60)
    words = ("--for=condition=Ready", "pod", *labels, "--namespace", NAMESPACE, "--timeout=100s")
    lasting.cluster.kubectl("wait", *words)
    lasting.goes_on(NAME)


def test_situations_11_and_12_a_restart_of_the_api_server_costs_nothing(lasting: Tandem, machines: BareCluster) -> None:
    machines.stop("kube-apiserver")
    machines.start("kube-apiserver")
    lasting.goes_on(NAME)


def test_a_chart_upgraded_mid_run_leaves_the_pair_alone(lasting: Tandem) -> None:
    lasting.helm("upgrade", "--set", "controller.resyncSeconds=120")
    lasting.goes_on(NAME)


def test_a_suspect_that_is_deleted_after_all_that_closes_cleanly_and_matches(lasting: Tandem) -> None:
    """A drain, an eviction: its worker is asked to stop, the pair runs its end controls and closes."""
    pod = lasting.pod(NAME, Role.SUSPECT)
    lasting.cluster.kubectl("delete", "pod", pod, "--namespace", NAMESPACE, "--wait=false")
    status = lasting.verdict(NAME)
    assert (status.verdict, len(status.attempts)) == ("match", 1), status
    shown = lasting.show(NAME)
    assert shown["reason"] == "completed", shown["sentence"]
    assert shown["steps_compared"] > 0
