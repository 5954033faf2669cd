"""A node: containerd, kubelet, kube-proxy and kube-router, with their configuration."""

from __future__ import annotations

import json
from typing import Any

from .certificates import make_certificate, write_kubeconfig
from .control_plane import Commands
from .network import DNS_SERVICE, PODS, SERVICES, node_ip, pod_net
from .state import State

PAUSE_IMAGE = "localhost/pause:1"


def write_files(state: State, node: str, server: str) -> None:
    """Everything that a node's components read, under ROOT/NODE; ``server`` is the API server's URL."""
    number, folder = state.nodes.index(node), state.root / node
    for name in ("cni", "kubelet", "log", "cni-state"):
        (folder / name).mkdir(parents=True)
    make_certificate(state.pki, node, f"/O=system:nodes/CN=system:node:{node}", [node, node_ip(number)])
    write_kubeconfig(state.pki, folder / "kubelet.kubeconfig", node, server)
    (folder / "resolv.conf").write_text("# for pods with dnsPolicy Default: no name server\n")
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(state, node), indent=1))
    (folder / "cni" / "pods.conflist").write_text(json.dumps(_pod_network(number), indent=1))
    (folder / "containerd.toml").write_text(_containerd(state, node))


def _kubelet(state: State, node: str) -> dict[str, Any]:
    folder, pki = state.root / node, state.pki
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "address": node_ip(state.nodes.index(node)),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/{node}.crt",
        "tlsPrivateKeyFile": f"{pki}/{node}.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{state.prefix}/{node}",
        # Since 1.35 a kubelet refuses cgroup v1 unless told.
        "failCgroupV1": False,
        "failSwapOn": False,
        # In a container without CAP_SYS_RESOURCE it cannot be lowered.
        "oomScoreAdj": 0,
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": f"{folder}/resolv.conf",
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "imagePullCredentialsVerificationPolicy": "NeverVerify",
        # A test machine's disk may well be fuller than the 85 % from which a kubelet evicts pods.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        # A lease that is renewed every 3 s, so that a dead kubelet is seen soon (see --node-grace).
        "nodeLeaseDurationSeconds": 12,
        "nodeStatusUpdateFrequency": "5s",
    }


def _pod_network(number: int) -> dict[str, Any]:
    ipam = {
        "type": "host-local",
        "dataDir": "/run/cni-ipam",
        "ranges": [[{"subnet": pod_net(number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {"type": "ptp", "ipMasq": False, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _containerd(state: State, node: str) -> str:
    """For the configuration version of containerd 2.4, whose plugins have other names than in 1.6.

    Its NRI and opt plugins name folders of the host. Without CAP_SYS_RESOURCE oom_score_adj cannot be lowered.
    """
    folder = state.root / node
    return f"""\
version = 4
root = '{folder}/containerd'
state = '/run/containerd'
imports = []
disabled_plugins = ['io.containerd.internal.v1.opt', 'io.containerd.nri.v1.nri']
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '{PAUSE_IMAGE}'
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['/usr/lib/cni']
  conf_dir = '{folder}/cni'
  use_internal_loopback = true
[plugins.'io.containerd.metadata.v1.bolt']
  no_sync = true
"""


def commands(state: State, node: str) -> Commands:
    """Components of one node, in the order in which they can be started."""
    folder, pki, ip = state.root / node, state.pki, node_ip(state.nodes.index(node))
    found: Commands = {
        f"containerd@{node}": (node, [state.bin("containerd"), "--config", f"{folder}/containerd.toml"]),
        f"kubelet@{node}": (node, [
            state.bin("kubelet"), f"--config={folder}/kubelet.json", f"--kubeconfig={folder}/kubelet.kubeconfig",
            f"--hostname-override={node}", f"--node-ip={ip}",
        ]),
        f"kube-proxy@{node}": (node, [
            state.bin("kube-proxy"), f"--kubeconfig={pki}/proxy.kubeconfig", f"--hostname-override={node}",
            "--proxy-mode=iptables", "--detect-local-mode=ClusterCIDR", f"--cluster-cidr={PODS}",
            "--oom-score-adj=0", "--healthz-bind-address=127.0.0.1:10256",
            # The conntrack sysctls belong to the first network namespace, the host's: leave them.
            "--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ]),
    }  # fmt: skip
    if not state.options.no_network_policy:
        # Its firewall alone: it turns NetworkPolicies into iptables rules and ipsets of the node's own namespace.
        # (The reference implementation of Kubernetes needs the nft expression `queue`, which kernels may lack.)
        found[f"kube-router@{node}"] = node, [
            state.bin("kube-router"), f"--kubeconfig={pki}/kube-router.kubeconfig", f"--hostname-override={node}",
            "--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--enable-cni=false",
            f"--service-cluster-ip-range={SERVICES}", "--health-port=0",
        ]  # fmt: skip
    return found
