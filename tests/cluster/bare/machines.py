"""Processes and machines.

The control plane and each node is a "machine": its own network, PID, mount, UTS and IPC namespaces, held by a `pause`
process that is PID 1 there. Killing that one ends containerd, the shims and all pods, and drops every mount.

Each process carries the state folder in its environment, by which `down` knows its own: there are no PID files, so
that it also works after `kill -9` of the tool at any moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from .build import bin_dir
from .host import cgroup_mounts
from .network import netns
from .state import State
from .tools import ClusterError, wait_until

MARK_ROOT, MARK_NAME = "TANDEM_CLUSTER_STATE", "TANDEM_CLUSTER_COMPONENT"
MOUNT_POINTS = ("/var/lib/kubelet", "/var/lib/cni")
"""Made on the host, and left empty there."""
SYSCTLS = (
    "kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "vm/panic_on_oom",
    "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
)  # fmt: skip
"""The kubelet insists on writing these. Each machine gets plain files in their place: the host's stay as they are."""


def marked_processes() -> dict[int, tuple[str, str, str]]:
    """{pid: (state folder, component, program)} of the processes of all clusters on this host."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError, KeyError):
                text = Path(entry.path, "environ").read_bytes().decode(errors="replace")
                variables = dict(v.split("=", 1) for v in text.split("\0") if v.startswith("TANDEM_CLUSTER_"))
                # A new build may have replaced the file.
                program = os.path.basename(os.readlink(entry.path + "/exe").removesuffix(" (deleted)"))
                found[int(entry.name)] = (variables[MARK_ROOT], variables[MARK_NAME], program)
    return found


class Machines:
    """The processes of one cluster."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        """What this run of the tool has started."""

    def processes(self) -> dict[int, tuple[str, str]]:
        """{pid: (component, program)} of all live processes that belong to this cluster."""
        root = str(self.state.root)
        return {pid: (name, program) for pid, (owner, name, program) in marked_processes().items() if owner == root}

    def pid(self, name: str, program: str = "pause") -> int | None:
        """The process of a component (not the nsenter around it), or the first process of a machine."""
        return next((pid for pid, found in self.processes().items() if found == (name, program)), None)

    def inside(self, machine: str) -> list[str]:
        """The words before a command that is to run inside a machine."""
        pid = self.pid(machine)
        if not pid:
            raise ClusterError(f"{machine} is not running: run `start {machine}`")
        return ["nsenter", f"--target={pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]

    def spawn(self, name: str, argv: Sequence[object], machine: str | None = None) -> None:
        """Start a component in the background, its output in logs/NAME.log."""
        state = self.state
        state.logs.mkdir(parents=True, exist_ok=True)
        words = [*(self.inside(machine) if machine else []), *map(str, argv)]
        env = {
            "PATH": f"{bin_dir(state.cache, 'containerd')}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            MARK_ROOT: str(state.root),
            MARK_NAME: name,
        }
        with (state.logs / f"{name}.log").open("ab") as file:
            self.started[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=env, cwd="/"
            )

    def check_started(self) -> None:
        """Fail at once, and say where to look, when something that this run started has died."""
        for name, process in self.started.items():
            if process.poll() is not None:
                path = self.state.logs / f"{name}.log"
                lines = path.read_text(errors="replace").splitlines()[-8:]
                tail = "\n".join("    " + line[:300] for line in lines)
                raise ClusterError(f"{name} exited with {process.returncode}; the end of {path}:\n{tail}")

    def wait(self, what: str, check: Callable[[], object], seconds: float = 90) -> None:
        """Wait for ``check()``, as long as everything that this run started is alive."""

        def alive_and_well() -> object:
            self.check_started()
            return check()

        try:
            wait_until(what, alive_and_well, seconds)
        except TimeoutError as error:
            raise ClusterError(f"{error}; the logs are in {self.state.logs}") from None

    def start_machine(self, machine: str) -> None:
        folder = self.state.root / machine
        folder.mkdir(exist_ok=True)
        script = [
            "set -e",
            "mount --make-rshared /",
            f"hostname {machine}",
            # containerd's sockets and locks, and the network namespaces of pods, are each machine's own.
            "mount -t tmpfs -o mode=755 tmpfs /run",
        ]
        if machine in self.state.nodes:
            self._make_cgroups(machine)
            for source, target in {"kubelet": MOUNT_POINTS[0], "cni-state": MOUNT_POINTS[1], "log": "/var/log"}.items():
                Path(target).mkdir(parents=True, exist_ok=True)
                script.append(f"mount --bind {folder}/{source} {target}")
            for name in filter(lambda name: Path("/proc/sys", name).exists(), SYSCTLS):
                copy = folder / name.replace("/", "-")
                copy.write_text(Path("/proc/sys", name).read_text())
                script.append(f"mount --bind {copy} /proc/sys/{name}")
        ready = folder / "ready"
        ready.unlink(missing_ok=True)
        script += [f"touch {ready}", f"exec {self.state.bin('pause')}"]
        (folder / "machine.sh").write_text("\n".join(script) + "\n")
        self.spawn(machine, [
            "nsenter", f"--net=/run/netns/{netns(self.state, machine)}",
            "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
            "--propagation", "private", "sh", f"{folder}/machine.sh",
        ])  # fmt: skip
        self.wait(f"the start of {machine}", lambda: ready.exists() and self.pid(machine), 20)

    def _make_cgroups(self, node: str) -> None:
        """The kubelet's cgroupRoot must exist in every v1 hierarchy."""
        for mount in cgroup_mounts():
            folder = mount / self.state.prefix / node
            remove_cgroups(folder)  # of an earlier life of the machine: the kubelet looks at each for 3 s
            folder.mkdir(parents=True)
            for file in ("cpuset.cpus", "cpuset.mems"):  # a new cpuset is empty, and takes no process
                if (mount / file).exists():
                    for level in (folder.parent, folder):
                        (level / file).write_text((mount / file).read_text())

    def kill_all(self) -> bool:
        """Kill what is left; whether nothing was."""
        processes = self.processes()
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started.values():
            process.poll()  # else they stay as zombies
        return not processes

    def remove(self) -> None:
        """Processes, cgroups and mount points; with the processes of a machine all its mounts go."""
        wait_until("the end of all processes", self.kill_all, 30)
        for mount in cgroup_mounts():
            folder = mount / self.state.prefix
            wait_until(f"the removal of {folder}", partial(remove_cgroups, folder), 20)
        # rmdir of a mount point unmounts it in other mount namespaces: not while another cluster uses them.
        if not marked_processes():
            for point in MOUNT_POINTS:
                with suppress(OSError):  # not there, or not empty: a kubelet of the host's own
                    os.rmdir(point)

    def kill(self, name: str, program: str) -> None:
        """Kill one component (containers go on running), or a whole machine with all that runs there."""
        pid = self.pid(name, program)
        if not pid:
            raise ClusterError(f"{name} is not running")
        os.kill(pid, signal.SIGKILL)
        self.started.pop(name, None)
        wait_until(f"the end of {name}", lambda: not self.pid(name, program))


def remove_cgroups(folder: Path) -> bool:
    for level, _, _ in os.walk(folder, topdown=False):
        os.rmdir(level)
    return True
