"""Four virtual CPU devices for every test that runs JAX in this process; must be set before jax is imported."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from databases import fresh_database
from plugins import compiled

pytest_plugins = ["plugins.parts"]

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}".strip()
# XLA:CPU runs the devices of one launch, and the dispatch of the next, on one pool. With fewer than two threads per
# device, ranks that wait in a collective can hold every thread that the missing rank needs, for ever.
os.environ.setdefault("PJRT_NPROC", "8")

# A job in the background of a script ignores SIGINT, and so would every program that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
compiled.start()
# How long an example takes says how busy the machine is, and nothing else. A check of one change draws the examples
# that the change before it passed; whoever runs the tests by hand draws new ones.
settings.register_profile(
    "tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("TANDEM_SAME_EXAMPLES") == "1",
)  # fmt: skip
settings.load_profile("tandem")
_home: Path | None = None


def pytest_configure() -> None:
    """No test may touch the user's own data folder: one that names none gets the session's."""
    global _home
    _home = _open_folder()
    os.environ["TANDEM_HOME"] = str(_home)


def pytest_unconfigure() -> None:
    compiled.end()
    if _home is not None:
        shutil.rmtree(_home, ignore_errors=True)


@pytest.fixture(scope="session")
def database_server() -> Iterator[str]:
    """URL of a migrated database on one embedded PostgreSQL for the whole session; the template of every test's own."""
    from tandem.db.embedded import embedded_database

    home = _open_folder()
    with embedded_database(home=home) as url:
        yield url
    shutil.rmtree(home)


@pytest.fixture
def database_url(database_server: str) -> Iterator[str]:
    """URL of a fresh database, schema at head."""
    with fresh_database(database_server) as url:
        yield url


@pytest.fixture(scope="module")
def database(database_server: str) -> Iterator[str]:
    """URL of a fresh database that the tests of a module share."""
    with fresh_database(database_server) as url:
        yield url


@pytest.fixture
def tandem_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder of the test's own, in ``TANDEM_HOME``; other users can enter it, as PostgreSQL must for root."""
    home = _open_folder()
    monkeypatch.setenv("TANDEM_HOME", str(home))
    yield home
    shutil.rmtree(home)


def _open_folder() -> Path:
    """Pytest's own temporary folders are closed to the user that runs PostgreSQL for root."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-test-"))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiled programs end with the module that uses them, also those that it caches: each holds dozens of mappings,
    of which a process may have 65,530, and XLA crashes where it gets no more."""
    yield
    if "jax" in sys.modules:
        for each in vars(request.module).values():
            if callable(clear := getattr(each, "cache_clear", None)):
                clear()
        sys.modules["jax"].clear_caches()
        gc.collect()
