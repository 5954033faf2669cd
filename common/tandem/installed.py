"""What computes here: the code and the machine that a run's parity names, as far as it is known without jax."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata, util
from pathlib import Path

from tandem import __version__

PACKAGES = ("tandem", "tandem_worker")
NOT_USED = "not used"
"""Parity's word for the host's CPU where an accelerator computes."""


@cache
def image_digest() -> str:
    """On one machine, in place of a container image's digest: a hash of the installed Tandem files."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        found = util.find_spec(package)
        for root in map(Path, (found.submodule_search_locations or ()) if found else ()):
            for path in sorted(root.rglob("*")):
                if path.is_file() and path.suffix in (".py", ".toml"):
                    digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cpu_model() -> str:
    """Host CPU model and instruction set, which XLA:CPU compiles for."""
    source, wanted = Path("/proc/cpuinfo"), {}
    if not source.exists():
        return f"{platform.machine()} {platform.processor()}"
    for line in source.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "flags", "Features") and key.strip() not in wanted:
            wanted[key.strip()] = value.strip()
    told = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()
    return f"{platform.machine()} {wanted.get('model name', '')} {told[:16]}"


def here() -> dict[str, str]:
    """The parity fields that a run made now would have, those that need no jax to know."""
    versions = {"tandem": __version__, "python": platform.python_version()}
    for package in ("jax", "jaxlib"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return versions | {"image": image_digest(), "cpu": cpu_model()}


def made_here(parity: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether a run with this parity computed with the code and on the CPU of ``now`` (`here`)."""
    return all(parity.get(k) == v or (k == "cpu" and parity.get(k) == NOT_USED) for k, v in now.items())
