"""One installation for all tests of this folder that ask for it."""

from __future__ import annotations

import pytest

from cluster.e2e.installation import Tandem
from cluster.handle import BareCluster
from cluster.outside import Outside


@pytest.fixture(scope="session")
def tandem(cluster: BareCluster | Outside, tmp_path_factory: pytest.TempPathFactory) -> Tandem:
    """Tandem by its chart, with its trial database."""
    found = Tandem(cluster, tmp_path_factory.mktemp("tandem"))
    found.install()
    return found
