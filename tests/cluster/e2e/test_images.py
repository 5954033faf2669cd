"""Tandem's images, read from archives: what they say of themselves, how large they are, whether they are made alike."""

from __future__ import annotations

import hashlib
import json
import stat
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from cluster.images import built_anew, installed_images
from tandem import __version__

pytestmark = [pytest.mark.needs("machines"), pytest.mark.slow, pytest.mark.timeout(1800)]
SIZES = {"controller": 510, "api": 801, "worker": 1058}
"""MB, as measured, with a base of 203; the worker is that for CPUs."""
OURS = ("opt/", "usr/local/bin/")
"""Folders of what the recipe adds to its base."""


@dataclass(frozen=True)
class Entry:
    """What an image holds at a path, but for its date."""

    kind: bytes
    mode: int
    owner: tuple[int, int]
    link: str
    sha256: str


@contextmanager
def opened(archive: Path) -> Iterator[tuple[dict[str, Any], list[tarfile.TarFile]]]:
    """An image's configuration, and its layers from the lowest on."""
    with ExitStack() as stack:
        tar = stack.enter_context(tarfile.open(archive))

        def read(name: str) -> IO[bytes]:
            member = tar.extractfile(name)
            assert member is not None
            return member

        (manifest,) = json.load(read("manifest.json"))
        layers = [stack.enter_context(tarfile.open(fileobj=read(name))) for name in manifest["Layers"]]
        yield json.load(read(manifest["Config"])), layers


def contents(archive: Path) -> dict[tuple[int, str], Entry]:
    """Every entry of every layer."""
    found = {}
    with opened(archive) as (_, layers):
        for number, layer in enumerate(layers):
            for member in layer:
                data = layer.extractfile(member) if member.isfile() else None
                digest = hashlib.file_digest(data, "sha256").hexdigest() if data is not None else ""
                owner = (member.uid, member.gid)
                found[number, member.name] = Entry(member.type, member.mode, owner, member.linkname, digest)
    return found


def installed(service: str) -> Path:
    """The archive of an image as the nodes of these tests are given it."""
    (archive,) = [path for path in installed_images() if path.name.startswith(f"{service}-")]
    return archive


@pytest.mark.parametrize("service", SIZES)
def test_the_images_say_what_they_are_and_never_run_as_root(service: str) -> None:
    """Labels by which an SBOM names them, and their user. The chart's pods have a read-only root besides."""
    with opened(installed(service)) as (image, layers):
        config = image["config"]
        ours = [m for layer in layers for m in layer if m.name.startswith(OURS) and not m.issym()]
    assert config["User"] == "65532:65532"
    label = "org.opencontainers.image."
    labels = {k.removeprefix(label): v for k, v in config["Labels"].items() if k.startswith(label)}
    assert labels["title"] == f"tandem-{service}"
    assert {"description", "licenses", "revision", "source", "version", "base.name"} <= set(labels)
    assert labels["version"] == __version__
    assert not any("SECRET" in line or "TOKEN" in line for line in config["Env"])
    assert len(ours) > 1000
    theirs = [m.name for m in ours if (m.uid, m.gid) != (0, 0) or m.mode & (stat.S_IWGRP | stat.S_IWOTH)]
    assert theirs == [], "of another than root, or for others to write"


@pytest.mark.parametrize(("service", "size"), SIZES.items())
def test_the_images_have_not_grown(service: str, size: int) -> None:
    """A package more, a cache that is kept, a second copy in a layer: each is a quarter soon, and is seen here."""
    assert installed(service).stat().st_size < 1.25 * size * 1e6


def test_the_same_recipe_makes_the_same_files_another_time_and_from_another_clone() -> None:
    """Every path, mode, owner and byte is what the nodes were given, though no layer is shared. Which target is no
    matter: all are made by the same steps, and this one is the quickest.
    """
    one = contents(installed("controller"))
    with built_anew("controller", "localhost/tandem-controller:anew") as archive:
        other = contents(archive)
    assert len(one) > 10_000
    unlike = {where: (one.get(where), other.get(where)) for where in one.keys() | other.keys()}
    assert {where: both for where, both in unlike.items() if both[0] != both[1]} == {}
