"""A real API server takes what the chart renders: every values file, by server-side dry run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from chart.rendering import CHOICES, NAMESPACE, Manifest, objects, of_kind
from cluster.handle import ApiServer, until

pytestmark = pytest.mark.needs("helm")
CHART = Path(__file__).parents[3] / "deploy" / "helm" / "tandem"


@pytest.fixture(scope="module")
def server(api_server: ApiServer) -> Iterator[ApiServer]:
    """With the CRD, and with a namespace that enforces pod security ``restricted``."""
    (crd,) = of_kind("defaults", "CustomResourceDefinition")
    api_server.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(crd))
    api_server.kubectl("create", "namespace", NAMESPACE)
    api_server.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    yield api_server
    api_server.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def dry_run(server: ApiServer, manifests: list[Manifest]) -> str:
    done = server.try_kubectl(
        "apply",
        "--server-side",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
        input=yaml.safe_dump_all(manifests),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("choice", CHOICES)
def test_the_api_server_takes_everything(server: ApiServer, choice: str) -> None:
    """Strict: a field that no schema knows is an error. A warning (a deprecated version, a pod that a controller would
    not be allowed to make) is one too."""
    # The Prometheus operator's kinds are its own: their schemas are not on this server.
    known = [one for one in objects(choice) if not one["apiVersion"].startswith("monitoring.coreos.com/")]
    said = dry_run(server, known)
    assert said.count("serverside-applied (server dry run)") == len(known)
    assert "Warning" not in said


@pytest.mark.parametrize("choice", CHOICES)
def test_the_pods_themselves_are_admitted_as_restricted(server: ApiServer, choice: str) -> None:
    """Pod security only warns about a Deployment; what counts is the pod that it makes."""
    templates = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": one["metadata"]["name"], "namespace": NAMESPACE},
            "spec": _alone(one["spec"]),
        }
        for one in objects(choice)
        if "template" in one.get("spec", {})
    ]
    assert len(templates) >= 2
    dry_run(server, templates)


def _alone(owner: Manifest) -> Manifest:
    """The pod's spec with its claims, without what the dry run of the others did not leave: accounts, classes."""
    spec = owner["template"]["spec"]
    claims = [{"name": c["metadata"]["name"], "emptyDir": {}} for c in owner.get("volumeClaimTemplates", [])]
    kept = {k: v for k, v in spec.items() if k not in ("serviceAccountName", "priorityClassName")}
    return kept | {"automountServiceAccountToken": False, "volumes": spec["volumes"] + claims}


def test_the_aggregated_roles_let_an_editor_edit_and_a_viewer_look(server: ApiServer) -> None:
    """The rules themselves: who is bound to one of the chart's two roles can do this and no more."""
    roles = [
        one for one in of_kind("defaults", "ClusterRole") if one["metadata"]["name"].endswith(("-editor", "-viewer"))
    ]
    for role in roles:
        server.kubectl("apply", "-f", "-", input=json.dumps(role))
        user = role["metadata"]["name"].rsplit("-", 1)[1]
        server.kubectl("create", "rolebinding", user, f"--user={user}", f"--clusterrole={role['metadata']['name']}",
                       f"--namespace={NAMESPACE}")  # fmt: skip

    def can(user: str, verb: str, resource: str, *options: str) -> bool:
        words = ("auth", "can-i", verb, resource, f"--as={user}", f"--namespace={NAMESPACE}", *options)
        return server.try_kubectl(*words).stdout.strip() == "yes"

    until("the editor's rights", lambda: can("editor", "create", "pairruns.tandem.dev"))
    assert can("viewer", "watch", "pairruns.tandem.dev")
    assert not can("viewer", "create", "pairruns.tandem.dev")
    assert not can("editor", "patch", "pairruns.tandem.dev", "--subresource=status")
    assert not can("editor", "create", "pods")


