"""Which folders of a node a pair may mount. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.pairrun.spec import PairRunSpec


def forbidden(spec: PairRunSpec, allowed: Sequence[str]) -> str | None:
    """Why a spec's volumes may not be mounted; None if they may.

    Args:
        spec: the request.
        allowed: folders of a node below which pairs may mount.
    """
    for volume in spec.template.volumes:
        if volume.host_path is not None and not _below(volume.host_path, allowed):
            return f"hostPath {volume.host_path}: allowed here are {_listed(allowed)}"
    return None


def _below(path: str, allowed: Sequence[str]) -> bool:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return False
    return any(parts[: len(root)] == root for root in ([p for p in a.split("/") if p] for a in allowed))


def _listed(paths: Sequence[str]) -> str:
    return "none (chart value worker.allowedHostPaths)" if not paths else f"only folders below {', '.join(paths)}"
