"""A whole cluster: up, down, and what can be done to its parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from . import certificates, control_plane, network, node
from .api import Api
from .build import bin_dir
from .host import problem
from .images import write_image
from .machines import Machines
from .network import CONTROL_PLANE, CONTROL_PLANE_IP
from .state import State
from .tools import ClusterError, log, run, say, succeeds


class Cluster:
    def __init__(self, state: State) -> None:
        self.state = state
        self.machines = Machines(state)
        self.api = Api(state)

    def commands(self) -> control_plane.Commands:
        """Every component, in the order in which they are started."""
        found = control_plane.commands(self.state)
        for each in self.state.nodes:
            found |= node.commands(self.state, each)
        return found

    # -- up and down

    def up(self) -> None:
        """Boot it; on failure what has started is left for a look.

        Raises:
            ClusterError: this machine lacks something; a component has died, with the end of its log.
        """
        state, wait = self.state, self.machines.wait
        if text := problem(len(state.nodes), state.root):
            raise ClusterError(text)
        self.commands()  # fails now if a program is not built
        state.make_root()
        self._write_files()
        if state.nodes:
            network.make(state)
            for machine in (CONTROL_PLANE, *state.nodes):
                self.machines.start_machine(machine)
            self._spawn("forward", *(f"containerd@{each}" for each in state.nodes))
            log("machines are up")
        self._spawn("etcd", "kube-apiserver")
        for each in state.nodes:
            self._await(f"containerd@{each}")
            self.ctr(each, "images", "import", state.root / "pause.tar")
        self._await("kube-apiserver")
        log("the API server is ready")
        if state.nodes:
            control_plane.publish(self.api, wait)
        # kube-router ends unless its node is registered: last.
        policies = [name for name in self.commands() if name.startswith("kube-router@")]
        self._spawn(*(name for name in self.commands() if name not in (*self.machines.started, *policies)))
        if "kube-controller-manager" in self.machines.started:
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            wait("the default service account", lambda: self.api.get(account))
        for each in state.nodes:
            wait(f"{each} to be Ready", partial(self.api.node_is_ready, each))
            log(f"{each} is Ready")
        if state.nodes:
            control_plane.publish_dns_pod(self.api, wait)
        self._spawn(*policies)
        for name in policies:
            self._await(name)
        if state.nodes:
            probe = f"import urllib.request as u; u.urlopen('http://{CONTROL_PLANE_IP}:8181/ready', timeout=1)"
            inside = self.machines.inside(CONTROL_PLANE)
            wait("CoreDNS", lambda: succeeds(*inside, state.options.python, "-c", probe))
        self.machines.check_started()
        state.save(ready=True)
        log(f"the cluster is up; KUBECONFIG={state.kubeconfig}")

    def down(self) -> None:
        """Remove every trace of it, also of one that was killed half-way."""
        self.machines.remove()
        network.remove(self.state)
        self.state.remove_root()
        log("the cluster is gone")

    def is_healthy(self) -> bool:
        try:
            return (
                self.state.is_ready()
                and not self.stopped()
                and self.api.is_ready()
                and all(self.api.node_is_ready(each) for each in self.state.nodes)
            )
        except (OSError, ValueError, ClusterError):
            return False

    def _write_files(self) -> None:
        state = self.state
        inside = f"https://{control_plane.api_address(state)}"
        certificates.write_all(state, inside)
        if state.nodes:
            control_plane.write_files(state)
            pause = [(state.bin("pause"), "/pause")]
            write_image(node.PAUSE_IMAGE, state.root / "pause.tar", add=pause, cmd=["/pause"])
        for each in state.nodes:
            node.write_files(state, each, inside)

    # -- parts

    def pid(self, name: str) -> int | None:
        """The live process of a component or machine."""
        if name == CONTROL_PLANE or name in self.state.nodes:
            return self.machines.pid(name)
        commands = self.commands()
        if name not in commands:
            raise ClusterError(f"no such part: {name}; there are {', '.join([*self.state.nodes, *commands])}")
        # The forwarder runs as this very Python, whose file has another name than the link that started it.
        return self.machines.pid(name, Path(str(commands[name][1][0])).resolve().name)

    def stopped(self) -> list[str]:
        """What does not run, in the order in which it can be started: a dead node stands for its components."""
        dead = [each for each in self.state.nodes if not self.pid(each)]
        down = [name for name in self.commands() if name.partition("@")[2] not in dead and not self.pid(name)]
        # A node is up when its kube-router has met the API server.
        return [*(n for n in down if "@" not in n), *dead, *(n for n in down if "@" in n)]

    def stop(self, name: str) -> None:
        """Kill a component (containers go on running), or pull a whole node's plug."""
        if name == CONTROL_PLANE:
            raise ClusterError(f"{CONTROL_PLANE} holds the network: stop its components instead")
        if not self.pid(name):
            raise ClusterError(f"{name} is not running")
        program = "pause" if name in self.state.nodes else Path(str(self.commands()[name][1][0])).resolve().name
        self.machines.kill(name, program)

    def start(self, name: str) -> None:
        """Start again what `stop` has stopped, and wait where others would end without it.

        Order matters: there is no init system. A kubelet ends when containerd does not answer, the controller manager
        when the API server is not ready.
        """
        if self.pid(name):
            raise ClusterError(f"{name} is running already")
        if name in self.state.nodes:
            self.machines.start_machine(name)
            for component in node.commands(self.state, name):
                self.start(component)
            return
        if name.startswith("kube-router@"):
            machine = name.split("@")[1]
            self.machines.wait(f"{machine} to be registered", lambda: self.api.get(f"/api/v1/nodes/{machine}"))
        self._spawn(name)
        self._await(name)

    def mend(self) -> list[str]:
        """Start whatever does not run, and wait until all is well; the names of what was started."""
        names = self.stopped()
        for name in names:
            self.start(name)
        self.machines.wait("the API server's /readyz", self.api.is_ready)
        for each in self.state.nodes:
            self.machines.wait(f"{each} to be Ready", partial(self.api.node_is_ready, each))
        return names

    def _spawn(self, *names: str) -> None:
        commands = self.commands()
        for name in names:
            machine, words = commands[name]
            self.machines.spawn(name, words, machine)

    def _await(self, name: str) -> None:
        """Wait for a component without which others would end at once, or tests would see a half-started one."""
        component, _, machine = name.partition("@")
        wait = self.machines.wait
        if component == "kube-apiserver":
            wait("the API server's /readyz", self.api.is_ready)
        elif component == "containerd":
            words = [*self.machines.inside(machine), self.state.bin("ctr"), "version"]
            wait(f"containerd on {machine}", lambda: succeeds(*words), 30)
        elif component == "kube-router":
            words = [*self.machines.inside(machine), "iptables", "-S", "KUBE-ROUTER-FORWARD"]
            wait(f"NetworkPolicies on {machine}", lambda: succeeds(*words), 30)

    # -- use

    def ctr(self, machine: str, *args: object) -> str:
        return run(*self.machines.inside(machine), self.state.bin("ctr"), "--namespace=k8s.io", *args)

    def load(self, files: Sequence[Path]) -> None:
        """Import image archives into every node."""
        nodes = self.state.nodes
        if not nodes:
            raise ClusterError("this cluster has no nodes")
        if missing := [str(file) for file in files if not file.is_file()]:
            raise ClusterError(f"no such file: {', '.join(missing)}")
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(self.ctr, each, "images", "import", file.resolve()) for file in files for each in nodes]
            for job in jobs:
                job.result()
        for each in nodes:
            names = self.ctr(each, "images", "list", "--quiet").splitlines()
            shown = [name for name in names if ":" in name and not name.startswith(("sha256:", "time="))]
            log(f"{each} has {' '.join(shown)}")

    def environment(self) -> dict[str, str]:
        """Variables that point kubectl and helm at it."""
        clients = str(bin_dir(self.state.cache, "clients"))
        return {
            "KUBECONFIG": str(self.state.kubeconfig),
            "CLUSTER_ROOT": str(self.state.root),
            "CLUSTER_NODES": " ".join(self.state.nodes),
            "PATH": ":".join([*filter(None, [self.state.options.assets, clients]), os.environ["PATH"]]),
        }

    def status(self) -> None:
        """Print processes, by host PID, with their resident memory."""
        total = 0.0
        for pid, (name, program) in sorted(self.machines.processes().items(), key=lambda item: item[1]):
            if program not in ("nsenter", "unshare"):
                with suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    size = int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024
                    total += size
                    say(f"{pid:8} {name:28} {program:24} {size:7.1f} MiB")
        say(f"{'':8} {'resident memory in all':53} {total:7.1f} MiB")
