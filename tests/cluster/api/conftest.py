"""A namespace of its own on the API server for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.api.hands import Hands
from cluster.handle import ApiServer


@pytest.fixture
def hands(api_server: ApiServer, database_url: str) -> Iterator[Hands]:
    found = Hands(api_server, database_url)
    yield found
    found.close()


@pytest.fixture
def pair(hands: Hands) -> Hands:
    """A quarantined node and a healthy one."""
    hands.node("sick", cordoned=True)
    hands.node("well")
    return hands