def test_the_controller_can_do_what_its_role_says_and_no_more(server: ApiServer) -> None:
    for kind in ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"):
        for one in of_kind("defaults", kind):
            server.kubectl("apply", "-f", "-", input=json.dumps(one))
    account = f"system:serviceaccount:{NAMESPACE}:tandem-controller"

    def can(verb: str, resource: str, *options: str, namespace: str = NAMESPACE) -> bool:
        words = ("auth", "can-i", verb, resource, f"--as={account}", f"--namespace={namespace}", *options)
        return server.try_kubectl(*words).stdout.strip() == "yes"

    until(
        "the controller's rights",
        lambda: can("list", "nodes") and can("patch", "pairruns.tandem.dev", "--subresource=status"),
    )
    assert can("create", "jobs.batch")
    assert can("update", "leases.coordination.k8s.io/tandem-controller")
    assert not can("update", "leases.coordination.k8s.io/another")
    assert not can("list", "secrets")
    assert not can("patch", "nodes")
    assert not can("create", "pods")
    assert not can("create", "jobs.batch", namespace="default")
    assert not can("get", "secrets", namespace="default")
    worker = f"system:serviceaccount:{NAMESPACE}:tandem-worker"
    for resource in ("pods", "secrets", "pairruns.tandem.dev"):
        asked = server.try_kubectl("auth", "can-i", "get", resource, f"--as={worker}", f"--namespace={NAMESPACE}")
        assert asked.stdout.strip() == "no"


def test_the_api_can_do_what_its_roles_say_and_no_more(server: ApiServer) -> None:
    for kind in ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"):
        for one in of_kind("defaults", kind):
            server.kubectl("apply", "-f", "-", input=json.dumps(one))
    account = f"system:serviceaccount:{NAMESPACE}:tandem-api"

    def can(verb: str, resource: str, *options: str, namespace: str = NAMESPACE) -> bool:
        words = ("auth", "can-i", verb, resource, f"--as={account}", f"--namespace={namespace}", *options)
        return server.try_kubectl(*words).stdout.strip() == "yes"

    until("the API's rights", lambda: can("create", "pairruns.tandem.dev") and can("create", "tokenreviews"))
    assert can("create", "subjectaccessreviews")
    assert can("delete", "pairruns.tandem.dev")
    assert can("list", "pods", namespace="default")
    for verb, resource in (
        ("update", "pairruns.tandem.dev"), ("create", "pods"), ("get", "secrets"), ("watch", "pods"),
        ("patch", "nodes"), ("create", "serviceaccounts/token"), ("create", "jobs.batch"),
    ):  # fmt: skip
        assert not can(verb, resource), (verb, resource)
    assert not can("patch", "pairruns.tandem.dev", "--subresource=status")
    assert not can("get", "pairruns.tandem.dev", namespace="default")


def test_an_uninstall_leaves_the_trial_databases_password_only_where_keep_says_so(server: ApiServer) -> None:
    """Without it a kept claim could not be opened any more. The claim itself is the StatefulSet's, whose controller is
    not here; hooks need pods.
    """
    name, secret = "kept-release", ["get", "secret", "tandem-database", "-o", "jsonpath={.data.password}"]
    server.kubectl("create", "namespace", name)

    def install(keep: bool) -> str:
        chosen = f"crds.enabled=false,database.trial.persistence.keep={str(keep).lower()}"
        server.helm("install", "tandem", str(CHART), "-n", name, "--no-hooks", "--set", chosen)
        return server.kubectl("-n", name, *secret)

    def uninstalled() -> bool:
        server.helm("uninstall", "tandem", "-n", name, "--no-hooks")
        return server.try_kubectl("-n", name, *secret).returncode != 0

    try:
        first = install(keep=True)
        assert first
        assert not uninstalled()
        assert install(keep=True) == first
        assert not uninstalled()
        assert install(keep=False) == first
        assert uninstalled()
        assert install(keep=False) != first
        assert uninstalled()
    finally:
        server.kubectl("delete", "namespace", name, "--wait=false")
