"""The command line: ``python -m tests.cluster.bare COMMAND`` or ``python tests/cluster/bare COMMAND``."""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from . import host
from .build import ASSETS, FOLDERS, bin_dir, build, default_cache
from .cluster import Cluster
from .forward import forward
from .images import BASE_IMAGES, base_image, lacking_for_images, write_image
from .network import CONTROL_PLANE, netns
from .state import Options, State
from .tools import ClusterError, free_ports, log, say

EPILOG = "Boots a small, real Kubernetes cluster on one Linux machine; README.md beside the program tells how."


def main() -> None:
    args = parser().parse_args()
    try:
        sys.exit(dispatch(args))
    except (ClusterError, TimeoutError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def dispatch(args: argparse.Namespace) -> int:
    """Carry out a command; the exit status."""
    root, cache = Path(args.root).resolve(), Path(args.cache).expanduser().resolve()
    match args.command:
        case "build":
            build(cache, args.name)
        case "check":
            text = host.lacking(cache, args.nodes, _assets(args.nodes)) or (lacking_for_images() if args.nodes else "")
            say(text or "nothing is lacking")
            return int(bool(text))
        case "image":
            add = [tuple(each.split(":", 1)) for each in args.add]
            rootfs = Path(args.rootfs) if args.rootfs else None
            write_image(args.image_name, Path(args.out), rootfs, add, args.env, shlex.split(args.cmd))
        case "base-images":
            for archive in BASE_IMAGES:
                say(str(base_image(cache, archive, Path(args.folder))))
        case "up":
            with _alone(root):
                up(root, cache, args)
        case "down":
            with _alone(root):
                Cluster(State(root, cache, Options())).down()
        case _:
            use(Cluster(State(root, cache)), args)
    return 0


def up(root: Path, cache: Path, args: argparse.Namespace) -> None:
    """A healthy cluster with the same options is left as it is; the rest of another is removed first."""
    assets = _assets(args.nodes)
    named = ("nodes", "node_grace", "evict_after", "no_network_policy", "plain_folder", "controller_manager")
    options = Options(
        **{name: getattr(args, name) for name in named},
        scheduler=args.scheduler,
        assets=assets,
        programs=tuple(str(bin_dir(cache, folder)) for folder in FOLDERS),
        port=args.port,
    )
    if root.exists():
        with suppress(ClusterError):
            old = Cluster(State(root, cache))
            kept = old.state.options
            if options.same_but_for_ports(kept) and args.port in (0, kept.port) and old.is_healthy():
                log(f"already up; KUBECONFIG={old.state.kubeconfig}")
                return
    for attempt in range(3):
        port, *etcd = free_ports(3)
        # With nodes etcd has a network of its own.
        etcd_ports = (2379, 2380) if args.nodes else (etcd[0], etcd[1])
        cluster = Cluster(State(root, cache, replace(options, port=args.port or port, etcd_ports=etcd_ports)))
        if root.exists() or cluster.machines.processes():  # even half a cluster has one of these
            log("removing what an earlier run left")
            cluster.down()
        try:
            cluster.up()
            return
        except ClusterError as error:
            # Another process was given the same free port in the meantime.
            if attempt == 2 or args.port or "address already in use" not in str(error).lower():
                raise


def use(cluster: Cluster, args: argparse.Namespace) -> None:
    """Commands to a cluster that is up."""
    match args.command:
        case "load":
            cluster.load([Path(file) for file in args.file])
        case "env":
            for name, value in cluster.environment().items():
                say(f"export {name}={shlex.quote(value)}")
        case "status":
            cluster.status()
        case "enter":
            argv = cluster.machines.inside(args.machine) + (args.argv or ["bash"])
            os.execvp(argv[0], argv)
        case "stop":
            cluster.stop(args.component)
        case "start":
            if args.component:
                cluster.start(args.component)
            else:
                say(f"started {', '.join(cluster.mend()) or 'nothing: all was running'}")
        case "forward":
            address, _, port = args.target.rpartition(":")
            state = cluster.state
            namespace = Path("/run/netns", netns(state, CONTROL_PLANE)) if state.nodes else None
            forward(args.port, (address, int(port)), namespace)


def _assets(nodes: int) -> str:
    """Tests of API clients may run on somebody else's etcd and API server; nodes belong to the built version."""
    return "" if nodes else os.environ.get(ASSETS, "")


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One `up` or `down` at a time; the lock lies beside the state folder, which comes and goes."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f".{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.cluster.bare", description=EPILOG)
    cache = default_cache()
    root = os.environ.get("CLUSTER_ROOT") or cache / "run"
    top.add_argument("--root", default=root, help="state folder (default: CLUSTER_ROOT, or run in the cache)")
    top.add_argument("--cache", default=cache, help="folder of the programs (default: %(default)s)")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    add("build", "compile every program, or only those named").add_argument("name", nargs="*")
    each = add("check", "say what this machine lacks for a cluster")
    each.add_argument("--nodes", type=int, default=2)
    _add_up(add("up", "boot a cluster, unless a healthy one with the same options is there"))
    add("down", "remove the cluster: processes, mounts, networks, cgroups, files")
    add("load", "import image archives into every node").add_argument("file", nargs="+")
    _add_image(add("image", "write a one-layer image as a docker archive (no other tool needed)"))
    each = add("base-images", "make busybox.tar and python.tar (root, busybox-static and mmdebstrap needed)")
    each.add_argument("folder", help="where they (or links to the cached ones) are put")
    add("env", "print shell variables")
    add("status", "list the cluster's processes and their memory")
    each = add("enter", "run a command inside a machine's namespaces")
    each.add_argument("machine", help=f"{CONTROL_PLANE} or node-N")
    each.add_argument("argv", nargs=argparse.REMAINDER)
    add("stop", "kill a component, such as kubelet@node-2 or etcd, or pull a node's plug").add_argument("component")
    each = add("start", "start what was stopped; without a name, whatever does not run")
    each.add_argument("component", nargs="?")
    each = add("forward", "carry connections to 127.0.0.1:PORT to HOST:PORT inside the cluster's network, until killed")
    each.add_argument("port", type=int)
    each.add_argument("target", metavar="HOST:PORT", help="a pod's address or a NodePort, not a Service's address")
    return top


def _add_up(each: argparse.ArgumentParser) -> None:
    each.add_argument("--nodes", type=int, default=2, help="with 0, only etcd and the API server, without root")
    each.add_argument("--port", type=int, default=0, help="of the API server, on 127.0.0.1 (default: a free one)")
    each.add_argument("--node-grace", type=int, default=20, metavar="S",
                      help="seconds until a silent node is NotReady (Kubernetes: 50)")  # fmt: skip
    each.add_argument("--evict-after", type=int, default=10, metavar="S",
                      help="seconds until its pods are evicted then (Kubernetes: 300)")  # fmt: skip
    each.add_argument("--no-network-policy", action="store_true",
                      help="don't enforce NetworkPolicies (saves memory, and time with many pods)")  # fmt: skip
    each.add_argument("--plain-folder", action="store_true",
                      help="don't mount a file system of its own on the state folder (slow to delete)")  # fmt: skip
    each.add_argument("--controller-manager", action="store_true", help="with --nodes 0: run it too")
    each.add_argument("--scheduler", action="store_true", help="with --nodes 0: run it too")


def _add_image(each: argparse.ArgumentParser) -> None:
    each.add_argument("image_name", help="such as docker.io/library/app:1")
    each.add_argument("out")
    each.add_argument("--rootfs", help="folder that becomes the image's /")
    each.add_argument("--add", action="append", default=[], metavar="SOURCE:TARGET")
    each.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    each.add_argument("--cmd", default="", help="a shell-like word list")
