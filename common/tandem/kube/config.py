"""Which cluster: kubeconfig files and contexts as kubectl has them, or the service account of a pod."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tandem.errors import SetupError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
POOL = 32
"""Connections kept: every informer holds one, every worker of the controller uses one."""


@dataclass(frozen=True, slots=True)
class Access:
    """A cluster and how to reach it."""

    api: ApiClient
    namespace: str
    """The context's, or the pod's own; ``default`` without either."""


def access(kubeconfig: str | None = None, context: str | None = None) -> Access:
    """The cluster that kubectl would talk to.

    ``kubeconfig`` (one file), else the files that the variable KUBECONFIG lists, else ``~/.kube/config``, else, in a
    pod, its service account.

    Raises:
        SetupError: no configuration, no such context, or it cannot be read; or the package ``kubernetes`` is missing.
    """
    package = _package()
    paths = files(kubeconfig)
    if not paths:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            return in_cluster()
        raise SetupError(
            "no kubeconfig: set KUBECONFIG or --kubeconfig to a file that `kubectl --kubeconfig FILE get nodes` can use"
        )
    current, contexts = _contexts(paths)
    chosen = context or current
    shown = ":".join(map(str, paths))
    if not chosen:
        mend = f"choose one with --context ({', '.join(contexts)})" if contexts else "it holds no context at all"
        raise SetupError(f"{shown} names no current context: {mend}")
    if chosen not in contexts:
        known = ", ".join(contexts) or "none"
        raise SetupError(f"there is no context {chosen!r} in {shown}: choose one of them with --context ({known})")
    configuration = package.client.Configuration()
    try:
        package.config.load_kube_config(
            config_file=os.pathsep.join(map(str, paths)), context=chosen, client_configuration=configuration
        )
    except Exception as error:  # the loader raises whatever its readers, subprocesses and decoders do
        raise SetupError(f"the context {chosen!r} of {shown} cannot be used ({_line(error)})") from None
    return Access(_client(package, configuration), contexts[chosen] or "default")


def in_cluster() -> Access:
    """The cluster of the pod that this process runs in.

    Raises:
        SetupError: it runs in none.
    """
    package = _package()
    configuration = package.client.Configuration()
    try:
        package.config.load_incluster_config(client_configuration=configuration)
    except Exception as error:
        raise SetupError(
            f"the pod's service account cannot be used ({_line(error)}): is automountServiceAccountToken off?"
        ) from None
    namespace = NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.exists() else "default"
    return Access(_client(package, configuration), namespace)


def files(kubeconfig: str | None = None) -> list[Path]:
    """The kubeconfig files that are read, in order. One that is named must be there; of the list in KUBECONFIG those
    that exist count.

    Raises:
        SetupError: the named file is not there.
    """
    if kubeconfig is not None:
        path = Path(kubeconfig).expanduser()
        if not path.is_file():
            raise SetupError(f"the kubeconfig {path} is not there: give a file with --kubeconfig")
        return [path]
    if listed := os.environ.get("KUBECONFIG"):
        found = [Path(part).expanduser() for part in listed.split(os.pathsep) if part]
        there = [path for path in found if path.is_file()]
        if not there:
            raise SetupError(f"KUBECONFIG names no file that is there ({listed}): set it to one that is")
        return there
    path = Path("~/.kube/config").expanduser()
    return [path] if path.is_file() else []


def _contexts(paths: list[Path]) -> tuple[str, dict[str, str]]:
    """Current context, and context -> namespace. As with kubectl, the first file that sets a value wins; the package's
    own merging takes the current context of the last.
    """
    current = ""
    contexts: dict[str, str] = {}
    for path in paths:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise SetupError(f"the kubeconfig {path} cannot be read ({error.strerror})") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SetupError(f"the kubeconfig {path} is not YAML ({_line(error)})") from None
        if not isinstance(values, dict):
            raise SetupError(f"the kubeconfig {path} is no mapping: give a kubeconfig file")
        current = current or str(values.get("current-context") or "")
        listed = values.get("contexts") or []
        if not isinstance(listed, list):
            raise SetupError(f"the kubeconfig {path}: contexts is no list: give a kubeconfig file")
        for entry in listed:
            if isinstance(entry, dict) and isinstance(entry.get("name"), str):
                contexts.setdefault(entry["name"], str((entry.get("context") or {}).get("namespace") or ""))
    return current, contexts


def _client(package: Any, configuration: Any) -> Any:
    configuration.connection_pool_maxsize = POOL
    # A broken connection is the caller's to see: it knows whether repeating is safe, and how long it may take.
    configuration.retries = False
    api = package.client.ApiClient(configuration)
    api.user_agent = "tandem"
    return api


def _package() -> Any:
    try:
        import kubernetes.client
        import kubernetes.config
    except ImportError as error:
        raise SetupError(
            f"this command needs the package kubernetes ({error}): "
            "install tandem-sdc[controller] (from a checkout: pip install -e '.[controller]')"
        ) from None
    return kubernetes


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
