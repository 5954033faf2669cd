"""etcd, API server, controller manager, scheduler and DNS: how they are started, and the objects they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .api import Api
from .network import CONTROL_PLANE, CONTROL_PLANE_IP, DNS_SERVICE, SERVICES
from .state import State

Commands = dict[str, tuple[str | None, list[object]]]
"""{component: (machine, or None for the host, and its words)}"""
RBAC = "rbac.authorization.k8s.io"


def api_address(state: State) -> str:
    """Where components reach the API server."""
    return f"{CONTROL_PLANE_IP}:6443" if state.nodes else f"127.0.0.1:{state.options.port}"


def write_files(state: State) -> None:
    ip = CONTROL_PLANE_IP
    (state.root / "Corefile").write_text(
        f".:53 {{\n bind {ip}\n errors\n health {ip}:8080\n ready {ip}:8181\n"
        f" kubernetes cluster.local in-addr.arpa ip6.arpa {{\n  kubeconfig {state.pki}/dns.kubeconfig\n }}\n}}\n"
    )


def commands(state: State) -> Commands:
    options = state.options
    machine = CONTROL_PLANE if state.nodes else None
    found: Commands = {}
    if state.nodes:  # first: the tool itself reaches the API server through it
        found["forward"] = None, [
            options.python, Path(__file__).resolve().parent, "--root", state.root, "--cache", state.cache,
            "forward", options.port, api_address(state),
        ]  # fmt: skip
    found |= {"etcd": (machine, _etcd(state)), "kube-apiserver": (machine, _api_server(state))}
    if state.nodes or options.controller_manager:
        found["kube-controller-manager"] = machine, _controller_manager(state)
    if state.nodes or options.scheduler:
        found["kube-scheduler"] = machine, [state.bin("kube-scheduler"), *_client_of_api(state, "scheduler")]
    if state.nodes:
        found["coredns"] = machine, [state.bin("coredns"), "-conf", f"{state.root}/Corefile"]
    return found


def _etcd(state: State) -> list[object]:
    client, peer = (f"http://127.0.0.1:{port}" for port in state.options.etcd_ports)
    return [
        state.bin("etcd"), f"--data-dir={state.root}/etcd", "--unsafe-no-fsync", "--log-level=warn",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
    ]  # fmt: skip


def _api_server(state: State) -> list[object]:
    pki, options = state.pki, state.options
    words: list[object] = [
        state.bin("kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{options.etcd_ports[0]}",
        f"--secure-port={api_address(state).split(':')[1]}",
        f"--bind-address={'0.0.0.0' if state.nodes else '127.0.0.1'}",
        f"--advertise-address={CONTROL_PLANE_IP if state.nodes else '127.0.0.1'}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={SERVICES}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--enable-admission-plugins=NodeRestriction",
        # How long pods stay on a node that is gone: 300 s by default.
        f"--default-not-ready-toleration-seconds={options.evict_after}",
        f"--default-unreachable-toleration-seconds={options.evict_after}",
    ]
    if not state.nodes:
        words.append("--endpoint-reconciler-type=none")
        if not options.controller_manager:  # nothing makes service accounts: don't ask pods for one
            words.append("--disable-admission-plugins=ServiceAccount")
        return words
    return [
        *words,
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={pki}/apiserver-client.crt",
        f"--kubelet-client-key={pki}/apiserver-client.key",
        # A webhook's ClusterIP is not routable from here, where no kube-proxy runs: call the pods themselves.
        "--enable-aggregator-routing=true",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
        f"--proxy-client-key-file={pki}/front-proxy-client.key",
    ]


def _controller_manager(state: State) -> list[object]:
    pki = state.pki
    return [
        state.bin("kube-controller-manager"),
        *_client_of_api(state, "controller-manager"),
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        # How long a silent node stays Ready: 50 s by default.
        f"--node-monitor-grace-period={state.options.node_grace}s",
        "--node-monitor-period=2s",
        # A PV and a PVC that are made together else bind after up to 15 s.
        "--pvclaimbinder-sync-period=2s",
        # By default it throttles itself, and takes 5 s to start.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        # Else it creates /usr/libexec/kubernetes on the host.
        f"--flex-volume-plugin-dir={state.root}/volume-plugins",
    ]


def _client_of_api(state: State, user: str) -> list[object]:
    kubeconfig = f"{state.pki}/{user}.kubeconfig"
    # On the host itself nothing is served: several clusters would want the same port.
    ports = "--bind-address=127.0.0.1" if state.nodes else "--secure-port=0"
    return [
        f"--kubeconfig={kubeconfig}", "--leader-elect=false", ports,
        f"--authentication-kubeconfig={kubeconfig}", f"--authorization-kubeconfig={kubeconfig}",
    ]  # fmt: skip


# -- objects -------------------------------------------------------------------------------------------

RIGHTS: dict[str, dict[str, list[str]]] = {
    "coredns": {"": ["namespaces", "services", "pods"], "discovery.k8s.io": ["endpointslices"]},
    "kube-router": {
        "": ["namespaces", "services", "pods", "nodes", "endpoints"],
        "discovery.k8s.io": ["endpointslices"],
        "networking.k8s.io": ["networkpolicies"],
    },
}
"""What the components that are no part of Kubernetes read: {user: {API group: resources}}."""


def publish(api: Api, wait: Callable[[str, Callable[[], object], float], None]) -> None:
    """The Service of CoreDNS, which runs beside the API server, and the rights of CoreDNS and kube-router."""
    for path, body in [*_dns_objects(), *_right_objects()]:
        _create(api, wait, path, body)
    for user in RIGHTS:
        review = {"spec": {"user": f"system:{user}", "resourceAttributes": {"verb": "list", "resource": "namespaces"}}}
        wait(f"the rights of {user}", lambda review=review: _allowed(api, review), 90)  # type: ignore[misc]


def publish_dns_pod(api: Api, wait: Callable[[str, Callable[[], object], float], None]) -> None:
    """NetworkPolicies usually allow DNS by the label of CoreDNS's pods.

    Here it is no pod: an object stands for it, held back by a scheduling gate, its status written by hand.
    """
    path = "/api/v1/namespaces/kube-system/pods"
    spec = {
        "schedulingGates": [{"name": "test-cluster/no-real-pod"}],
        "automountServiceAccountToken": False,
        "containers": [{"name": "coredns", "image": "no-real-pod"}],
    }
    status = {
        "phase": "Running",
        "podIP": CONTROL_PLANE_IP,
        "podIPs": [{"ip": CONTROL_PLANE_IP}],
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {"name": "coredns", "image": "", "imageID": "", "ready": True, "restartCount": 0, "state": {"running": {}}}
        ],
    }
    _create(api, wait, path, {"metadata": {"name": "coredns", "labels": {"k8s-app": "kube-dns"}}, "spec": spec})
    api.ask("PATCH", f"{path}/coredns/status", {"status": status}, "application/merge-patch+json")


def _allowed(api: Api, review: object) -> bool:
    answer = api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def _create(api: Api, wait: Callable[[str, Callable[[], object], float], None], path: str, body: object) -> None:
    def made() -> bool:
        api.post(path, body)
        return True

    wait(f"a POST to {path}", made, 20)


def _dns_objects() -> list[tuple[str, Any]]:
    labels = {"k8s-app": "kube-dns"}
    ports = [{"name": f"dns-{kind.lower()}", "port": 53, "protocol": kind} for kind in ("UDP", "TCP")]
    service = {
        "metadata": {"name": "kube-dns", "labels": labels},
        "spec": {"clusterIP": DNS_SERVICE, "ports": ports},
    }
    endpoints = {
        "metadata": {"name": "kube-dns", "labels": {**labels, "kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [CONTROL_PLANE_IP]}],
        "ports": ports,
    }
    return [
        ("/api/v1/namespaces/kube-system/services", service),
        ("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices", endpoints),
    ]


def _right_objects() -> list[tuple[str, Any]]:
    """Roles of their own: the role "view" is empty until the controller manager has aggregated it."""
    objects: list[tuple[str, Any]] = []
    for user, resources in RIGHTS.items():
        name = {"metadata": {"name": f"test-cluster-{user}"}}
        rules = [
            {"apiGroups": [group], "resources": kinds, "verbs": ["get", "list", "watch"]}
            for group, kinds in resources.items()
        ]
        binding = {
            **name,
            "subjects": [{"kind": "User", "name": f"system:{user}"}],
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": f"test-cluster-{user}"},
        }
        objects += [
            (f"/apis/{RBAC}/v1/clusterroles", {**name, "rules": rules}),
            (f"/apis/{RBAC}/v1/clusterrolebindings", binding),
        ]
    return objects
