"""What the tests of real parts share beside `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from tandem.db.engine import connect


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """Of the test's own database."""
    engine = connect(database_url)
    yield engine
    engine.dispose()
