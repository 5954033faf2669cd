"""What this machine lacks for a cluster, and which host it is."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from .build import API_SERVER, unbuilt
from .state import mounts

PACKAGES = {  # programs of the host, and the Debian packages that hold them
    "openssl": "openssl",
    "runc": "runc",
    "iptables": "iptables",
    "ipset": "ipset",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "mkfs.ext4": "e2fsprogs",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}


def cgroup_mounts() -> list[Path]:
    """The mount points of all cgroup hierarchies (beside v1, runc puts each container into an empty v2 one, too)."""
    return [Path(fields[1]) for fields in mounts() if fields[2] in ("cgroup", "cgroup2")]


def problem(nodes: int, root: Path | None = None) -> str:
    """Why this machine cannot boot a cluster of so many nodes, with the mend; empty when it can."""
    wanted = PACKAGES if nodes else {"openssl": "openssl"}
    if nodes and os.geteuid():
        return "a cluster with nodes needs root"
    if missing := sorted({package for program, package in wanted.items() if not shutil.which(program)}):
        return f"missing programs: install the Debian packages {' '.join(missing)}"
    if not nodes:
        return ""
    # The kubelet, containerd and runc all still work on v1, and no host with v2 alone was tried.
    if not any((mount / "memory.stat").exists() and mount.name == "memory" for mount in cgroup_mounts()):
        return "this machine has no cgroup v1 memory hierarchy, and clusters with nodes were made for cgroup v1"
    if root and re.search(r"\s", str(root)):
        return f"a state folder with white space in its path is not supported: {root}"
    if root and str(root).startswith(("/run/", "/var/run/", "/var/log/", "/var/lib/kubelet/", "/var/lib/cni/")):
        return f"{root} is hidden inside the cluster's machines: choose another state folder"
    return ""


def lacking(cache: Path, nodes: int, assets: str = "") -> str:
    """As `problem`, and with the programs that are not built yet."""
    if text := problem(nodes):
        return text
    names = unbuilt(cache) if nodes else unbuilt(cache, API_SERVER, assets)
    return f"not built: {', '.join(names)}; run `make cluster`" if names else ""
