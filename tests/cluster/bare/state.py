"""A cluster's state folder: what it was started with, where its files lie, and how the folder comes and goes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from .build import find
from .tools import ClusterError, run


@dataclass(frozen=True)
class Options:
    """What `up` was told; kept in the state folder, so that every later command knows it."""

    nodes: int = 0
    node_grace: int = 20
    evict_after: int = 10
    no_network_policy: bool = False
    plain_folder: bool = False
    controller_manager: bool = False
    scheduler: bool = False
    assets: str = ""
    """Folder whose etcd and kube-apiserver are used instead of the built ones."""
    programs: tuple[str, ...] = ()
    """Folders of the programs: others after a change of versions, and then the cluster is booted anew."""
    port: int = 0
    """Of the API server, on 127.0.0.1."""
    etcd_ports: tuple[int, int] = (2379, 2380)
    python: str = sys.executable

    def same_but_for_ports(self, other: Options) -> bool:
        apart = ("port", "etcd_ports", "python")
        return all(a == asdict(other)[name] for name, a in asdict(self).items() if name not in apart)


class State:
    """Paths under the state folder, and the folder itself."""

    def __init__(self, root: Path, cache: Path, options: Options | None = None) -> None:
        self.root, self.cache = root.resolve(), cache
        self.file = self.root / "state.json"
        self.options = options or self._load()
        self.nodes = [f"node-{number + 1}" for number in range(self.options.nodes)]
        self.prefix = "k" + hashlib.sha256(str(self.root).encode()).hexdigest()[:6]
        """Begins the names of the cluster's network namespaces, and is that of its cgroup."""
        self.pki, self.logs, self.kubeconfig = self.root / "pki", self.root / "logs", self.root / "kubeconfig"
        self.image = self.root.with_name(f".{self.root.name}.img")

    def bin(self, name: str) -> str:
        return str(find(self.cache, name, self.options.assets))

    def is_ready(self) -> bool:
        """Whether `up` came to its end."""
        return bool(json.loads(self.file.read_text()).get("ready"))

    def save(self, ready: bool = False) -> None:
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps({"options": asdict(self.options), "ready": ready}, indent=1))
        partial.replace(self.file)

    def _load(self) -> Options:
        if not self.file.exists():
            raise ClusterError(f"no cluster in {self.root}: run `up` first")
        try:
            kept = json.loads(self.file.read_text())["options"]
            first, second = kept.pop("etcd_ports")
            return Options(**kept | {"programs": tuple(kept["programs"]), "etcd_ports": (first, second)})
        except (ValueError, KeyError, TypeError):
            raise ClusterError(f"{self.file} is not of this version: run `down`, then `up`") from None

    def make_root(self) -> None:
        """Mount on the state folder a file system in a sparse file, which is deleted at once.

        It goes as a whole when it is unmounted. To delete the thousands of files of unpacked images one by one can
        take a minute on a disk mounted with ``discard``. A tmpfs is as fast, but what a container writes to its files
        would count against its memory limit. No journal: nothing in it outlives a crash.
        """
        self.root.mkdir(parents=True)
        if self.nodes and not self.options.plain_folder:
            run("truncate", "--size=64G", self.image)
            run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", "-m", "0", self.image)
            run("mount", "-o", "loop,noatime,noinit_itable", self.image, self.root)
            self.image.unlink()
        self.save()

    def remove_root(self) -> None:
        """Whatever an `up` that was killed at any moment has left of it.

        Raises:
            ClusterError: it holds files that are not of a cluster.
        """
        while any(fields[1] == str(self.root) for fields in mounts()):
            run("umount", "--lazy", self.root)  # lazy: a shell may stand in it
        if self.file.exists() or self.file.with_suffix(".partial").exists():
            shutil.rmtree(self.root)
        if self.root.exists():
            try:
                os.rmdir(self.root)
            except OSError:
                raise ClusterError(f"{self.root} holds files that are not of a cluster: empty it yourself") from None
        self.image.unlink(missing_ok=True)


def mounts() -> list[list[str]]:
    """The lines of /proc/mounts, in fields: device, mount point, type, options."""
    return [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
