"""Images without a registry: one-layer archives, and the base images that tests and Dockerfiles start from."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import platform
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .tools import ClusterError, log, run, succeeds

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
BASE_IMAGES = {"busybox.tar": "docker.io/library/busybox:1", "python.tar": "docker.io/library/python:3.11-slim"}
"""Archives, and the names under which their images are loaded."""


def write_image(
    name: str,
    out: Path,
    rootfs: Path | None = None,
    add: Sequence[tuple[str, str]] = (),
    env: Sequence[str] = (),
    cmd: Sequence[str] = (),
) -> None:
    """Write a one-layer image as a docker archive, from a folder or from single files."""
    partial = out.with_name(f".{out.name}.partial")
    with tempfile.TemporaryDirectory(dir=out.resolve().parent) as folder:
        layer = Path(folder) / "layer.tar"
        with tarfile.open(layer, "w") as tar:
            if rootfs:
                tar.add(rootfs, arcname=".")
            for source, target in add:
                tar.add(source, arcname=target.lstrip("/"))
        with layer.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        config = json.dumps(
            {
                "architecture": ARCHITECTURES[platform.machine()],
                "os": "linux",
                "config": {"Cmd": list(cmd), "Env": [f"PATH={PATH}", *env]},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                # buildah refuses to build layers upon an image whose history does not account for its own.
                "history": [{"created": "1970-01-01T00:00:00Z", "created_by": name}],
            }
        ).encode()
        config_name = hashlib.sha256(config).hexdigest() + ".json"
        manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
        with tarfile.open(partial, "w") as tar:
            for member, data in ((config_name, config), ("manifest.json", json.dumps(manifest).encode())):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            tar.add(layer, arcname=f"{digest}/layer.tar")
    partial.replace(out)


def lacking_for_images() -> str:
    """Why images cannot be made on this machine, with the mend; empty when they can."""
    wanted = {"busybox": "busybox-static", "mmdebstrap": "mmdebstrap", "buildah": "buildah"}
    missing = [package for program, package in wanted.items() if not shutil.which(program)]
    return f"missing programs: install the Debian packages {' '.join(missing)}" if missing else ""


def base_image(cache: Path, archive: str, folder: Path | None = None) -> Path:
    """One of BASE_IMAGES, made unless the cache has it; with ``folder``, a link to it there.

    Raises:
        ClusterError: this machine lacks busybox, mmdebstrap or root.
    """
    recipe = "".join(inspect.getsource(part) for part in (_busybox, _python, write_image))
    kept = cache / f"images-{hashlib.sha256(recipe.encode()).hexdigest()[:10]}" / archive
    if not kept.exists():
        log(f"making {archive}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_scratch(cache), prefix="tandem-image-") as work:
            {"busybox.tar": _busybox, "python.tar": _python}[archive](Path(work), kept)
    if not folder:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    linked = folder / archive
    linked.unlink(missing_ok=True)
    try:
        os.link(kept, linked)
    except OSError:  # another file system
        shutil.copyfile(kept, linked)
    return linked


def _scratch(cache: Path) -> Path:
    """Memory, if there is enough: dpkg syncs every file, which took ten minutes on a busy disk, and one in memory."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 << 30
    return memory if enough else cache


def _busybox(work: Path, out: Path) -> None:
    """Debian's static busybox with a link for each applet. (Its `wget -T` crashes: use `timeout 3 wget`.)"""
    program = shutil.which("busybox")
    if not program or succeeds("ldd", program):  # ldd fails on a static program
        raise ClusterError("no static busybox: install the Debian package busybox-static")
    root = work / "root"
    for name in ("bin", "etc", "tmp", "var", "root"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(program, root / "bin" / "busybox")
    for applet in run(program, "--list").split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
    write_image(BASE_IMAGES["busybox.tar"], out, rootfs=root, cmd=["sh"])


def _python(work: Path, out: Path) -> None:
    """Debian's own Python 3.11, under the name of the official slim image; about 200 MB with apt and pip."""
    if os.geteuid():
        raise ClusterError("the Python base image needs root")
    if not shutil.which("mmdebstrap"):
        raise ClusterError("no mmdebstrap: install the Debian package mmdebstrap")
    root = work / "root"
    work.chmod(0o755)  # mmdebstrap's own user must enter it
    run(
        "mmdebstrap", "--quiet", "--variant=apt", "--include=python3,python3-venv,python3-pip,ca-certificates",
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")), "bookworm", root,
    )  # fmt: skip
    # pip may install into the image, as in the official ones.
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    (root / "usr/bin/python").symlink_to("python3")
    write_image(BASE_IMAGES["python.tar"], out, rootfs=root, env=["LANG=C.UTF-8"], cmd=["python3"])
