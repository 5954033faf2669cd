"""Random faults, ``TANDEM_SOAK`` of them, and as many steps without any; other seeds than the ordinary tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * 3600)]

FAULTS = int(os.environ.get("TANDEM_SOAK", "0"))
STEPS = 200
"""Of one pair."""


def _lockstep() -> Any:
    path = Path(__file__).parents[1] / "integration" / "test_lockstep.py"
    spec = importlib.util.spec_from_file_location("lockstep", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("first", range(0, FAULTS, STEPS))
def test_random_faults_are_found_alike_in_all_modes(first: int) -> None:
    _lockstep().check_random_faults(min(STEPS, FAULTS - first), seed=1_000_000 + first)


@pytest.mark.parametrize("first", range(0, FAULTS, STEPS))
def test_null_steps_mismatch_nowhere(first: int) -> None:
    _lockstep().check_null_steps(min(STEPS, FAULTS - first))
