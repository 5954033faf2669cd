"""Builds a target of /deploy/Dockerfile into an archive that `load` takes, with buildah and without a registry."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster.bare.build import default_cache
from cluster.bare.images import BASE_IMAGES, base_image
from cluster.bare.state import mounts
from cluster.bare.tools import ClusterError, log, run, succeeds

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = Path("deploy/Dockerfile")
POSTGRES = Path("tests/cluster/postgres.Dockerfile")
KEPT = 3
"""Archives of a target that the cache keeps; older ones are removed."""
LAYERS = 12 << 30
"""Bytes of layers beyond which the store is emptied, and the next build starts from the base."""


def build_image(
    dockerfile_target: str, tag: str, args: Mapping[str, str] | None = None, dockerfile: Path = DOCKERFILE
) -> Path:
    """The docker archive of a target, named ``tag`` (``localhost/tandem-worker:test``); built unless the cache has it.

    It is made of what .dockerignore allows, the Dockerfile, the base image and ``args``, the build arguments: any
    change of these makes another archive. pip's settings on this machine (index, certificates, local wheels) hold
    during the build by read-only mounts, and are in no layer.

    Raises:
        ClusterError: this machine lacks buildah, or the build failed; with its last lines.
    """
    cache = default_cache() / "built"
    cache.mkdir(parents=True, exist_ok=True)
    arguments = dict(args or {})
    with _alone(cache), tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
        context = Path(folder) / "context"
        digest = hashlib.sha256(json.dumps([dockerfile_target, tag, arguments, _base_name()]).encode())
        for path in _copy_inputs(context, dockerfile):
            digest.update(f"{path}\0{hashlib.sha256((context / path).read_bytes()).hexdigest()}\0".encode())
        archive = cache / f"{dockerfile_target}-{digest.hexdigest()[:16]}.tar"
        if archive.exists():
            archive.touch()  # the newest are kept
            return archive
        log(f"building the image {tag} (target {dockerfile_target})")
        partial = Path(folder) / "image.tar"
        _build(cache, context, dockerfile, dockerfile_target, tag, arguments, partial)
        partial.rename(archive)
        _tidy(cache, dockerfile_target)
        return archive


def installed_images() -> list[Path]:
    """The archives of all that the tests install, each named ``localhost/...:test``."""
    return [
        build_image("controller", "localhost/tandem-controller:test"),
        build_image("api", "localhost/tandem-api:test"),
        build_image("worker", "localhost/tandem-worker:test"),
        build_image("postgres", "localhost/postgres:test", dockerfile=POSTGRES),
    ]


@contextmanager
def built_anew(dockerfile_target: str, tag: str) -> Iterator[Path]:
    """The archive of a target that is built from the inputs alone: no layer of an earlier build is used nor kept.

    The context is that of a clone made at another time by somebody whose files are for nobody else to read.

    Raises:
        ClusterError: this machine lacks buildah, or the build failed; with its last lines.
    """
    cache = default_cache() / "built"
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache), tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
        context, archive = Path(folder) / "context", Path(folder) / "image.tar"
        _copy_inputs(context, DOCKERFILE)
        for path in context.rglob("*"):
            path.chmod(path.stat().st_mode & 0o700)
            os.utime(path, (10**9, 10**9))
        log(f"building the image {tag} anew (target {dockerfile_target})")
        _build(Path(folder), context, DOCKERFILE, dockerfile_target, tag, {}, archive)
        yield archive


def _tidy(cache: Path, target: str) -> None:
    for old in sorted(cache.glob(f"{target}-*.tar"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink()
    for store in cache.glob("store-*"):
        size = int(run("du", "--summarize", "--bytes", store).split()[0])
        if size > LAYERS or store.name != f"store-{_base_name()}":
            for fields in reversed(mounts()):  # of a build that failed or was killed
                if Path(fields[1]).is_relative_to(store):
                    run("umount", "--lazy", fields[1])
            run("rm", "-rf", store)


def _copy_inputs(context: Path, dockerfile: Path) -> list[Path]:
    """Fill the build's context with the inputs, and nothing that the checkout holds besides; their paths, sorted."""
    allowed = [line[1:].strip() for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    found = {dockerfile, Path(".dockerignore")}
    for top in (top for pattern in allowed for top in ROOT.glob(pattern)):
        for path in top.rglob("*") if top.is_dir() else [top]:
            part = path.relative_to(ROOT)
            if path.is_file() and not any(word == "__pycache__" or word.endswith(".egg-info") for word in part.parts):
                found.add(part)
    for part in found:
        (context / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / part, context / part)
    return sorted(found)


def _build(
    cache: Path, context: Path, dockerfile: Path, target: str, tag: str, args: Mapping[str, str], out: Path
) -> None:
    buildah = _buildah(cache)
    run(*buildah, "rm", "--all")  # of a build that was killed
    if not succeeds(*buildah, "inspect", "--type", "image", BASE_IMAGES["python.tar"]):
        run(*buildah, "pull", f"docker-archive:{base_image(default_cache(), 'python.tar')}")
    words = [
        *buildah, "bud", "--pull-never", "--layers", "--isolation", "chroot", "--target", target, "--tag", tag,
        "--file", str(context / dockerfile), *_pip_mounts(out.parent),
    ]  # fmt: skip
    for name, value in args.items():
        words += ["--build-arg", f"{name}={value}"]
    done = subprocess.run([*words, str(context)], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()[-30:]
        raise ClusterError(f"the build of {target} exited with {done.returncode}:\n" + "\n".join(lines))
    run(*buildah, "push", tag, f"docker-archive:{out}:{tag}")
    # Nothing is pruned: to buildah the last layer of an earlier stage, as of a long `pip install`, is dangling.


def _buildah(cache: Path) -> list[str]:
    """buildah with a store of its own; overlay where the file system can, else slow copies of each layer."""
    if not shutil.which("buildah"):
        raise ClusterError("no buildah: install the Debian package buildah")
    base = cache / f"store-{_base_name()}"
    for driver in ("overlay", "vfs"):
        folder = base / driver
        words = [
            "buildah",
            "--root",
            str(folder / "root"),
            "--runroot",
            str(folder / "run"),
            "--storage-driver",
            driver,
        ]
        if succeeds(*words, "images"):
            return words
        shutil.rmtree(folder, ignore_errors=True)
    raise ClusterError(f"buildah can keep images in {base} neither by overlay nor by vfs: try `buildah images`")


def _base_name() -> str:
    """Changes with the base image, whose old layers must not be used."""
    return base_image(default_cache(), "python.tar").parent.name


def _pip_mounts(folder: Path) -> list[str]:
    """Mounts that give pip in the build the settings of pip on this machine.

    They are read-only and at places that pip looks at by itself, so that no Dockerfile names them and no layer holds
    them. (Build arguments and variables would be in the image's history.)
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, cwd=folder
    )
    settings: dict[str, str] = {}
    mounts: list[str] = []
    for line in done.stdout.splitlines():  # global.cert='...' or :env:.cert='...': the environment wins in pip, too
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if key.startswith(":env:") or name not in settings:
            settings[name] = value.strip("'\"")
    certificates = settings.pop("cert", "") or os.environ.get("SSL_CERT_FILE", "")
    if certificates and Path(certificates).is_file():
        # At the place of the image's own bundle, where others than pip look, too.
        mounts += ["--volume", f"{Path(certificates).resolve()}:/etc/ssl/certs/ca-certificates.crt:ro"]
        settings["cert"] = "/etc/ssl/certs/ca-certificates.crt"
    links = settings.pop("find-links", "").split()
    for number, link in enumerate(links):
        if Path(link).is_dir():
            mounts += ["--volume", f"{link}:/mnt/wheels-{number}:ro"]
            links[number] = f"/mnt/wheels-{number}"
    if links:
        settings["find-links"] = " ".join(links)
    kept = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert", "find-links", "default-timeout", "timeout")
    lines = [f"{name} = {settings[name]}" for name in kept if settings.get(name)]
    if lines:
        config = folder / "pip.conf"
        config.write_text("\n".join(["[global]", *lines, ""]))
        mounts += ["--volume", f"{config}:/etc/pip.conf:ro"]
    return mounts


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Two sessions of tests would build the same image twice, and fight over the store."""
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob("build-*/"):  # of a build that was killed
            with suppress(OSError):
                shutil.rmtree(left)
        yield


if __name__ == "__main__":  # ahead of the tests that install them: PYTHONPATH=tests python -m cluster.images
    for each in installed_images():
        log(str(each))
