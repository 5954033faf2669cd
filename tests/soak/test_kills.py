"""`kill -9` of everything, ``TANDEM_SOAK`` times, with other seeds than the ordinary tests."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervised import Home, new_home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def _chaos() -> Any:
    path = Path(__file__).parents[1] / "integration" / "test_chaos.py"
    spec = importlib.util.spec_from_file_location("chaos", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chaos = _chaos()
KILLS = int(os.environ.get("TANDEM_SOAK", "0"))


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with new_home() as home:
        yield home


@pytest.mark.parametrize(("target", "seed"), chaos.rounds(KILLS))
def test_a_kill_loses_and_doubles_nothing(home: Home, target: str, seed: int):
    chaos.kill(home, target, random.Random(f"soak/{target}/{seed}"))
