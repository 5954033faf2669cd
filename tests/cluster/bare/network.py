"""Addresses, and the network that joins the machines.

The control plane's network namespace holds a bridge, 10.200.0.1/24; node N has a cable to it, 10.200.0.(10+N), and
10.201.N.0/24 for its pods. All of it lives inside the namespaces: the host gets no interface, route, address or
firewall rule, so that clusters with the same addresses run side by side. Nothing in them reaches the outside:
'Network is unreachable' comes at once.
"""

from __future__ import annotations

import ipaddress
import shutil

from .state import State
from .tools import run

CONTROL_PLANE = "control-plane"
CONTROL_PLANE_IP = "10.200.0.1"
PODS = "10.201.0.0/16"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"


def node_ip(number: int) -> str:
    """Address of the node with this number, from 0."""
    return str(ipaddress.ip_address(CONTROL_PLANE_IP) + 10 + number)


def pod_net(number: int) -> str:
    return f"10.201.{number + 1}.0/24"


def netns(state: State, machine: str) -> str:
    """Name of a machine's network namespace on the host."""
    return f"{state.prefix}-{machine}"


def make(state: State) -> None:
    control_plane = netns(state, CONTROL_PLANE)
    for machine in (CONTROL_PLANE, *state.nodes):
        name = netns(state, machine)
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        # `ip netns exec` remounts /sys and hides the cgroups; nsenter leaves all but the network alone.
        run("nsenter", f"--net=/run/netns/{name}", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    run("ip", "-n", control_plane, "link", "add", "br0", "type", "bridge")
    run("ip", "-n", control_plane, "addr", "add", f"{CONTROL_PLANE_IP}/24", "dev", "br0")
    run("ip", "-n", control_plane, "link", "set", "br0", "up")
    for number, node in enumerate(state.nodes):
        name = netns(state, node)
        run("ip", "-n", control_plane, "link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "-n", control_plane, "link", "set", node, "master", "br0", "up")
        run("ip", "-n", name, "addr", "add", f"{node_ip(number)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        # The default route lets a node's own programs reach service addresses; the control plane has none.
        run("ip", "-n", name, "route", "add", "default", "via", CONTROL_PLANE_IP)
        run("ip", "-n", control_plane, "route", "add", pod_net(number), "via", node_ip(number))
        for other in range(len(state.nodes)):
            if other != number:
                run("ip", "-n", name, "route", "add", pod_net(other), "via", node_ip(other))


def remove(state: State) -> None:
    for line in run("ip", "netns", "list").splitlines() if shutil.which("ip") else []:
        if line.startswith(f"{state.prefix}-"):
            run("ip", "netns", "delete", line.split()[0])
